"""Turns messages of the Pulsar client into columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pulsar
import pyarrow as pa

from broker.clusters.replication import SOURCE_POSITION
from broker.entries.key_encodings import BASE64
from broker.position import EntrySet, Position, SourceTopic
from conf.errors import one_line
from streaming.release.outgoing import FIELD_BYTES
from streaming.source.receiving.details import MessageDetails, NotKnownYetError
from streaming.source.receiving.recurring import Recurring, RuleCost
from streaming.source.receiving.scheduling import Scheduling, is_dropped, scheduling
from tracker.messages import MESSAGES
from tracker.properties.delivered import KEY_ENCODING, RESERVED_PREFIX
from tracker.properties.schedule import MAX_TIME_MILLIS
from tracker.wire.message_id_pb2 import MessageIdData
from warehouse.message_schemas import MOST_VERSIONS, version_number

_MESSAGE_OVERHEAD_BYTES = 200  # of a message's columns beside payload, keys and properties
_MAX_EVENT_TIME = 2**63 - 1

_Row = tuple[Any, ...]


class ChunkBuilder:
    """Collects messages, and makes a table of those of whole entries. A message that comes twice is in it once.

    A message that can't be read, or could not be delivered, becomes a row with the reason to reject it.

    Args:
        source: the topic partition of the messages.
        max_delay_millis: the longest delay of a message, ms; 0: any.
        max_size: the most bytes of a message: of payload, keys and properties together.
        details: looks up schemas and key encodings; None: messages have none, as on the control topic.
        recurring: takes in recurring messages; None: their number is not limited.

    Attributes:
        entries: the whole entries in it.
        rule_cost: what the rules of recurring messages have cost beyond the usual.
        n_bytes: of all messages that were added, about.
    """

    def __init__(
        self,
        source: SourceTopic,
        max_delay_millis: int,
        max_size: int,
        details: MessageDetails | None = None,
        recurring: Recurring | None = None,
    ) -> None:
        self._source = source
        self._max_delay_millis = max_delay_millis
        self._max_size = max_size
        self._details = details
        self.rule_cost = RuleCost()
        self._first = None if recurring is None else partial(self.rule_cost.of, recurring.first)
        self._now = time.time_ns() // 1_000_000
        self._rows: list[_Row] = []
        self._entry: tuple[Position, int, int | None] | None = None
        self._left_out: str | None = None
        self._open: dict[Position, dict[int, _Row]] = {}  # rows of incomplete producer batches, by batch index
        self.entries = EntrySet()
        self.n_bytes = 0

    def __len__(self) -> int:
        """The number of messages of whole entries."""
        return len(self._rows)

    @property
    def is_whole(self) -> bool:
        """Whether no entry is incomplete."""
        return not self._open

    def is_adding(self, position: Position) -> bool:
        """Whether the entry that was started last is this one, and is incomplete."""
        return self._entry is not None and self._entry[0] == position

    def start_entry(
        self, position: Position, batch_size: int, first_index: int | None, left_out: str | None = None
    ) -> None:
        """Begins an entry, or continues an incomplete one. Messages that are added from now on belong to it.

        Args:
            position: of the entry.
            batch_size: the number of its messages.
            first_index: the broker entry index of its first message; None: not known.
            left_out: why this job leaves its messages out: their rows have this reason, and neither payload nor
                properties; None: it takes them.
        """
        self._entry = (position, batch_size, first_index)
        self._left_out = left_out

    def add(self, message: Any, batch_index: int) -> None:
        """Adds a message to the entry that was started last, unless it was added before.

        Args:
            message: of the Pulsar client.
            batch_index: the message's place in the entry; -1: the entry is one message.

        Raises:
            NotKnownYetError: broker or warehouse do not answer questions for the message's details.
        """
        if self._entry is None:
            raise RuntimeError("`start_entry` has not been called for this message")
        position, batch_size, first_index = self._entry
        rows = self._open.get(position)
        if rows is not None and batch_index in rows:
            return
        message = getattr(message, "_message", message)  # its getters take half the time of the wrapper's
        try:
            row = self._row(message, position, batch_index, batch_size, first_index)
        except NotKnownYetError:
            raise
        except Exception as error:
            payload = _value_of(message.data)
            self.n_bytes += _MESSAGE_OVERHEAD_BYTES + len(payload or b"")
            ids = (position.ledger_id, position.entry_id, batch_index, batch_size, first_index)
            row = _rejected_row(ids, self._now, payload, f"it can't be read: {_cause(error)}")
        if batch_size == 1:
            self._rows.append(row)
        else:
            rows = self._open.setdefault(position, {})
            rows[batch_index] = row
            if len(rows) < batch_size:
                return
            self._rows += rows.values()
            del self._open[position]
        self._entry = None
        self.entries.add_run(position, position)

    def build(self) -> pa.Table:
        """Returns the messages of all whole entries, as MESSAGES."""
        try:
            return self._table(self._rows)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return self._table([self._storable(row) for row in self._rows])

    def _table(self, rows: list[_Row]) -> pa.Table:
        columns = zip(*rows, strict=True) if rows else [()] * (len(MESSAGES) - 2)
        n = len(rows)
        topic = pa.array([self._source.topic] * n, pa.string())
        partition = pa.array([self._source.partition] * n, pa.int32())
        rest = [pa.array(c, f.type) for c, f in zip(columns, list(MESSAGES)[2:], strict=True)]
        return pa.Table.from_arrays([topic, partition, *rest], schema=MESSAGES)

    def _storable(self, row: _Row) -> _Row:
        """Returns the row, or a rejected one with the reason where its values do not fit the columns."""
        try:
            self._table([row])
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            ids, payload = row[:5], row[MESSAGES.names.index("payload") - 2]
            return _rejected_row(ids, self._now, payload, f"it can't be stored: {_cause(error)}")
        return row

    def _row(
        self, message: Any, position: Position, batch_index: int, batch_size: int, first_index: int | None
    ) -> _Row:
        """Returns a message's values for the columns of MESSAGES from the third on."""
        reason = None
        ordering_key_bytes = None
        try:
            key, properties, producer_name = message.partition_key(), message.properties(), message.producer_name()
        except UnicodeDecodeError:
            key, properties, producer_name, reason = _readable(message)
        try:
            ordering_key = message.ordering_key()
        except UnicodeDecodeError as error:
            ordering_key, ordering_key_bytes = "", error.object
        payload = None if message.has_null_value() else message.data()
        if self._left_out is not None:
            properties, payload, reason = {}, None, self._left_out
        texts = "".join([*properties, *properties.values(), key, ordering_key])
        size = (len(texts) if texts.isascii() else len(texts.encode())) + FIELD_BYTES * len(properties)
        if payload:
            size += len(payload)
        if ordering_key_bytes:
            size += len(ordering_key_bytes)
        self.n_bytes += _MESSAGE_OVERHEAD_BYTES + size
        published, happened = message.publish_timestamp(), message.event_timestamp()
        given = Scheduling(min(published, self._now), reason)
        if reason is None:
            given = scheduling(properties, published, self._now, self._max_delay_millis, self._first)
            reason = given.reason
        if not 0 <= happened <= _MAX_EVENT_TIME:
            reason = reason or f"the event time {happened} is negative or beyond 2^63"
            happened = 0
        if size > self._max_size:
            reason = reason or f"{size} bytes are too many to be delivered with their delaylake properties"
        key_encoding = version = None
        if reason is None and self._details is not None:
            schema = None
            if version := _schema_version(message):
                version, schema = self._details.schema(version)
                if schema is None:
                    reason = (
                        f"the source topic has no version {version_number(version)} of its schema any more, or has had "
                        f"more than {MOST_VERSIONS:,}"
                    )
            if key and len(key) % 4 == 0:  # else the key is no base64, in which the client gives keys of bytes
                key_encoding = self._details.key_encoding(key, producer_name or "", schema, position, batch_index)
        if given.retry is not None and key and properties.get(KEY_ENCODING) == BASE64:
            key_encoding = BASE64  # a consumer sends a retry's key back as text
        if reason is not None:  # a release waits until it is sent: no reject may keep its lane
            given = Scheduling(min(published, self._now), reason)
        if RESERVED_PREFIX in texts or SOURCE_POSITION in texts:
            properties = {name: value for name, value in properties.items() if not is_dropped(name)}
        return (
            position.ledger_id,
            position.entry_id,
            batch_index,
            batch_size,
            first_index,
            given.deliver_at,
            min(published, MAX_TIME_MILLIS),
            happened,
            producer_name,
            key or None,
            ordering_key or None,
            list(properties.items()),
            payload,
            reason,
            None,
            None,
            ordering_key_bytes,
            key_encoding,
            version or None,
            None,
            given.schedule_key,
            None,
            given.retry.attempt if given.retry is not None else None,
            given.retry.reasons if given.retry is not None else None,
            None,
            given.occurrence,
            None,
        )


def _schema_version(message: Any) -> bytes:
    """Returns the schema version that a message has; empty: none."""
    try:
        return bytes(message.schema_version(), "utf-8")
    except UnicodeDecodeError as error:  # the client decodes the version as text, but it is bytes
        return error.object


def batch_size_of(message_id: pulsar.MessageId) -> int:
    """Returns the number of messages in a message's entry."""
    if message_id.batch_index() < 0:
        return 1
    return MessageIdData.FromString(message_id.serialize()).batch_size or 1


def _readable(message: Any) -> tuple[str, dict[str, str], str | None, str]:
    """Returns what can be read of a message: key, properties, producer's name, and a reason that names the others."""
    key, properties, producer_name = (
        _value_of(get) for get in (message.partition_key, message.properties, message.producer_name)
    )
    wrong = [
        name
        for name, value in (("key", key), ("properties", properties), ("producer's name", producer_name))
        if value is None
    ]
    return key or "", properties or {}, producer_name, f"what is not UTF-8 can't be read: {', '.join(wrong)}"


def _value_of(get: Callable[[], Any]) -> Any:
    """Returns the value of a getter; None: the getter fails."""
    try:
        return get()
    except Exception:
        return None


def _rejected_row(ids: _Row, now: int, payload: bytes | None, reason: str) -> _Row:
    """Returns the row of a rejected message, with its ids, payload and reason alone.

    Args:
        ids: values of the columns from `ledger_id` on, as many as are known.
        now: the row's times, ms since the epoch.
    """
    values: dict[str, Any] = {"deliver_at": now, "publish_time": now, "event_time": 0, "payload": payload}
    values |= {"reason": reason, "properties": []}
    return ids + tuple(values.get(name) for name in MESSAGES.names[2 + len(ids) :])


def _cause(error: Exception) -> str:
    return one_line(error)[:200] or type(error).__name__
