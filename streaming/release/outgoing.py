"""Builds the messages for a destination: those of the source topic, with the delaylake properties added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import _pulsar

from tracker.properties.delivered import (
    ATTEMPT,
    DEAD_LETTER_OF,
    DELIVER_AT,
    KEY_ENCODING,
    MESSAGE_ID,
    OCCURRENCE,
    REASON,
    REASONS,
    RESERVED_PREFIX,
    SHAPED_FROM,
    SOURCE,
)
from tracker.properties.message_position import is_position, position_of
from tracker.properties.retry_of import NOT_PASSED_ON, RETRY_OF

# A larger rejected message is sent without payload, keys and own properties, which the table `rejects` has. A larger
# retry is sent without the reasons, for which there may be no room.
MAX_REJECTED_BYTES = 1024 * 1024

FIELD_BYTES = 12  # of a property in Pulsar's metadata, beside its name and value

_MAX_REASON = 1_000  # characters
_MAX_REASON_BYTES = 4 * _MAX_REASON

Columns = Mapping[str, Sequence[Any]]


def delivered(
    columns: Columns, row: int, due: int, sequence_id: int, dead_letter_of: str | None = None
) -> _pulsar.Message:
    """Builds the message of a row of a release for a subscription's destination.

    Args:
        columns: of `tracker.messages.MESSAGES`, by name, each with the values of all rows.
        row: the index of the row.
        due: when the message is due, ms since the epoch.
        sequence_id: of the message.
        dead_letter_of: the subscription whose dead letter the message is; None: it is no dead letter.
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
        if _bytes(columns, row) <= MAX_REJECTED_BYTES:
            properties[REASONS] = columns["retry_reasons"][row] or "[]"
    if columns["occurrence"][row] is not None:
        properties[OCCURRENCE] = str(columns["occurrence"][row])
    if columns["key_encoding"][row] is not None:
        properties[KEY_ENCODING] = columns["key_encoding"][row]
    if columns["shaped_from"][row] is not None:
        properties[SHAPED_FROM] = str(columns["shaped_from"][row])
    return _built(columns, row, properties, sequence_id, columns["payload"][row])


def rejected(columns: Columns, row: int, sequence_id: int, max_size: int) -> _pulsar.Message:
    """Builds the message of a row of a release for its source's rejects topic.

    Args:
        columns: of `tracker.messages.MESSAGES`, by name; the row's `reason` is not None.
        row: the index of the row.
        sequence_id: of the message.
        max_size: as `naming.max_size_bytes` returns it for the source topic.
    """
    reason = columns["reason"][row][:_MAX_REASON]
    properties = _properties(columns, row)
    properties[REASON] = reason
    if _bytes(columns, row) <= min(MAX_REJECTED_BYTES, max_size - _MAX_REASON_BYTES):
        return _built(columns, row, properties, sequence_id, columns["payload"][row])
    own = {name: value for name, value in properties.items() if name.startswith(RESERVED_PREFIX)}
    return _built(columns, row, own, sequence_id, None, has_keys=False)


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
) -> _pulsar.Message:
    # Not by pulsar.Producer: that takes an ordering key as text only.
    builder = _pulsar.MessageBuilder()
    if payload is None:
        builder.set_null_value()
    else:
        builder.content(payload)
    for name, value in properties.items():
        builder.property(name, value)
    if has_keys and (key := columns["key"][row]):
        builder.partition_key(key)
    if has_keys and (ordering_key := columns["ordering_key"][row] or columns["ordering_key_bytes"][row]):
        builder.ordering_key(ordering_key)
    if event_time := columns["event_time"][row]:
        builder.event_timestamp(event_time)
    builder.sequence_id(sequence_id)
    return builder.build()


def _bytes(columns: Columns, row: int) -> int:
    texts = [columns["key"][row], columns["ordering_key"][row]]
    properties = columns["properties"][row] or ()
    texts += [text for pair in properties for text in pair]
    others = [columns["payload"][row], columns["ordering_key_bytes"][row]]
    size = FIELD_BYTES * len(properties)
    return size + sum(len(text.encode()) for text in texts if text) + sum(len(data) for data in others if data)
