"""Dead letters: a filter for them, and the message with which each is sent back to its source topic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import _pulsar
import pulsar
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from broker.entries.message_ids import MessageIdError, MessageRef, parse_triplet
from conf.partitions import partition_name
from conf.settings import Subscription
from tracker.properties import (
    ATTEMPT,
    BASE64,
    DEAD_LETTER_OF,
    KEY_ENCODING,
    MESSAGE_ID,
    REASONS,
    REDRIVE_BY,
    REDRIVE_REQUEST,
    RESERVED_PREFIX,
    RETRY_OF,
    RETRY_SUBSCRIPTION,
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
        ordering_key: the ordering key; empty: none.
        payload: the payload; None: the message has none.
        schema_version: version in the topic of dead letters, as messages have it; empty: none.
    """

    source: str
    ref: MessageRef
    subscription: str | None
    attempt: str
    reasons: list[str]
    key: str
    is_key_bytes: bool
    ordering_key: bytes
    properties: dict[str, str]
    payload: bytes | None
    event_time: int
    publish_time: int
    schema_version: bytes

    @classmethod
    def of(cls, message: Any) -> DeadLetter | None:
        """Makes a dead letter of a message of Pulsar's client; None: it is not a dead letter of the job's."""
        try:
            properties, key = message.properties(), message.partition_key()
            ref = parse_triplet(properties[MESSAGE_ID])
            source = properties["delaylake.source"]
        except (KeyError, MessageIdError, UnicodeDecodeError):
            return None
        return cls(
            source,
            ref,
            properties.get(DEAD_LETTER_OF),
            properties.get(ATTEMPT, ""),
            _listed(properties.get(REASONS)),
            key,
            KEY_ENCODING in properties,
            _bytes_of(message.ordering_key),
            {name: value for name, value in properties.items() if not name.startswith(RESERVED_PREFIX)},
            None if message.has_null_value() else message.data(),
            message.event_timestamp(),
            message.publish_timestamp(),
            _bytes_of(message.schema_version),
        )

    @property
    def target(self) -> str:
        """The partition of the source topic to which the dead letter is sent back."""
        return partition_name(self.source, self.ref.partition)

    def matches(self, wanted: DeadLetterFilter, refs: dict[tuple[int, int], set[int]]) -> bool:
        """Whether a filter's conditions hold, without that on the subscription.

        Args:
            wanted: the filter.
            refs: the filter's `refs`, computed once for all dead letters.
        """
        indexes = refs.get((self.ref.ledger_id, self.ref.entry_id), set())
        return (
            (wanted.message_ids is None or bool(indexes & {-1, max(self.ref.batch_index, 0), self.ref.batch_index}))
            and wanted.key in (None, self.key)
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
            "attempt": int(self.attempt) if self.attempt.isdecimal() else None,
            "reasons": self.reasons,
            "publishTime": self.publish_time,
        }

    def sent_back(self, subscription: str, request_id: str, issued_by: str, sequence_id: int) -> _pulsar.Message:
        """Builds the message that goes back to the source topic."""
        properties = self.properties | {
            RETRY_OF: str(self.ref),
            RETRY_SUBSCRIPTION: subscription,
            REDRIVE_REQUEST: request_id,
            REDRIVE_BY: issued_by,
        }
        if self.is_key_bytes:
            properties[KEY_ENCODING] = BASE64
        builder = _pulsar.MessageBuilder()
        if self.payload is None:
            builder.set_null_value()
        else:
            builder.content(self.payload)
        for name, value in properties.items():
            builder.property(name, value)
        if self.key:
            builder.partition_key(self.key)
        if self.ordering_key:
            builder.ordering_key(self.ordering_key)
        if self.event_time:
            builder.event_timestamp(self.event_time)
        builder.sequence_id(sequence_id)
        return builder.build()


def belongs_to(letter: DeadLetter, subscription: Subscription, others: tuple[Subscription, ...]) -> bool:
    """Whether a dead letter belongs to a subscription.

    If the dead letter does not name one, it belongs to the only subscription with that destination.

    Args:
        letter: the dead letter.
        subscription: the subscription to whose topic of dead letters it was sent.
        others: all subscriptions of the source topic.
    """
    if letter.subscription is not None:
        return letter.subscription == subscription.name
    return sum(one.destination == subscription.destination for one in others) == 1


def sequence_id(message_id: pulsar.MessageId) -> int:
    """Returns the sequence id with which a dead letter is sent back; it rises with the position.

    Raises:
        OverflowError: the ids of ledger, entry or batch index are too large.
    """
    ledger, entry, index = message_id.ledger_id(), message_id.entry_id(), message_id.batch_index() + 1
    if ledger >> _LEDGER_BITS or entry >> _ENTRY_BITS or index >> _BATCH_BITS:
        raise OverflowError(f"{ledger}:{entry}:{index - 1} has too large a number to be re-driven")
    return int(((ledger << _ENTRY_BITS | entry) << _BATCH_BITS) | index) + 1


def _listed(text: str | None) -> list[str]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return [str(one) for one in found] if isinstance(found, list) else []


def _bytes_of(get: Any) -> bytes:
    """Returns the bytes of the text that a getter returns, also if it is not UTF-8."""
    try:
        return bytes(get(), "utf-8")
    except UnicodeDecodeError as error:
        return error.object
