"""Turns received entries into rows. What is rejected of them, `unreadable_messages.py` says."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from broker.entries.continuity import CameEntry
from broker.position import EntrySet, SourceTopic
from broker.protocol.entries import (
    EntryError,
    Message,
    batched_message,
    is_acknowledged,
    is_batch,
    is_dropped,
    messages_of,
)
from broker.protocol.unpacking import UnpackedEntry
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from streaming.source.receiving.few_rows import FewRows, table_of
from streaming.source.receiving.ordinary_rows import Entry, OddMessage, Rules, ordinary_rows
from streaming.source.receiving.recurring import RuleCost
from streaming.source.receiving.unreadable_messages import (
    ACKNOWLEDGED,
    MAX_EVENT_TIME,
    MOST_KEPT,
    Acceptance,
    Row,
    read_texts,
    rejected_row,
    size_of,
    why_unreadable,
    why_without_schema,
)
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import Int64Array, concat
from tracker.properties import BASE64, KEY_ENCODING
from tracker.recurrence.recurrence import REPEAT
from tracker.scheduling import Scheduling, scheduling, with_native_time
from warehouse.message_schemas import VERSION_BYTES

_log = logging.getLogger(__name__)

_FEW_MESSAGES = 70  # the rows of fewer are made sooner one by one: columns have a fixed cost
_MOST_BYTES = 1 << 20  # of an entry whose rows are made with those of others
_MOST_MEAN_BYTES = 4096  # likewise, of a message: those of large ones cost little beside their bytes
_RULE = REPEAT.encode()  # rules may be costly, so their messages are looked at as they come
_MESSAGE_OVERHEAD_BYTES = 200  # of a message's columns beside payload, keys and properties


MAX_PRODUCER_NAME_BYTES = 256  # of a producer; each of its messages has it


_NO_METADATA = MessageMetadata()


class RowBuilder:
    """Collects entries, and makes a table of their messages.

    A message that can't be read, or could not be delivered, becomes a row with the reason to reject it:
    see `Acceptance`.

    Args:
        source: the topic partition of the messages.
        acceptance: which messages are accepted.

    Attributes:
        entries: the entries in it.
        came: the entries in it, and those that came meanwhile and have no messages, in the order in which they came.
        rule_cost: what the rules of recurring messages have cost beyond the usual.
        n_bytes: of all messages that were added, about.
    """

    def __init__(self, source: SourceTopic, acceptance: Acceptance) -> None:
        self._source = source
        self._acceptance = acceptance
        self.rule_cost = RuleCost()
        recurring = acceptance.recurring
        self._first = None if recurring is None else partial(self.rule_cost.of, recurring.first)
        self._now = time.time_ns() // 1_000_000
        limits = acceptance.max_delay_millis, acceptance.max_size
        self._rules = Rules(source.topic, source.partition, self._now, *limits)
        self._rows: list[Row] = []
        self._places: list[int] = []  # of `_rows`, among all messages
        self._ordinary: list[tuple[int, Entry]] = []  # entries whose rows are not made yet, by the first one's place
        self._n = 0
        self.entries = EntrySet()
        self.came: list[CameEntry] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        """The number of messages."""
        return self._n

    def add(self, received: UnpackedEntry, first_index: int | None, left_out: str | None = None) -> None:
        """Adds an entry with all its messages. Where it can't be read they are rejected; the first has its bytes.

        So is a message that is far too large, beside others.

        Args:
            received: the entry.
            first_index: the broker entry index of its first message; None: not known.
            left_out: why this job leaves its messages out: their rows have this reason, and neither payload nor
                properties; None: it takes them.

        Raises:
            NotKnownYetError: broker or warehouse do not answer the question for the schema.
        """
        entry = self._entry(received, first_index, left_out)
        if left_out is None and _may_be_ordinary(entry, MOST_KEPT * self._acceptance.max_size):
            self._ordinary.append((self._n, entry))
            self._n += entry.batch_size
            self.n_bytes += _MESSAGE_OVERHEAD_BYTES * entry.batch_size + len(received.payload or b"")
        else:
            self._add_rows(entry, left_out)
        self.entries.add_run(received.position, received.position)
        self.came.append(CameEntry(received.position, received.n_messages, first_index))

    @property
    def has_few(self) -> bool:
        """Whether it has so few messages that their rows are made one by one."""
        return self._n < _FEW_MESSAGES

    def build(self) -> pa.Table:
        """Returns the messages of all entries, as MESSAGES."""
        return table_of([self.rows()])

    def rows(self) -> pa.Table | FewRows:
        """As `build`, but few messages without a table, for `table_of` with others."""
        n_bytes = self.n_bytes
        tables, places = self._of_ordinary()
        self.n_bytes = n_bytes  # those that are looked at one by one were counted before
        if not tables:
            few = self._of_rows()
            return few if self.has_few else table_of([few])
        if self._rows:
            tables.append(table_of([self._of_rows()]))
            places.append(np.array(self._places, np.int64))
        rows = concat(tables)
        order = np.argsort(np.concatenate(places), kind="stable")
        return rows if len(tables) == 1 else rows.take(pa.array(order)).combine_chunks()

    def _of_ordinary(self) -> tuple[list[pa.Table], list[Int64Array]]:
        """Makes the rows of entries that have none yet.

        Returns:
            (tables as MESSAGES, the places of their rows): of those that are ordinary; the others are in `_rows` now.
        """
        waiting, self._ordinary = self._ordinary, []
        if self.has_few:
            for place, entry in waiting:
                self._add_rows(entry, None, place)
            return [], []
        firsts = np.array([place for place, _ in waiting], np.int64)
        entries = [entry for _, entry in waiting]
        try:
            found = ordinary_rows(entries, self._rules)
        except Exception:
            _log.exception("%s: messages are looked at one by one", self._source.name)
            for place, entry in waiting:
                self._add_rows(entry, None, place)
            return [], []
        for odd in (message for one in found for message in one.odd):
            entry, place = entries[odd.entry], int(firsts[odd.entry])
            if odd.batch_index is None or odd.batch_index < 0:
                self._add_rows(entry, None, place)
            else:
                self._add_odd(entry, odd, odd.batch_index, place + odd.batch_index)
        found = [one for one in found if one.rows.num_rows]
        return [one.rows for one in found], [firsts[one.entry] + np.maximum(one.batch_index, 0) for one in found]

    def _add_odd(self, entry: Entry, odd: OddMessage, batch_index: int, place: int) -> None:
        """Adds the row of a message of a batch that is not ordinary."""
        try:
            message = batched_message(batch_index, odd.metadata, odd.payload)
        except EntryError as error:
            self._reject(entry, batch_index, odd.payload, str(error), place)
            return
        self._add_row(entry, message, place)

    def _add_rows(self, entry: Entry, left_out: str | None, place: int | None = None) -> None:
        """Adds a row for each message of an entry.

        Args:
            entry: the entry.
            left_out: see `add`.
            place: of the first message among all messages; None: it comes after all so far.
        """
        received, failure = entry.received, left_out or entry.received.failure
        messages: Sequence[Message] = ()
        if not failure and received.metadata is not None and received.payload is not None:
            try:
                messages = messages_of(received.metadata, received.payload)
            except EntryError as error:
                failure = str(error)
        at = self._n if place is None else place
        for number, batch_index in enumerate(() if messages else received.batch_indexes):
            raw = received.raw if left_out is None and batch_index <= 0 else None
            self._reject(entry, batch_index, raw, failure, at + number)
        first: bytes | None = received.raw
        for number, message in enumerate(messages):
            if (why := self._acceptance.why_far_too_large(message.payload)) is not None:
                self._reject(entry, message.batch_index, first, why, at + number)
                first = None
            else:
                self._add_row(entry, message, at + number)
        if place is None:
            self._n += entry.batch_size

    def _add_row(self, entry: Entry, message: Message, place: int) -> None:
        """Adds the row of a message that can be read."""
        if is_acknowledged(message.batch_index, entry.received.ack_set):
            self._reject(entry, message.batch_index, message.payload, ACKNOWLEDGED, place)
            return
        try:
            row = self._row(entry, message)
        except Exception as error:
            why = f"it can't be read: {why_unreadable(error)}"
            self._reject(entry, message.batch_index, message.payload, why, place)
            return
        self._rows.append(row)
        self._places.append(place)

    def _of_rows(self) -> FewRows:
        """Returns the rows that were made one by one, in the order of their places."""
        if self._places != sorted(self._places):
            order = sorted(range(len(self._rows)), key=self._places.__getitem__)
            self._rows = [self._rows[number] for number in order]
            self._places.sort()
        return FewRows(self._source, self._now, self._rows)

    def _reject(self, entry: Entry, batch_index: int, payload: bytes | None, reason: str, place: int) -> None:
        self.n_bytes += _MESSAGE_OVERHEAD_BYTES + len(payload or b"")
        ids = (*entry.received.position, batch_index, entry.batch_size, entry.first_index)
        self._rows.append(rejected_row(ids, self._now, payload, reason))
        self._places.append(place)

    def _entry(self, received: UnpackedEntry, first_index: int | None, left_out: str | None) -> Entry:
        metadata = received.metadata or _NO_METADATA
        reason, version = None, metadata.schema_version[: 2 * VERSION_BYTES]  # a longer one is none
        producer, is_named = None, True
        if len(metadata.producer_name) <= MAX_PRODUCER_NAME_BYTES:
            try:
                producer = metadata.producer_name.decode()
            except UnicodeDecodeError:
                is_named = False
        if version and received.payload is not None and self._acceptance.details is not None and left_out is None:
            version, schema = self._acceptance.details.schema(version)
            if schema is None:
                reason = why_without_schema(version)
        native = metadata.deliver_at_time if metadata.deliver_at_time > 0 else None
        published = metadata.publish_time or self._now
        return Entry(received, received.n_messages, first_index, published, native, producer, is_named, version, reason)

    def _row(self, entry: Entry, message: Message) -> Row:
        """Returns a message's values for the columns of MESSAGES from the third on."""
        key, properties, reason = read_texts(message, entry.is_named)
        ordering_key, ordering_key_bytes = None, None
        if message.ordering_key is not None:
            try:
                ordering_key = message.ordering_key.decode()
            except UnicodeDecodeError:
                ordering_key_bytes = message.ordering_key
        n_bytes = size_of(message)
        self.n_bytes += _MESSAGE_OVERHEAD_BYTES + n_bytes
        published = entry.published
        given = Scheduling(min(published, self._now), reason)
        if reason is None:
            timed = with_native_time(properties, entry.native)
            given = scheduling(timed, published, self._now, self._acceptance.max_delay_millis, self._first)
            reason = given.reason
            if given.occurrence is not None:
                properties = timed  # whoever reads a rule later finds its first time there
        reason = reason or self._acceptance.why_undeliverable(message, n_bytes) or entry.reason
        key_encoding = BASE64 if key is not None and message.is_key_base64 else None
        if given.retry is not None and key and properties.get(KEY_ENCODING) == BASE64:
            key_encoding = BASE64  # a consumer sends a retry's key back as text
        if reason is not None:  # a release waits until it is sent: no reject may keep its lane
            given = Scheduling(min(published, self._now), reason, request_id=given.request_id)
        return (
            *entry.received.position,
            message.batch_index,
            entry.batch_size,
            entry.first_index,
            given.deliver_at,
            min(published, MAX_TIME_MILLIS),
            message.event_time if message.event_time <= MAX_EVENT_TIME else 0,
            entry.producer,
            key,
            ordering_key,
            [item for item in properties.items() if not is_dropped(item[0])],
            message.payload,
            reason,
            None,
            None,
            ordering_key_bytes,
            key_encoding,
            entry.version or None,
            None,
            given.schedule_key,
            None,
            given.retry.attempt if given.retry is not None else None,
            given.retry.reasons if given.retry is not None else None,
            None,
            given.occurrence,
            None,
            None,
            given.request_id,
            given.expires_at,
        )


def _may_be_ordinary(entry: Entry, most_bytes: int) -> bool:
    """Whether the rows of an entry's messages, which has at most so many bytes, may be made with those of others."""
    received, metadata = entry.received, entry.received.metadata
    if received.payload is None or metadata is None or metadata.n_chunks > 1 or received.ack_set:
        return False
    if entry.reason is not None or not entry.is_named or entry.published > MAX_TIME_MILLIS:
        return False
    if len(received.payload) + len(received.header) > min(_MOST_BYTES, most_bytes, _MOST_MEAN_BYTES * entry.batch_size):
        return False
    if is_batch(metadata):
        return entry.batch_size == metadata.n_messages and _RULE not in received.payload
    return _RULE not in received.header
