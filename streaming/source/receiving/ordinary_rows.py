"""Makes rows of ordinary messages, many at once: columns from the bytes that came, without an object a message.

A message is ordinary when all that is to be said of it is where its fields lie and when it is due. What is not (a
schedule key, a rule, a retry, a request id, an ordering key, text that is no UTF-8, a time that is refused, ...) is
left to `RowBuilder`, which looks at each message by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.protocol.batches import find_messages
from broker.protocol.entries import is_batch, is_dropped
from broker.protocol.fields import OF_ENTRY, PADDING, Fields, Spans, read_fields
from broker.protocol.unpacking import UnpackedEntry
from conf.message_size import FIELD_BYTES
from tracker.due_time import DELIVER_AFTER, DELIVER_AT, MAX_TIME_MILLIS
from tracker.messages import MESSAGES, BoolArray, Int64Array
from tracker.properties import BASE64
from tracker.scheduling import MEANINGFUL

_MOST_DIGITS = 15  # of a time that is read here
_MOST_COUNTED = 1 << 20  # pairs of message and property name that are counted in a table
_OF_TIME = {DELIVER_AT.encode(): DELIVER_AT, DELIVER_AFTER.encode(): DELIVER_AFTER}
_ORDINARY, _ODD = "", "odd"
_COLUMNS = [(field.name, field.type) for field in MESSAGES]


class Entry(NamedTuple):
    """What the messages of an entry have in common."""

    received: UnpackedEntry
    batch_size: int
    first_index: int | None  # broker entry index of its first message; None: not known
    published: int  # ms since the epoch
    native: int | None  # the time at which Pulsar itself would deliver it, ms since the epoch; None: none is given
    producer: str | None  # its name; None: it is too long to be kept, or `is_named` says that it can't be read
    is_named: bool
    version: bytes  # of the schema, as it is stored; empty: none
    reason: str | None  # why all its messages are rejected


@dataclass(frozen=True)
class Rules:
    """What a receiver asks of messages.

    Attributes:
        topic: the source topic.
        partition: -1: the topic is not partitioned.
        now: when the messages came in, ms since the epoch.
        max_delay_millis: the longest delay, ms; 0: any.
        max_size: the most bytes of a message: of payload, keys and properties together.
    """

    topic: str
    partition: int
    now: int
    max_delay_millis: int
    max_size: int


class OddMessage(NamedTuple):
    """A message that has to be looked at by itself.

    Attributes:
        entry: the number of its entry.
        batch_index: its place there; None: all messages of the entry are odd.
        metadata: its own; of an entry that is no batch, the entry's.
        payload: its own.
    """

    entry: int
    batch_index: int | None
    metadata: bytes = b""
    payload: bytes = b""


class OrdinaryRows(NamedTuple):
    """The rows of entries, as far as their messages are ordinary.

    Attributes:
        rows: as MESSAGES, in the entries' order.
        entry: int64, (rows,): the number of each row's entry.
        batch_index: int64, (rows,): its place there; -1: the entry is one message.
        odd: the messages that are not ordinary.
    """

    rows: pa.Table
    entry: Int64Array
    batch_index: Int64Array
    odd: list[OddMessage]


def ordinary_rows(entries: Sequence[Entry], rules: Rules) -> list[OrdinaryRows]:
    """Makes rows of entries, which have to be readable.

    Args:
        entries: none of whose messages is rejected for what its entry is.
        rules: what is asked of messages.

    Returns:
        for the entries that are batches, and for those that are not, if there are any.
    """
    batches = [number for number, entry in enumerate(entries) if _is_batch(entry)]
    others = [number for number, entry in enumerate(entries) if not _is_batch(entry)]
    found = []
    if batches:
        found.append(_rows(_of_batches(entries, batches), entries, rules))
    if others:
        found.append(_rows(_of_others(entries, others), entries, rules))
    return found


def _is_batch(entry: Entry) -> bool:
    return entry.received.metadata is not None and is_batch(entry.received.metadata)


@dataclass
class _Found:
    """Messages, and where they lie in a buffer. Arrays are int64, (messages,)."""

    data: bytes
    entry: Int64Array
    batch_index: Int64Array
    metadata: Spans
    payload: Spans
    fields: Fields
    odd_entries: list[int]  # the entries that can't be read here; none of their messages is here

    def take(self, messages: Int64Array) -> _Found:
        """Returns some of the messages, by their ascending numbers."""
        metadata, payload = self.metadata, self.payload
        return _Found(
            self.data,
            self.entry[messages],
            self.batch_index[messages],
            Spans(metadata.starts[messages], metadata.ends[messages]),
            Spans(payload.starts[messages], payload.ends[messages]),
            self.fields.take(messages),
            self.odd_entries,
        )


def _of_batches(entries: Sequence[Entry], numbers: list[int]) -> _Found:
    payloads = [entries[number].received.payload or b"" for number in numbers]
    data = b"".join([*payloads, PADDING])
    counts = np.array([entries[number].batch_size for number in numbers], np.int64)
    of = np.array(numbers, np.int64)
    found = find_messages(np.frombuffer(data, np.uint8), _spans(payloads), counts)
    counts, read = counts[~found.is_odd], of[~found.is_odd]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    entry = np.repeat(read, counts)
    return _Found(data, entry, places, found.metadata, found.payload, found.fields, of[found.is_odd].tolist())


def _of_others(entries: Sequence[Entry], numbers: list[int]) -> _Found:
    received = [entries[number].received for number in numbers]
    parts = [part for one in received for part in (one.header, one.payload or b"")]
    data = b"".join([*parts, PADDING])
    spans = _spans(parts)
    metadata, payload = Spans(spans.starts[::2], spans.ends[::2]), Spans(spans.starts[1::2], spans.ends[1::2])
    fields = read_fields(np.frombuffer(data, np.uint8), metadata.starts, metadata.ends, OF_ENTRY)
    indexes = np.full(len(numbers), -1, np.int64)
    return _Found(data, np.array(numbers, np.int64), indexes, metadata, payload, fields, [])


def _spans(parts: Sequence[bytes]) -> Spans:
    """Returns where parts lie that follow one another."""
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
    return Spans(np.concatenate([[0], ends[:-1]]), ends)


def _rows(found: _Found, entries: Sequence[Entry], rules: Rules) -> OrdinaryRows:
    odd = [OddMessage(number, None) for number in found.odd_entries]
    due, is_odd = _due(found, entries, rules)
    if not is_odd.any():
        try:
            return OrdinaryRows(_table(found, due, entries, rules), found.entry, found.batch_index, odd)
        except pa.ArrowInvalid:  # a text is no UTF-8
            is_odd = _are_no_text(found)
    else:
        is_odd |= _are_no_text(found)
    kept, others = np.flatnonzero(~is_odd), found.take(np.flatnonzero(is_odd))
    for number, batch_index, (begin, end), (payload, payload_end) in zip(
        others.entry.tolist(),
        others.batch_index.tolist(),
        zip(others.metadata.starts.tolist(), others.metadata.ends.tolist(), strict=True),
        zip(others.payload.starts.tolist(), others.payload.ends.tolist(), strict=True),
        strict=True,
    ):
        odd.append(OddMessage(number, batch_index, found.data[begin:end], found.data[payload:payload_end]))
    usual = found.take(kept)
    return OrdinaryRows(_table(usual, due[kept], entries, rules), usual.entry, usual.batch_index, odd)


def _due(found: _Found, entries: Sequence[Entry], rules: Rules) -> tuple[Int64Array, BoolArray]:
    """Returns (when each message is due, int64, ms since the epoch; which messages are odd, bool): (messages,) each."""
    fields, n = found.fields, len(found.entry)
    is_odd: BoolArray = fields.is_odd | fields.has_ordering_key
    published = np.array([entry.published for entry in entries], np.int64)[found.entry]
    native = np.array([entry.native or 0 for entry in entries], np.int64)[found.entry]
    at, after = np.zeros(n, np.int64), np.zeros(n, np.int64)
    has_at, has_after = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    message = fields.properties.message
    sizes = _sizes(found)
    if len(message):
        names = _slices(found.data, fields.properties.names).dictionary_encode()
        codes = names.indices.to_numpy().astype(np.int64)
        kinds = [_kind(name) for name in names.dictionary.to_pylist()]
        if _ODD in kinds:
            is_odd[message[np.isin(codes, [code for code, kind in enumerate(kinds) if kind == _ODD])]] = True
        is_odd[_with_a_name_twice(message, codes, n, len(kinds))] = True
        for code, kind in enumerate(kinds):
            if kind in (DELIVER_AT, DELIVER_AFTER):
                of = np.flatnonzero(codes == code)
                values = fields.properties.values
                numbers, is_number = _numbers(found.data, Spans(values.starts[of], values.ends[of]))
                to, has = (at, has_at) if kind == DELIVER_AT else (after, has_after)
                to[message[of]], has[message[of]] = numbers, True
                is_odd[message[of[~is_number]]] = True
    is_timed = has_at | has_after | (native > 0)
    given = np.where(has_at, at, np.where(has_after, published + after, native))
    is_odd |= is_timed & (given > MAX_TIME_MILLIS)
    if rules.max_delay_millis > 0:
        is_odd |= is_timed & (given - published > rules.max_delay_millis)
    is_odd |= sizes > rules.max_size
    return np.where(is_timed, given, np.minimum(published, rules.now)), is_odd


def _kind(name: bytes) -> str:
    """Returns which property a name is: one of a time, one that means something else, or an ordinary one."""
    if (of_time := _OF_TIME.get(name)) is not None:
        return of_time
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return _ODD
    return _ODD if text in MEANINGFUL or is_dropped(text) else _ORDINARY


def _with_a_name_twice(message: Int64Array, codes: Int64Array, n: int, n_names: int) -> Int64Array:
    """Returns the messages that have a property twice."""
    pairs = message * n_names + codes
    if n * n_names <= _MOST_COUNTED:
        twice = np.flatnonzero(np.bincount(pairs) > 1)
    else:
        found, counts = np.unique(pairs, return_counts=True)
        twice = found[counts > 1]
    messages: Int64Array = twice // n_names
    return messages


def _numbers(data: bytes, spans: Spans) -> tuple[Int64Array, BoolArray]:
    """Reads whole numbers without a sign; returns (the numbers, int64; which texts are such numbers, bool)."""
    texts = _slices(data, spans).view(pa.string())
    lengths = spans.ends - spans.starts
    is_number: BoolArray = pc.ascii_is_decimal(texts).to_numpy(zero_copy_only=False)
    is_number &= (lengths > 0) & (lengths <= _MOST_DIGITS)
    numbers = np.zeros(len(lengths), np.int64)
    if not is_number.all():
        texts = texts.filter(pa.array(is_number))
    numbers[is_number] = texts.cast(pa.int64()).to_numpy()
    return numbers, is_number


def _sizes(found: _Found) -> Int64Array:
    """Returns the bytes of each message's payload, key and properties: int64, (messages,)."""
    fields = found.fields
    sizes = np.where(fields.is_null_value, 0, found.payload.ends - found.payload.starts)
    sizes += np.where(fields.is_key_null, 0, fields.key.ends - fields.key.starts)
    names, values = fields.properties.names, fields.properties.values
    texts = names.ends - names.starts + values.ends - values.starts + FIELD_BYTES
    sizes += np.bincount(fields.properties.message, texts, len(sizes)).astype(np.int64)
    all_sizes: Int64Array = sizes
    return all_sizes


def _are_no_text(found: _Found) -> BoolArray:
    """Tells which messages are odd, or have a key or a property that is no UTF-8: bool, (messages,)."""
    fields, is_odd = found.fields, found.fields.is_odd.copy()
    properties = fields.properties
    everything = np.arange(len(is_odd))
    for spans, messages in (
        (fields.key, everything),
        (properties.names, properties.message),
        (properties.values, properties.message),
    ):
        for start, end, message in zip(spans.starts.tolist(), spans.ends.tolist(), messages.tolist(), strict=True):
            try:
                found.data[start:end].decode()
            except UnicodeDecodeError:
                is_odd[message] = True
    return is_odd


def _table(found: _Found, due: Int64Array, entries: Sequence[Entry], rules: Rules) -> pa.Table:
    """Returns the rows of messages of which none is odd.

    Raises:
        pa.ArrowInvalid: a text is no UTF-8.
    """
    fields, n = found.fields, len(found.entry)
    of = pa.array(found.entry)
    positions = np.array([entry.received.position for entry in entries], np.int64)[found.entry]
    has_key = fields.has_key & ~fields.is_key_null
    is_base64 = has_key & fields.is_key_base64
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(np.bincount(fields.properties.message, minlength=n), out=offsets[1:])
    published = np.array([min(entry.published, MAX_TIME_MILLIS) for entry in entries], np.int64)
    columns = {
        "topic": pa.repeat(pa.scalar(rules.topic, pa.string()), n),
        "partition": np.full(n, rules.partition, np.int32),
        "ledger_id": positions[:, 0],
        "entry_id": positions[:, 1],
        "batch_index": found.batch_index.astype(np.int32),
        "batch_size": np.array([entry.batch_size for entry in entries], np.int32)[found.entry],
        "first_index": _by_message([entry.first_index for entry in entries], of, pa.int64()),
        "deliver_at": due,
        "publish_time": published[found.entry],
        "event_time": fields.event_time,
        "producer_name": _by_message([entry.producer for entry in entries], of, pa.string()),
        "properties": pa.MapArray.from_arrays(
            pa.array(offsets),
            _texts(found.data, fields.properties.names),
            _texts(found.data, fields.properties.values),
        ),
        "payload": _slices(found.data, found.payload, fields.is_null_value),
        "schema_version": _by_message([entry.version or None for entry in entries], of, pa.binary()),
    }
    if has_key.any():
        starts, ends = fields.key.starts, fields.key.ends
        if not has_key.all():  # places have to ascend
            starts, ends = (np.where(has_key, of_key, found.metadata.starts) for of_key in (starts, ends))
        columns["key"] = _texts(found.data, Spans(starts, ends), ~has_key)
    if is_base64.any():
        columns["key_encoding"] = pc.if_else(pa.array(is_base64), BASE64, pa.scalar(None, pa.string()))
    in_order = [_column(columns.get(name), kind, n) for name, kind in _COLUMNS]
    return pa.Table.from_arrays(in_order, schema=MESSAGES)


def _column(values: pa.Array | np.ndarray | None, kind: pa.DataType, n: int) -> pa.Array:
    if values is None:
        return pa.nulls(n, kind)
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _by_message(values: list[Any], of: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns what each message has of its entry.

    Args:
        values: one of each entry; None: null.
        of: int64, (messages,): the number of each message's entry.
        kind: of the values.
    """
    if values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), len(of))
    return pa.array(values, kind).take(of)


def _texts(data: bytes, spans: Spans, are_null: BoolArray | None = None) -> pa.Array:
    """Returns slices of a buffer as texts; as `_slices`.

    Raises:
        pa.ArrowInvalid: one is no UTF-8.
    """
    texts = _slices(data, spans, are_null).view(pa.string())
    texts.validate(full=True)
    return texts


def _slices(data: bytes, spans: Spans, are_null: BoolArray | None = None) -> pa.Array:
    """Returns slices of a buffer as an array of bytes.

    Args:
        data: the buffer.
        spans: where they lie, ascending.
        are_null: bool, (slices,): which of them are null; None: none is.
    """
    n = len(spans.starts)
    # Slices and what lies between them, without copying; then only the slices.
    ends = np.empty(2 * n + 1, np.int32)
    ends[: 2 * n : 2], ends[1 : 2 * n : 2], ends[2 * n] = spans.starts, spans.ends, len(data)
    all_parts = pa.Array.from_buffers(pa.binary(), 2 * n, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return all_parts.take(pa.array(np.arange(0, 2 * n, 2), mask=are_null))
