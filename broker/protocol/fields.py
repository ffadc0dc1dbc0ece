"""Reads the metadata of many messages at once: columns of places in one buffer, without an object a message.

The metadata of a message is protobuf: a sequence of fields, each a tag and a number, or a tag, a length and bytes. One
step reads the next field of all messages together. What this reads, protobuf's own parser reads in the same way. What
is unusual (a field nobody knows, another wire type, a property without a value, more than a few dozen fields) makes
its message odd: it has to be read by that parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

Data = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Behind the last byte that counts a buffer has so many more: a number that is cut off is read into them.
PADDING = b"\0" * 16

_MOST_FIELDS = 64  # of a message that is not odd
_MOST_BYTES = 1 << 30  # of a field
_MOST_TAG_BYTES, _MOST_LENGTH_BYTES = 2, 4  # longer ones protobuf's parser may take or not
_BYTES, _NUMBER = 2, 0  # wire types


class _Role(Enum):
    """What a field is to the reader."""

    PASSED_OVER = auto()
    PROPERTY = auto()
    KEY = auto()
    ORDERING_KEY = auto()
    PAYLOAD_SIZE = auto()
    EVENT_TIME = auto()
    IS_KEY_BASE64 = auto()
    IS_NULL_VALUE = auto()
    IS_KEY_NULL = auto()


def _roles(numbers: Mapping[int, _Role], passed_numbers: set[int], passed_bytes: set[int]) -> dict[int, _Role]:
    """Returns the role of each tag."""
    is_bytes = {_Role.PROPERTY, _Role.KEY, _Role.ORDERING_KEY}
    roles = {number << 3 | (_BYTES if role in is_bytes else _NUMBER): role for number, role in numbers.items()}
    roles |= {number << 3 | _NUMBER: _Role.PASSED_OVER for number in passed_numbers}
    return roles | {number << 3 | _BYTES: _Role.PASSED_OVER for number in passed_bytes}


# By tag, of the messages BatchedMetadata and MessageMetadata of proto/pulsar.proto.
OF_BATCHED = _roles(
    {
        1: _Role.PROPERTY,
        2: _Role.KEY,
        3: _Role.PAYLOAD_SIZE,
        5: _Role.EVENT_TIME,
        6: _Role.IS_KEY_BASE64,
        7: _Role.ORDERING_KEY,
        9: _Role.IS_NULL_VALUE,
        10: _Role.IS_KEY_NULL,
    },
    passed_numbers={4, 8},
    passed_bytes=set(),
)
OF_ENTRY = _roles(
    {
        4: _Role.PROPERTY,
        6: _Role.KEY,
        12: _Role.EVENT_TIME,
        17: _Role.IS_KEY_BASE64,
        18: _Role.ORDERING_KEY,
        25: _Role.IS_NULL_VALUE,
        30: _Role.IS_KEY_NULL,
    },
    passed_numbers={2, 3, 8, 9, 19, 24},
    passed_bytes={1, 5, 13, 14, 15, 16},
)


@dataclass
class Spans:
    """Where bytes lie in a buffer, by message: int64 each, (messages,). Both are 0 where there are none."""

    starts: Ints
    ends: Ints


@dataclass
class Properties:
    """The properties of messages, in their order: int64 each, (properties,).

    Attributes:
        message: the number of its message.
        names: where its name lies.
        values: where its value lies.
    """

    message: Ints
    names: Spans
    values: Spans


@dataclass
class Fields:
    """What the metadata of messages has. Of what is odd all is undefined, but there are no properties of it.

    Attributes:
        is_odd: bool, (messages,).
        has_key: bool, (messages,): whether the key is there, perhaps empty.
        key: its place.
        has_ordering_key: bool, (messages,).
        properties: of all messages.
        payload_size: int64, (messages,), bytes; 0 where it is not given.
        event_time: int64, (messages,), ms since the epoch; 0: none.
        is_key_base64, is_null_value, is_key_null: bool, (messages,).
    """

    is_odd: Bools
    has_key: Bools
    key: Spans
    has_ordering_key: Bools
    properties: Properties
    payload_size: Ints
    event_time: Ints
    is_key_base64: Bools
    is_null_value: Bools
    is_key_null: Bools

    def take(self, messages: Ints) -> Fields:
        """Returns the fields of some messages, by their ascending numbers."""
        number = np.full(len(self.is_odd), -1, np.int64)
        number[messages] = np.arange(len(messages))
        properties = self.properties
        kept = number[properties.message] >= 0
        return Fields(
            self.is_odd[messages],
            self.has_key[messages],
            Spans(self.key.starts[messages], self.key.ends[messages]),
            self.has_ordering_key[messages],
            Properties(
                number[properties.message][kept],
                Spans(properties.names.starts[kept], properties.names.ends[kept]),
                Spans(properties.values.starts[kept], properties.values.ends[kept]),
            ),
            self.payload_size[messages],
            self.event_time[messages],
            self.is_key_base64[messages],
            self.is_null_value[messages],
            self.is_key_null[messages],
        )


def read_fields(data: Data, starts: Ints, ends: Ints, roles: Mapping[int, _Role]) -> Fields:
    """Reads the metadata of messages.

    Args:
        data: uint8, (bytes,), with PADDING at its end.
        starts: int64, (messages,): where the metadata of each message begins, ascending.
        ends: likewise: where it ends.
        roles: OF_BATCHED or OF_ENTRY.
    """
    reading = _Reading(data, len(starts))
    at, ends, active = starts, ends, np.arange(len(starts))
    for _ in range(_MOST_FIELDS):
        is_left = at < ends
        if not is_left.all():
            at, ends, active = at[is_left], ends[is_left], active[is_left]
        if not len(active):
            break
        at, is_odd = reading.step(at, ends, active, roles)
        if is_odd.any():
            reading.is_odd[active[is_odd]] = True
            at, ends, active = at[~is_odd], ends[~is_odd], active[~is_odd]
    reading.is_odd[active[at < ends]] = True
    return reading.fields()


class _Reading:
    """What has been read so far of some messages."""

    def __init__(self, data: Data, n: int) -> None:
        self._data = data
        self.is_odd = np.zeros(n, np.bool_)
        self._starts = {role: np.zeros(n, np.int64) for role in (_Role.KEY, _Role.ORDERING_KEY)}
        self._ends = {role: np.zeros(n, np.int64) for role in (_Role.KEY, _Role.ORDERING_KEY)}
        self._has = {role: np.zeros(n, np.bool_) for role in (_Role.KEY, _Role.ORDERING_KEY)}
        numbers = (_Role.PAYLOAD_SIZE, _Role.EVENT_TIME, _Role.IS_KEY_BASE64, _Role.IS_NULL_VALUE, _Role.IS_KEY_NULL)
        self._numbers = {role: np.zeros(n, np.int64) for role in numbers}
        self._properties: list[tuple[Ints, Ints, Ints]] = []  # (message, start, end)

    def step(self, at: Ints, ends: Ints, active: Ints, roles: Mapping[int, _Role]) -> tuple[Ints, Bools]:
        """Reads one field of each active message; returns (where the next ones begin, which messages are odd)."""
        tags, after_tags = _numbers_at(self._data, at)
        values, begins = _numbers_at(self._data, after_tags)
        is_bytes = (tags & 7) == _BYTES
        stops = np.where(is_bytes, begins + np.minimum(values, _MOST_BYTES), begins)
        is_odd: Bools = (values < 0) | (stops > ends) | (after_tags > at + _MOST_TAG_BYTES)
        is_odd |= is_bytes & (begins > after_tags + _MOST_LENGTH_BYTES)
        for tag, of in _groups(tags):
            role = roles.get(tag)
            if role is None:
                is_odd[of] = True
                continue
            messages = active[of]
            if role is _Role.PROPERTY:
                self._properties.append((messages, begins[of], stops[of]))
            elif role in self._numbers:
                self._numbers[role][messages] = values[of]
            elif role in self._has:
                self._starts[role][messages], self._ends[role][messages] = begins[of], stops[of]
                self._has[role][messages] = True
        return stops, is_odd

    def fields(self) -> Fields:
        """Returns all that has been read."""
        properties = self._of_properties()
        numbers = self._numbers
        return Fields(
            self.is_odd,
            self._has[_Role.KEY],
            Spans(self._starts[_Role.KEY], self._ends[_Role.KEY]),
            self._has[_Role.ORDERING_KEY],
            properties,
            numbers[_Role.PAYLOAD_SIZE],
            numbers[_Role.EVENT_TIME],
            numbers[_Role.IS_KEY_BASE64] != 0,
            numbers[_Role.IS_NULL_VALUE] != 0,
            numbers[_Role.IS_KEY_NULL] != 0,
        )

    def _of_properties(self) -> Properties:
        none = np.zeros(0, np.int64)
        found = self._properties or [(none, none, none)]
        message, start, end = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(start, kind="stable")  # messages are in the buffer's order
        order = order[~self.is_odd[message[order]]]
        message, start, end = message[order], start[order], end[order]
        name_length, name = _numbers_at(self._data, start + 1)
        name_end = np.minimum(name + np.clip(name_length, 0, _MOST_BYTES), end)
        value_length, value = _numbers_at(self._data, name_end + 1)
        is_usual = (end - start >= 4) & (self._data[start] == 10) & (self._data[name_end] == 18)
        is_usual &= (name_length >= 0) & (value_length >= 0) & (value + np.minimum(value_length, _MOST_BYTES) == end)
        is_usual &= (name <= start + 1 + _MOST_LENGTH_BYTES) & (value <= name_end + 1 + _MOST_LENGTH_BYTES)
        if not is_usual.all():
            self.is_odd[message[~is_usual]] = True
            usual = ~self.is_odd[message]
            message, name, name_end, value, end = (a[usual] for a in (message, name, name_end, value, end))
        return Properties(message, Spans(name, name_end), Spans(value, end))


def _groups(tags: Ints) -> Iterator[tuple[int, Ints | slice]]:
    """Yields each tag, and where it is. Most often all messages have the same."""
    if (tags == tags[0]).all():
        yield int(tags[0]), slice(None)
        return
    for tag in np.unique(tags).tolist():
        yield tag, np.flatnonzero(tags == tag)


def _numbers_at(data: Data, at: Ints) -> tuple[Ints, Ints]:
    """Reads numbers of protobuf (varints).

    Args:
        data: with PADDING at its end.
        at: int64, (n,): where each number begins.

    Returns:
        (the numbers; where each ends): int64, (n,). A number that has more than 63 bits is -1.
    """
    numbers = data[at].astype(np.int64)
    at = at + 1
    more = np.flatnonzero(numbers >= 0x80)
    if not len(more):
        return numbers, at
    numbers[more] &= 0x7F
    for shift in range(7, 63, 7):
        byte = data[at[more]].astype(np.int64)
        numbers[more] |= (byte & 0x7F) << shift
        at[more] += 1
        more = more[byte >= 0x80]
        if not len(more):
            return numbers, at
    numbers[more] = -1
    return numbers, at
