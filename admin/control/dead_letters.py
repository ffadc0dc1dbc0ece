"""Dead letters: a filter for them, and the message with which each is sent back to its source topic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from broker.entries.message_ids import MessageIdError, MessageRef, NumberError, parse_number, parse_triplet
from broker.position import Position
from broker.protocol.building import OutgoingMessage, encoded_property
from broker.protocol.entries import Message
from broker.protocol.reading import texts_of
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from conf.partitions import java_string_hash, partition_name
from conf.settings import Subscription
from tracker.properties import (
    ATTEMPT,
    DEAD_LETTER_OF,
    KEY_ENCODING,
    MESSAGE_ID,
    REASONS,
    REDRIVE_BY,
    REDRIVE_REQUEST,
    RESERVED_PREFIX,
    RETRY_OF,
    RETRY_SUBSCRIPTION,
    SOURCE,
)

# The sequence id with which a dead letter is sent back rises with its position in its topic partition:
#
#     bit    63   62 ........ 32   31 ......... 10   9 ........ 0
#          |  0 |   ledger id    |    entry id     | batch index + 1 |
_LEDGER_BITS, _ENTRY_BITS, _BATCH_BITS = 31, 22, 10

_Int64 = Annotated[int, Field(ge=0, lt=2**63)]


class DeadLetterFilter(BaseModel):
    """A filter for dead letters: all conditions given must hold. Times are ms since the epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True)

    subscription: Annotated[str, Field(min_length=1, description="The subscription with the dead letters.")]
    key: str | None = None
    properties: dict[str, str] = {}
    message_ids: Annotated[
        list[str] | None, Field(max_length=1_000, description="delaylake.messageId: ledger:entry[:batchIndex].")
    ] = None
    reason: Annotated[str | None, Field(min_length=1, description="A text in one of the reasons.")] = None
    published_from: Annotated[_Int64 | None, Field(description="Became dead letters then or later, ms.")] = None
    published_before: Annotated[_Int64 | None, Field(description="Became dead letters before, ms.")] = None

    @field_validator("message_ids")
    @classmethod
    def _can_be_read(cls, texts: list[str] | None) -> list[str] | None:
        for text in texts or ():
            try:
                parse_triplet(text)
            except MessageIdError as error:
                raise ValueError(str(error)) from None
        return texts

    @property
    def refs(self) -> dict[tuple[int, int], set[int]]:
        """The batch indexes of `message_ids` (-1: the whole entry), by ledger and entry."""
        found: dict[tuple[int, int], set[int]] = {}
        for ref in map(parse_triplet, self.message_ids or ()):
            found.setdefault((ref.ledger_id, ref.entry_id), set()).add(ref.batch_index)
        return found


@dataclass(frozen=True)
class DeadLetter:
    """A message in a topic of dead letters, as the job sent it there. Times are ms since the epoch.

    Attributes:
        ref: id of the message in its source topic.
        subscription: the subscription whose consumers failed on it; None: unknown, as an older job did not write it.
        properties: the message's properties without the service's.
        key: the key; None: the message has none.
        is_key_base64: whether `key` is the base64 of a key that is bytes.
        ordering_key: the ordering key; None: the message has none.
        payload: the payload; None: the message has none.
        schema_version: version in the topic of dead letters, as messages have it; empty: none.
    """

    source: str
    ref: MessageRef
    subscription: str | None
    attempt: str
    reasons: list[str]
    key: str | None
    is_key_base64: bool
    ordering_key: bytes | None
    properties: dict[str, str]
    payload: bytes | None
    event_time: int
    publish_time: int
    schema_version: bytes

    @classmethod
    def of(cls, message: Message, metadata: MessageMetadata) -> DeadLetter | None:
        """Makes a dead letter of a message and the metadata of its entry; None: it is none of the job's."""
        try:
            properties, key = texts_of(message), None if message.key is None else message.key.decode()
            ref = parse_triplet(properties[MESSAGE_ID])
            source = properties[SOURCE]
        except (KeyError, MessageIdError, UnicodeDecodeError):
            return None
        return cls(
            source,
            ref,
            properties.get(DEAD_LETTER_OF),
            properties.get(ATTEMPT, ""),
            _listed(properties.get(REASONS)),
            key,
            message.is_key_base64 or KEY_ENCODING in properties,
            message.ordering_key,
            {name: value for name, value in properties.items() if not name.startswith(RESERVED_PREFIX)},
            message.payload,
            message.event_time,
            metadata.publish_time,
            metadata.schema_version,
        )

    def target(self, n_partitions: int) -> str | None:
        """Returns the partition of the source topic to which the dead letter is sent back; None: there is none.

        Args:
            n_partitions: of the source topic; 0: it is not partitioned.
        """
        partition = self.ref.partition
        if partition < 0 < n_partitions:  # the message was imported
            partition = self.ref.entry_id if self.key is None else java_string_hash(self.key)
            partition %= n_partitions
        return None if partition >= n_partitions and partition >= 0 else partition_name(self.source, partition)

    @property
    def n_shown_bytes(self) -> int:
        """About the bytes of `to_json`."""
        texts = [self.key or "", *self.reasons, *(text for pair in self.properties.items() for text in pair)]
        return sum(map(len, texts))

    def matches(self, wanted: DeadLetterFilter, refs: dict[tuple[int, int], set[int]]) -> bool:
        """Whether a filter's conditions hold, without that on the subscription.

        Args:
            refs: the filter's `refs`, computed once for all dead letters.
        """
        indexes = refs.get((self.ref.ledger_id, self.ref.entry_id), set())
        return (
            (wanted.message_ids is None or bool(indexes & {-1, max(self.ref.batch_index, 0), self.ref.batch_index}))
            and wanted.key in (None, self.key or "")
            and all(self.properties.get(name) == value for name, value in wanted.properties.items())
            and (wanted.reason is None or any(wanted.reason in reason for reason in self.reasons))
            and (wanted.published_from is None or self.publish_time >= wanted.published_from)
            and (wanted.published_before is None or self.publish_time < wanted.published_before)
        )

    def to_json(self, subscription: str) -> dict[str, Any]:
        """Returns the dead letter as a dry run shows it."""
        return {
            "messageId": str(self.ref),
            "subscription": subscription,
            "key": self.key or None,
            "properties": self.properties,
            "attempt": _number(self.attempt),
            "reasons": self.reasons,
            "publishTime": self.publish_time,
        }

    def sent_back(self, subscription: str, request_id: str, issued_by: str, sequence_id: int) -> OutgoingMessage:
        """Builds the message that goes back to the source topic."""
        properties = self.properties | {
            RETRY_OF: str(self.ref),
            RETRY_SUBSCRIPTION: subscription,
            REDRIVE_REQUEST: request_id,
            REDRIVE_BY: issued_by,
        }
        return OutgoingMessage(
            sequence_id,
            self.payload,
            [encoded_property(name, value) for name, value in properties.items()],
            None if self.key is None else self.key.encode(),
            self.is_key_base64,
            self.ordering_key,
            self.event_time,
        )


def belongs_to(letter: DeadLetter, subscription: Subscription, others: tuple[Subscription, ...]) -> bool:
    """Whether a dead letter belongs to a subscription.

    If the dead letter does not name one, it belongs to the only subscription with that destination.

    Args:
        subscription: the subscription to whose topic of dead letters the letter was sent.
        others: all subscriptions of the source topic.
    """
    if letter.subscription is not None:
        return letter.subscription == subscription.name
    return sum(one.destination == subscription.destination for one in others) == 1


def sequence_id(entry: Position, batch_index: int) -> int:
    """Returns the sequence id with which a dead letter is sent back; it rises with the position.

    Args:
        entry: of the dead letter; of a chunked one its last.
        batch_index: its place in its batch; -1: the entry is one message.

    Raises:
        OverflowError: the ids of ledger, entry or batch index are too large.
    """
    ledger_id, entry_id = entry
    index = batch_index + 1
    if ledger_id >> _LEDGER_BITS or entry_id >> _ENTRY_BITS or index >> _BATCH_BITS:
        raise OverflowError(f"{ledger_id}:{entry_id}:{batch_index} has too large a number to be re-driven")
    return ((ledger_id << _ENTRY_BITS | entry_id) << _BATCH_BITS | index) + 1


def _listed(text: str | None) -> list[str]:
    try:
        found = json.loads(text or "[]")
        texts = [str(one) for one in found] if isinstance(found, list) else []
    except (ValueError, RecursionError):
        return []
    return [one.encode(errors="replace").decode() for one in texts]  # half a surrogate can't be in an answer


def _number(text: str) -> int | None:
    try:
        return parse_number(text)
    except NumberError:
        return None
