"""Builds the messages for a destination: those of the source topic, with the delaylake properties added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from broker.protocol.building import OutgoingMessage, encoded_property
from conf.errors import DelayLakeError, one_line
from conf.message_size import FIELD_BYTES
from tracker.messages import MESSAGES
from tracker.properties import (
    ATTEMPT,
    BASE64,
    DEAD_LETTER_OF,
    DELIVER_AT,
    EXPIRES_AT,
    KEY_ENCODING,
    MESSAGE_ID,
    NOT_PASSED_ON,
    OCCURRENCE,
    REASON,
    REASONS,
    RETRY_OF,
    SHAPED_FROM,
    SOURCE,
    is_position,
    position_of,
)
from tracker.store import StateLostError

# A larger rejected message is sent without payload, keys and own properties, which the table `rejects` has. A larger
# retry is sent without the reasons, for which there may be no room.
MAX_REJECTED_BYTES = 1024 * 1024

_MAX_EVENT_TIME = (1 << 63) - 1
_MAX_REASON = 1_000  # characters
_MAX_REASON_BYTES = 4 * _MAX_REASON
_MAX_NAME = 100  # characters of a property's name in a reason
_ROWS_AT_ONCE = 10_000

Columns = Mapping[str, Sequence[Any]]


class UnsendableError(DelayLakeError):
    """A row can't become a message. The error's message names the field; one line."""


def delivered(
    columns: Columns, row: int, due: int, sequence_id: int, dead_letter_of: str | None = None
) -> OutgoingMessage:
    """Builds the message of a row of a release for a subscription's destination.

    Args:
        columns: of `tracker.messages.MESSAGES`, by name, each with the values of all rows.
        row: the index of the row.
        due: when the message is due, ms since the epoch.
        sequence_id: of the message.
        dead_letter_of: the subscription whose dead letter the message is; None: it is no dead letter.

    Raises:
        UnsendableError: a field has a value that no message can have.
    """
    properties = _properties(columns, row)
    if RETRY_OF in properties:
        for name in NOT_PASSED_ON:
            properties.pop(name, None)
    properties[DELIVER_AT] = str(due)
    if dead_letter_of is not None:
        properties[DEAD_LETTER_OF] = dead_letter_of
    if columns["attempt"][row] is not None:
        properties[ATTEMPT] = str(columns["attempt"][row])
        if content_bytes(columns, row) <= MAX_REJECTED_BYTES:
            properties[REASONS] = columns["retry_reasons"][row] or "[]"
    if columns["occurrence"][row] is not None:
        properties[OCCURRENCE] = str(columns["occurrence"][row])
    if dead_letter_of is not None and columns["key_encoding"][row] is not None:
        # Consumers have clients that do not show it.
        properties[KEY_ENCODING] = columns["key_encoding"][row]
    if columns["expires_at"][row] is not None:
        properties[EXPIRES_AT] = str(columns["expires_at"][row])
    if columns["shaped_from"][row] is not None:
        properties[SHAPED_FROM] = str(columns["shaped_from"][row])
    return _built(columns, row, properties, sequence_id, columns["payload"][row])


def rejected(columns: Columns, row: int, sequence_id: int, max_size: int) -> OutgoingMessage:
    """Builds the message of a row of a release for its source's rejects topic.

    Args:
        columns: of `tracker.messages.MESSAGES`, by name; the row's `reason` is not None.
        row: the index of the row.
        sequence_id: of the message.
        max_size: as `conf.message_size.max_size_bytes` returns it for the source topic.

    Returns:
        the message; only position and reason if it is larger, or has a field with a value that no message can have.
    """
    own = {
        SOURCE: columns["topic"][row],
        MESSAGE_ID: str(position_of(columns, row)),
        REASON: columns["reason"][row][:_MAX_REASON],
    }
    try:
        if content_bytes(columns, row) <= min(MAX_REJECTED_BYTES, max_size - _MAX_REASON_BYTES):
            return _built(columns, row, _properties(columns, row) | own, sequence_id, columns["payload"][row])
        return _built(columns, row, own, sequence_id, None, has_keys=False)
    except (MemoryError, StateLostError):
        raise
    except Exception:
        return OutgoingMessage(sequence_id, None, _encoded(own))


def why_unsendable(rows: pa.Table) -> list[str | None]:
    """Tells why rows can't be delivered: it builds the message of each, as the sender will.

    Args:
        rows: as MESSAGES, readable.

    Returns:
        for each row the reason, one line; None: it can be delivered.
    """
    reasons: list[str | None] = []
    for first in range(0, rows.num_rows, _ROWS_AT_ONCE):
        some = rows.slice(first, _ROWS_AT_ONCE)
        columns = {name: some[name].to_pylist() for name in MESSAGES.names}
        reasons += [_why_unsendable(columns, row) for row in range(some.num_rows)]
    return reasons


def _why_unsendable(columns: Columns, row: int) -> str | None:
    try:
        delivered(columns, row, columns["deliver_at"][row], 1)
    except MemoryError:
        raise
    except Exception as error:
        return cause_of(error)
    return None


def cause_of(error: Exception) -> str:
    """Returns why a row can't become a message, one line."""
    text = one_line(error)
    return (text if isinstance(error, UnsendableError) else f"{type(error).__name__}: {text}")[:_MAX_REASON]


def is_own(properties: Mapping[str, str], source: str) -> bool:
    """Whether a message has the properties that the job gives to messages of a source topic; anybody can copy them."""
    return (
        properties.get(SOURCE) == source
        and is_position(properties.get(MESSAGE_ID, ""))
        and not properties.keys().isdisjoint((DELIVER_AT, REASON))
    )


def _properties(columns: Columns, row: int) -> dict[str, str]:
    properties = dict(columns["properties"][row] or ())
    properties.pop(SHAPED_FROM, None)  # it may be from another service, which has shaped the message before
    properties[SOURCE] = columns["topic"][row]
    properties[MESSAGE_ID] = str(position_of(columns, row))
    return properties


def _built(
    columns: Columns,
    row: int,
    properties: dict[str, str],
    sequence_id: int,
    payload: bytes | None,
    has_keys: bool = True,
) -> OutgoingMessage:
    key, ordering_key = columns["key"][row], columns["ordering_key"][row]
    event_time = columns["event_time"][row] or 0
    if not 0 <= event_time <= _MAX_EVENT_TIME:
        raise UnsendableError(f"the event time {event_time} is negative or beyond 2^63")
    return OutgoingMessage(
        sequence_id,
        payload,
        _encoded(properties),
        key.encode() if has_keys and key is not None else None,
        has_keys and columns["key_encoding"][row] == BASE64,
        (columns["ordering_key_bytes"][row] if ordering_key is None else ordering_key.encode()) if has_keys else None,
        event_time,
    )


def _encoded(properties: Mapping[str, str]) -> list[bytes]:
    try:
        return [encoded_property(name, value) for name, value in properties.items()]
    except AttributeError:
        for name, value in properties.items():
            if not isinstance(value, str):
                what = "no value" if value is None else "a value that is no text"
                raise UnsendableError(f"the property {name[:_MAX_NAME]!r} has {what}") from None
        raise


def content_bytes(columns: Columns, row: int) -> int:
    """Returns the bytes of payload, keys and properties of a row of MESSAGES, as they are in an entry."""
    texts = [columns["key"][row], columns["ordering_key"][row]]
    properties = columns["properties"][row] or ()
    texts += [text for pair in properties for text in pair]
    others = [columns["payload"][row], columns["ordering_key_bytes"][row]]
    size = FIELD_BYTES * len(properties)
    return size + sum(len(text.encode()) for text in texts if text) + sum(len(data) for data in others if data)
