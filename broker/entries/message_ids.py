"""Reads message ids: `ledger:entry[:batchIndex]`, `ledger:entry:partition:batchIndex`, or base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import DelayLakeError
from tracker.properties import MessagePosition

if TYPE_CHECKING:
    import pulsar

MAX_ID_BYTES = 128  # Pulsar's longest id, with an ack set, is well below

MAX_INT64 = 2**63 - 1
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIELDS = {
    1: "ledgerId",
    2: "entryId",
    3: "partition",
    4: "batch_index",
    5: "ack_set",
    6: "batch_size",
    7: "first_chunk_message_id",
}
_INT32 = (3, 4, 6)
_ACK_SET, _FIRST_CHUNK = 5, 7


class MessageIdError(DelayLakeError):
    """A message id can't be read. The error's message is one line."""


class NumberError(MessageIdError):
    """A part of a message id is not a whole number, or too long."""


@dataclass(frozen=True)
class MessageRef:
    """The id of a message, or with batch_index -1 of a whole entry. Partition -1: none, or unknown."""

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1

    def __str__(self) -> str:
        return str(MessagePosition(self.ledger_id, self.entry_id, self.partition, self.batch_index))

    @classmethod
    def of(cls, message_id: pulsar.MessageId) -> MessageRef:
        """Makes a MessageRef of an id of Pulsar's client."""
        return cls(message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())


def parse(text: str) -> MessageRef:
    """Reads a message id in any of the forms.

    Raises:
        MessageIdError: the text is none of them, or has a number out of range.
    """
    return parse_triplet(text) if ":" in text else parse_base64(text)


def parse_triplet(text: str) -> MessageRef:
    """Reads `ledger:entry`, `ledger:entry:batchIndex`, or `ledger:entry:partition:batchIndex` as `produce` prints it.

    A negative batch index or partition means none.

    Raises:
        MessageIdError: the text is none of these, or has a number out of range.
    """
    parts = text.strip().split(":")
    try:
        numbers = [parse_number(part) for part in parts]
    except NumberError:
        raise MessageIdError(f"no message id: {text[:80]!r} (ledger:entry[:batchIndex])") from None
    if len(numbers) == 2:
        return message_ref(numbers[0], numbers[1], -1, -1)
    if len(numbers) == 3:
        return message_ref(numbers[0], numbers[1], -1, numbers[2])
    if len(numbers) == 4:
        return message_ref(numbers[0], numbers[1], numbers[2], numbers[3])
    raise MessageIdError(f"no message id: {text[:80]!r} (ledger:entry[:batchIndex])")


def parse_base64(text: str) -> MessageRef:
    """Reads the base64 of Pulsar's MessageIdData, as `MessageId.toByteArray()` gives it, with or without padding.

    Raises:
        MessageIdError: the text is not base64, or not exactly one message id.
    """
    text = text.strip()
    try:
        data = base64.b64decode(text if "=" in text else text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MessageIdError(f"no base64: {text[:80]!r}") from None
    return decode(data)


def decode(data: bytes) -> MessageRef:
    """Reads the bytes of a MessageIdData, strictly: known fields once each, nothing after them.

    Raises:
        MessageIdError: they are not exactly one message id.
    """
    if not data or len(data) > MAX_ID_BYTES:
        raise MessageIdError(f"a message id has 1 to {MAX_ID_BYTES} bytes, not {len(data)}")
    found: dict[int, int] = {}
    for field, value in _fields(data):
        if field == _ACK_SET:
            continue  # an ack set says which messages of a batch are left, not which one the id names
        if field in found:
            raise MessageIdError(f"a message id has its field {_FIELDS[field]} once")
        if field in _INT32 and not -(2**31) <= value < 2**31:
            raise MessageIdError(f"{_FIELDS[field]} {value} is out of range")
        found[field] = value
    if 1 not in found or 2 not in found:
        raise MessageIdError("a message id has a ledger id and an entry id")
    batch_index, batch_size = found.get(4, -1), found.get(6, 0)
    if batch_size < 0 or (batch_size and batch_index >= batch_size):
        raise MessageIdError(f"batch index {batch_index} of a batch of {batch_size}")
    if _FIRST_CHUNK in found and batch_index >= 0:
        raise MessageIdError("a message in chunks is in no batch")
    return message_ref(found[1], found[2], found.get(3, -1), batch_index)


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields the number and value of each field; the value of a field of bytes is their number.

    Raises:
        MessageIdError: the bytes end too early, or have another field.
    """
    at = 0
    while at < len(data):
        field, kind = data[at] >> 3, data[at] & 7
        value, at = _varint(data, at + 1)
        if kind == _LENGTH_DELIMITED and field in (_ACK_SET, _FIRST_CHUNK):
            start, at = at, at + value
            if not start <= at <= len(data):
                raise MessageIdError("the message id ends too early")
            _check_part(field, data[start:at])
        elif kind != _VARINT or field not in _FIELDS or field == _FIRST_CHUNK:
            raise MessageIdError("the bytes are no message id")
        yield field, value


def _check_part(field: int, part: bytes) -> None:
    if field == _FIRST_CHUNK:
        decode(part)
    else:
        at = 0
        while at < len(part):
            _, at = _varint(part, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for length in range(10):
        if at >= len(data):
            raise MessageIdError("the message id ends too early")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * length)
        if not byte & 0x80:
            if value >= 2**64:
                break
            return value - 2**64 if value > MAX_INT64 else value, at
    raise MessageIdError("the message id has a number of more than 64 bits")


def parse_number(part: str) -> int:
    """Reads a whole number of at most 19 digits.

    Raises:
        NumberError: the text is not such a number.
    """
    digits = part[1:] if part[:1] == "-" else part
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise NumberError(f"no whole number of at most 19 digits: {part[:80]!r}")
    return int(part)


def message_ref(ledger_id: int, entry_id: int, partition: int, batch_index: int) -> MessageRef:
    """Makes a MessageRef of numbers; a negative partition or batch index means none.

    Raises:
        MessageIdError: a number is out of range.
    """
    if not (0 <= ledger_id <= MAX_INT64 and 0 <= entry_id <= MAX_INT64):
        raise MessageIdError(f"ledger and entry ids must not be negative: {ledger_id}:{entry_id}")
    if partition > 2**31 - 1 or batch_index > 2**31 - 1:
        raise MessageIdError(f"partition {partition} or batch index {batch_index} is out of range")
    return MessageRef(ledger_id, entry_id, max(partition, -1), max(batch_index, -1))
