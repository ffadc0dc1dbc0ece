"""Finds whether messages' keys are bytes: Pulsar's client does not show it, the broker's admin API does."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterator

from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from broker.pulsar_admin.silent_producers import MOST_PRODUCERS, SilentProducers
from broker.remembered import Remembered
from tracker.wire.entry_pb2 import SingleMessageMetadata

_log = logging.getLogger(__name__)

BASE64 = "base64"

_IS_BASE64 = "X-Pulsar-partition-key-b64-encoded"
_BATCH_SIZE = "X-Pulsar-num-batch-message"
_IS_ENCRYPTED = "X-Pulsar-Is-Encrypted"


class KeyEncodings:
    """The encodings of the keys of one topic partition's messages. Not safe in several threads.

    A call takes the broker some milliseconds. So it is asked once for each producer, about the first message whose key
    could be bytes. If a producer sends keys of both kinds, some are taken for the wrong kind. If the broker can't
    describe an entry, its key is taken for text.
    """

    def __init__(self, admin: AdminClient, topic: str) -> None:
        self._admin = admin
        self._topic = topic
        self._sends_bytes: Remembered[str, bool] = Remembered(MOST_PRODUCERS)  # by name of the producer
        self._silent_producers = SilentProducers()

    def of(self, key: str, producer: str, ledger_id: int, entry_id: int, batch_index: int) -> str | None:
        """Returns BASE64 if a message's key is bytes; None: it is text, or unknown.

        Args:
            key: the key as Pulsar's client shows it: bytes as base64.
            producer: the name of the message's producer.
            ledger_id: the message's ledger.
            entry_id: its entry.
            batch_index: its index in the entry; -1: the entry is one message.

        Raises:
            PulsarError: the broker does not answer.
        """
        if len(key) % 4 or self._sends_bytes.get(producer) is False or not _is_base64(key):
            return None
        if producer not in self._sends_bytes:
            if self._silent_producers.is_silent(producer):
                return None
            try:
                answers = self._ask(ledger_id, entry_id)
            except UnreadableEntryError as error:
                _log.warning("the key %s of producer %s is taken for text: %s", key, producer, error)
                self._silent_producers.add(producer)
                return None
            self._silent_producers.remove(producer)
            if max(batch_index, 0) >= len(answers):
                return None
            self._sends_bytes[producer] = answers[max(batch_index, 0)]
        return BASE64 if self._sends_bytes[producer] else None

    def _ask(self, ledger_id: int, entry_id: int) -> list[bool]:
        """Returns for each message of an entry whether its key is bytes; empty: unknown."""
        answer = self._admin.entry(self._topic, ledger_id, entry_id)
        if answer is None:
            return []
        headers, body = answer
        if _BATCH_SIZE not in headers:
            return [headers.get(_IS_BASE64) == "true"]
        return [] if headers.get(_IS_ENCRYPTED) == "true" else list(_of_batch(body, int(headers[_BATCH_SIZE])))


def _of_batch(body: bytes, n: int) -> Iterator[bool]:
    """Yields for each message of a batch whether its key is bytes.

    Args:
        body: for each message the length of its metadata (4 bytes, big-endian), the metadata, and the payload.
        n: the number of messages.
    """
    at = 0
    for _ in range(n):
        start = at + 4
        end = start + int.from_bytes(body[at:start], "big")
        metadata = SingleMessageMetadata.FromString(body[start:end])
        yield metadata.partition_key_b64_encoded
        at = end + metadata.payload_size


def _is_base64(key: str) -> bool:
    """Whether a key is canonical base64."""
    try:
        return base64.b64encode(base64.b64decode(key, validate=True)).decode() == key
    except (binascii.Error, ValueError):
        return False
