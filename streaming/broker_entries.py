"""What the client does not tell of a message's keys, by the broker's admin API: an entry a call."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import NamedTuple

from proto.entry_pb2 import SingleMessageMetadata
from streaming.pulsar_client import AdminClient

BASE64 = "base64"

_IS_BASE64 = "X-Pulsar-partition-key-b64-encoded"
_ORDERING_KEY = "X-Pulsar-Base64-ordering-key"
_BATCH_SIZE = "X-Pulsar-num-batch-message"
_IS_ENCRYPTED = "X-Pulsar-Is-Encrypted"


class Keys(NamedTuple):
    """Of a message."""

    is_base64: bool  # the key is bytes, of which the client has the base64
    ordering_key: bytes | None


class BrokerEntries:
    """The keys of one topic partition's messages. Not safe in several threads.

    A call takes the broker some milliseconds. So whether keys are bytes is asked once for each of the topic's
    producers, of its first message whose key could be; what a producer sends that has keys of both kinds may be taken
    for the wrong one.
    """

    def __init__(self, admin: AdminClient, topic: str) -> None:
        self._admin = admin
        self._topic = topic
        self._last: tuple[tuple[int, int], list[Keys]] | None = None
        self._sends_bytes: dict[str, bool] = {}  # by producer's name

    def ordering_key(self, ledger_id: int, entry_id: int, batch_index: int) -> bytes | None:
        """A message's ordering key; None: it has none, or the broker does not have the entry, or can't read it.

        Args:
            batch_index: in the entry; -1: the entry is one message.

        Raises:
            PulsarError: the broker does not answer.
        """
        keys = self._keys(ledger_id, entry_id, batch_index)
        return None if keys is None else keys.ordering_key

    def key_encoding(self, key: str, producer: str, ledger_id: int, entry_id: int, batch_index: int) -> str | None:
        """BASE64, where the key is bytes; None: it is text, or nobody can tell.

        Raises:
            PulsarError: the broker does not answer.
        """
        if len(key) % 4 or not _is_base64(key):
            return None
        sends_bytes = self._sends_bytes.get(producer)
        if sends_bytes is None:
            keys = self._keys(ledger_id, entry_id, batch_index)
            if keys is None:
                return None
            sends_bytes = self._sends_bytes[producer] = keys.is_base64
        return BASE64 if sends_bytes else None

    def _keys(self, ledger_id: int, entry_id: int, batch_index: int) -> Keys | None:
        entry = (ledger_id, entry_id)
        if self._last is None or self._last[0] != entry:
            self._last = (entry, self._ask(ledger_id, entry_id))
        of_entry = self._last[1]
        i = max(batch_index, 0)
        return of_entry[i] if i < len(of_entry) else None

    def _ask(self, ledger_id: int, entry_id: int) -> list[Keys]:
        """The keys of an entry's messages; empty where they can't be told."""
        answer = self._admin.entry(self._topic, ledger_id, entry_id)
        if answer is None:
            return []
        headers, body = answer
        if _BATCH_SIZE in headers:
            is_readable = headers.get(_IS_ENCRYPTED) != "true"
            return list(batch_keys(body, int(headers[_BATCH_SIZE]))) if is_readable else []
        ordering_key = headers.get(_ORDERING_KEY)
        return [
            Keys(headers.get(_IS_BASE64) == "true", None if ordering_key is None else base64.b64decode(ordering_key))
        ]


def batch_keys(body: bytes, n: int) -> Iterator[Keys]:
    """The keys of the messages of a batch.

    Args:
        body: for each message the length of its metadata, four bytes, the metadata, and its payload.
    """
    at = 0
    for _ in range(n):
        start = at + 4
        end = start + int.from_bytes(body[at:start], "big")
        metadata = SingleMessageMetadata.FromString(body[start:end])
        yield Keys(
            metadata.partition_key_b64_encoded, metadata.ordering_key if metadata.HasField("ordering_key") else None
        )
        at = end + metadata.payload_size


def _is_base64(key: str) -> bool:
    """Whether the key is what bytes are encoded as."""
    try:
        return base64.b64encode(base64.b64decode(key, validate=True)).decode() == key
    except (binascii.Error, ValueError):
        return False
