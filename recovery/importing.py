"""Brings many messages in at once, from Parquet files or another Pulsar topic: straight into the Delta tables.

The state learns of them by a rebuild. An imported message has a position that Pulsar gives to none.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pulsar
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from broker.admin_rest import AdminClient
from broker.client import NoAnswerError, connect, crypto_key_reader, subscribe
from broker.continuity import Continuity, Gap, missing_ranges, positions_in
from broker.position import START, Position, SourceTopic
from broker.topic_questions import BrokerSide
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings
from recovery.native_delays import not_acknowledged, with_native_times
from status.troubles import NOT_SEEN_REASON
from streaming.release.naming import max_size_bytes
from streaming.release.outgoing import FIELD_BYTES
from streaming.source.receiving.chunk_builder import ChunkBuilder, batch_size_of
from streaming.source.receiving.details import MessageDetails, NotKnownYet
from tracker.commands.decode import resolve_topic
from tracker.entry_log import ENTRY_COLUMNS
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    in_order,
    int64,
    is_rejected,
    typed,
    where,
)
from tracker.schedule import MAX_TIME_MILLIS, TOO_FAR
from warehouse.message_schemas import SchemaKeeper
from warehouse.queries.index_rows import to_index, to_rejects
from warehouse.schemas import REJECTS
from warehouse.tables import OnProgress, Tables
from warehouse.unseen_entries import find_not_seen

_ROWS_AT_ONCE = 1_000_000
_MESSAGES_AT_ONCE = 100_000
_BYTES_AT_ONCE = 64 << 20
_FILE_BYTES_AT_ONCE = 256 << 20
_IDLE_MILLIS = 10_000
_MOST_IDLE = 6  # how often in a row it waits in the middle of an entry
_MAX_PARTS = 1_000  # entries at the end of a topic that the broker is asked about, one by one
_ENTRY_BITS = 31  # a ledger of Pulsar's has far fewer entries

SUBSCRIPTION = "delaylake-import"  # with which other topics are read

# The first ledger id of files. Those from FIRST_IMPORTED_LEDGER up to here are of messages from other topics.
FIRST_LEDGER_OF_FILES = FIRST_IMPORTED_LEDGER + (1 << 51)

# A file's columns. `deliver_at` must be there, and a message with null there is due at once. Any other may be missing
# or null: the message does not have it.
COLUMNS = {
    "deliver_at": pa.int64(),  # ms since the epoch, or a timestamp
    "payload": pa.binary(),  # or text
    "key": pa.string(),
    "ordering_key": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "event_time": pa.int64(),  # as deliver_at
    "producer_name": pa.string(),
}


class ImportFailedError(DelayLakeError):
    """Messages can't be imported. The message is one line."""


@dataclass
class Imported:
    """Counts of messages.

    Attributes:
        messages: written to the tables now.
        rejected: those of them that went to `rejects`.
        already_there: passed over, because an earlier import has written them.
    """

    messages: int = 0
    rejected: int = 0
    already_there: int = 0


class Importer:
    """Appends messages to the tables, which must exist, as if they were of a source topic. A rebuild has to follow.

    Attributes:
        source_topic: the route's, as it names it.
        tables: to which messages are appended; set to those that took the warehouse over before messages are imported.
        done: counts of what was imported so far.

    Args:
        topic: a source topic or a partition of it, complete or not.

    Raises:
        ImportFailedError: there is no such route.
    """

    def __init__(
        self, settings: Settings, topic: str, on_progress: OnProgress = lambda table, step, rows: None
    ) -> None:
        self._settings = settings
        source = self._source(topic)
        if source is None:
            raise ImportFailedError(f"no route with the source {topic}: see routes in the settings")
        self.source_topic = source
        self._on_progress = on_progress
        self.tables = Tables(settings.warehouse, settings.tracker.max_indexes_per_bucket_snapshot_segment)
        self._max_size = max_size_bytes(settings, source)
        self.done = Imported()

    def check(self, files: Iterable[Path], topic: str | None) -> None:
        """Checks that files and another topic can be imported, so that nothing is written unless all of it can be.

        Args:
            topic: None: there is none.

        Raises:
            ImportFailedError: a file can't be read or has other columns, or the topic is the source of a route, which
                the job reads by itself.
        """
        for path in files:
            with _errors_of(path):
                schema = pq.read_schema(path)
                unknown = [name for name in schema.names if name not in COLUMNS]
                if unknown:
                    raise ImportFailedError(f"{path}: unknown column {unknown[0]}; there may be {', '.join(COLUMNS)}")
                if "deliver_at" not in schema.names:
                    raise ImportFailedError(f"{path}: no column deliver_at")
                if others := [field.name for field in schema if field.type != COLUMNS[field.name]]:
                    for rows in _batches(path, _ROWS_AT_ONCE, others):
                        _own_columns(rows)
        if topic is not None and self._source(topic) is not None:
            raise ImportFailedError(f"{topic} is the source of a route: the job reads it by itself")

    def file(self, path: Path) -> None:
        """Imports a Parquet file with the columns of COLUMNS. Importing it again does nothing.

        A file is known by its name, size and footer, of which its ledger id is made; a row's number is the entry id.

        Raises:
            ImportFailedError: the file can't be read.
            FencedError: somebody else has taken the warehouse over.
        """
        with _errors_of(path):
            ledger = FIRST_LEDGER_OF_FILES + _digest(self.source_topic, path)
            metadata = pq.read_metadata(path)
        size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        # The same for a file each time, for the writes of a file are known by the numbers of its parts.
        rows_at_once = min(_ROWS_AT_ONCE, max(1, metadata.num_rows * _FILE_BYTES_AT_ONCE // max(size, 1)))
        first = 0
        for number, rows in enumerate(_batches(path, rows_at_once), 1):
            self._append(self._messages(rows, ledger, first), f"import-{ledger}", number)
            first += rows.num_rows

    def rows(self, rows: pa.Table, ledger: int) -> None:
        """Imports rows as all messages of a ledger, unless an earlier import did.

        Args:
            rows: with columns of COLUMNS, and `reason`, string: why a row is rejected; null: nothing is known yet.
            ledger: from FIRST_LEDGER_OF_FILES on.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        self._append(self._messages(rows, ledger, 0), f"import-{ledger}", 1)

    def topic(self, name: str, subscription: str = SUBSCRIPTION) -> None:
        """Imports the messages of another topic that a subscription of it has not acknowledged, and acknowledges them.

        Imports the messages that the topic has when this begins. They are due by their properties, as those of a source
        topic are, or else when Pulsar itself would deliver them.

        Args:
            subscription: must be there, and have no consumers, if it is not SUBSCRIPTION.

        Raises:
            ImportFailedError: there is no such subscription, messages do not come, or the broker does not tell what is
                needed of them.
            PulsarError, pulsar.PulsarException: the topic can't be read.
            FencedError: somebody else has taken the warehouse over.
        """
        client = connect(self._settings.pulsar)
        admin = AdminClient(self._settings.pulsar)
        schemas = SchemaKeeper(self._settings.warehouse, admin)
        try:
            for partition in client.get_topic_partitions(name):
                if subscription != SUBSCRIPTION and admin.backlog(partition, subscription) is None:
                    raise ImportFailedError(f"{partition} has no subscription {subscription}")
                source = SourceTopic(partition, self.source_topic, -1)
                alone = [(Position(*a), Position(*b)) for a, b in admin.acknowledged_alone(partition, subscription)]
                app_id = f"import {partition} to {self.source_topic}"
                written = _position(self.tables.written("entries", app_id))
                begin = max(BrokerSide(admin, subscription).begin(partition), written)
                consumer = subscribe(client, partition, subscription, crypto_key_reader(self._settings.pulsar))
                details = MessageDetails(source, admin, schemas, name)
                chunks = self._chunks(consumer, partition, subscription, written, details)
                for found, last in _with_not_seen(chunks, admin, source, begin, alone):
                    messages = with_native_times(found, admin, partition, self._settings.tracker.max_delay_millis)
                    self._append(_as_imported(messages), app_id, _number(last), is_by_position=True)
                    consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
                consumer.close()
        except NotKnownYet as error:
            raise ImportFailedError(f"{name}: {error}") from error
        finally:
            client.close()
            admin.close()

    def _chunks(
        self,
        consumer: pulsar.Consumer,
        partition: str,
        subscription: str,
        written: Position,
        details: MessageDetails,
    ) -> Iterator[tuple[pa.Table, Position]]:
        """Yields a topic partition's messages up to the last one that it has now, in whole entries.

        Args:
            written: the last entry that an earlier import has written: messages up to it are left out.

        Yields:
            (messages, position): MESSAGES, of which there may be none, and the entry up to which they are.
        """
        newest = consumer.get_last_message_id()
        end = Position(newest.ledger_id(), newest.entry_id())
        builder = self._builder(details)
        position = Position(-1, -1)
        idle = 0
        while position < end:
            try:
                message = consumer.receive(_IDLE_MILLIS)
                idle = 0
            except pulsar.Timeout:
                idle += 1
                if not builder.is_whole and idle < _MOST_IDLE:
                    continue  # the rest of a batch
                if len(builder) and builder.is_whole:
                    yield builder.build(), position
                    builder = self._builder(details)
                    continue
                # The last messages may have been acknowledged before, or the client can't read them.
                with AdminClient(self._settings.pulsar) as admin:
                    if not admin.backlog(partition, subscription):
                        yield MESSAGES.empty_table(), end
                        return
                    # Or they are the first chunks of a message whose last one has not come, and may never come.
                    last = max(position, written)
                    passed = _before_parts(admin, partition, subscription, last, end)
                    if passed is not None:
                        if passed > last:
                            yield MESSAGES.empty_table(), passed
                        return
                raise ImportFailedError(f"{partition}: no message after {position} comes, though there are") from None
            message_id = message.message_id()
            position = Position(message_id.ledger_id(), message_id.entry_id())
            batch_index, batch_size = message_id.batch_index(), batch_size_of(message_id)
            if position <= written:
                self.done.already_there += 1
            else:
                if position in builder.entries:
                    continue
                if not builder.is_adding(position):
                    builder.start_entry(position, batch_size, None)
                builder.add(message, batch_index)
            if batch_index + 1 < batch_size and batch_index >= 0:
                position = Position(position.ledger_id, position.entry_id - 1)  # there is more of the entry
            elif len(builder) >= _MESSAGES_AT_ONCE or builder.n_bytes >= _BYTES_AT_ONCE or position >= end:
                # No messages, where all were written already and had not been acknowledged.
                yield builder.build() if len(builder) else MESSAGES.empty_table(), position
                builder = self._builder(details)

    def _builder(self, details: MessageDetails) -> ChunkBuilder:
        source = SourceTopic(self.source_topic, self.source_topic, -1)
        return ChunkBuilder(source, self._settings.tracker.max_delay_millis, self._max_size, details)

    def _source(self, topic: str) -> str | None:
        """Returns the source topic of the route that a topic, or a partition, belongs to; None: no route has it."""
        return resolve_topic(topic, {route.source for route in self._settings.routes})[0]

    def _messages(self, rows: pa.Table, ledger: int, first: int) -> pa.Table:
        """Returns a file's rows as MESSAGES of a ledger, with entry ids from `first` on."""
        n, now = rows.num_rows, time.time_ns() // 1_000_000
        own = _own_columns(rows)
        due = pc.fill_null(own["deliver_at"], now)
        reasons = self._reasons(due, own, now)
        columns = {
            **own,
            "topic": pa.repeat(self.source_topic, n),
            "partition": pa.repeat(-1, n),
            "ledger_id": pa.repeat(ledger, n),
            "entry_id": pa.array(np.arange(first, first + n)),
            "batch_index": pa.repeat(-1, n),
            "batch_size": pa.repeat(1, n),
            "deliver_at": due,
            "publish_time": pa.repeat(now, n),
            "event_time": pc.fill_null(own["event_time"], 0) if "event_time" in own else pa.repeat(0, n),
            "reason": pc.coalesce(rows["reason"], reasons) if "reason" in rows.column_names else reasons,
        }
        return typed(columns, MESSAGES)

    def _reasons(self, due: pa.ChunkedArray, own: dict[str, pa.ChunkedArray], now: int) -> pa.Array:
        """Returns why each row is rejected: string, (rows,); null: it is not."""
        times = due.to_numpy()
        delay = self._settings.tracker.max_delay_millis
        cases: list[tuple[BoolArray, str]] = [
            (times < 0, "deliver_at is negative"),
            (times > MAX_TIME_MILLIS, "deliver_at is beyond the year 9999"),
            (
                _sizes(own, len(times)) > self._max_size,
                "too many bytes to be delivered with their delaylake properties",
            ),
        ]
        if delay:
            cases.append((times - now > delay, TOO_FAR.format(delay)))
        reasons = np.full(len(times), None, dtype=object)
        for is_wrong, reason in reversed(cases):
            reasons[is_wrong] = reason
        return pa.array(reasons, pa.string())

    def _append(self, messages: pa.Table, app_id: str, number: int, is_by_position: bool = False) -> None:
        """Appends messages to the tables, unless an earlier import did; to `entries` last, when the others have them.

        Args:
            messages: MESSAGES.
            app_id: of the transactions.
            number: of the write; rises from write to write.
            is_by_position: the number is that of the last message's position, so that an interrupted import may have
                written some of the messages to some of the tables: those are left out.
        """
        rejected = is_rejected(messages)
        was_seen = ~pc.fill_null(pc.starts_with(messages["reason"], NOT_SEEN_REASON), False).to_numpy()
        taken = in_order(where(messages, ~rejected))
        parts = (
            ("rejects", to_rejects(where(messages, rejected), 0)),
            ("delayed_index", to_index(taken, 0)),
            ("entries", where(messages, (int64(messages, "batch_index") <= 0) & was_seen).select(ENTRY_COLUMNS)),
        )
        is_new = False
        for table, rows in parts:
            if is_by_position:
                rows = where(rows, _numbers(rows) > self.tables.written(table, app_id))
            if rows.num_rows:
                is_new = self.tables.append(table, rows, {app_id: number})
        if is_new:
            self.done.messages += messages.num_rows
            self.done.rejected += int(rejected.sum())
        else:
            self.done.already_there += messages.num_rows
        self._on_progress("delayed_index", "messages imported", self.done.messages)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into an ImportFailedError with one line."""
    try:
        yield
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ImportFailedError(f"{path}: {one_line(error)}") from None


def _batches(path: Path, rows_at_once: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields a file's rows in parts; `columns`: these alone.

    Raises:
        ImportFailedError: it can't be read.
    """
    with _errors_of(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(rows_at_once, columns=columns):
            yield pa.Table.from_batches([batch])


def _digest(topic: str, path: Path) -> int:
    """Returns a hash of 48 bits of a topic and a file: of its name, its size and its footer."""
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, end - length))
        footer = file.read(length)
    return hash48(f"{topic} {path.name} {end} ".encode() + footer)


def hash48(content: bytes) -> int:
    """Returns a hash of 48 bits, of which the ledger ids of what is imported are made."""
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "big")


def _own_columns(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Returns a file's columns in the types of COLUMNS, those that it has."""
    return {name: _cast(rows[name], kind) for name, kind in COLUMNS.items() if name in rows.column_names}


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms"), safe=False)
    return column.cast(kind)


def _sizes(own: dict[str, pa.ChunkedArray], n: int) -> np.ndarray:
    """Returns the bytes of each row's payload, keys and properties: int64, (n,)."""
    sizes = np.zeros(n, np.int64)
    for name in ("payload", "key", "ordering_key"):
        if name in own:
            sizes += pc.fill_null(pc.binary_length(own[name]), 0).to_numpy()
    if "properties" in own:
        properties = own["properties"].combine_chunks()
        lengths = sum(
            pc.fill_null(pc.binary_length(part), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            for part in (properties.keys, properties.items)
        )
        offsets = properties.offsets.to_numpy() - properties.offsets[0].as_py()
        total = np.concatenate([[0], np.cumsum(lengths + FIELD_BYTES)])
        sizes += total[offsets[1:]] - total[offsets[:-1]]
    return sizes


def _before_parts(
    admin: AdminClient, partition: str, subscription: str, last: Position, end: Position
) -> Position | None:
    """Returns up to which entry a topic partition is read where only chunks of unfinished messages, or markers, follow.

    Args:
        subscription: by which it is read.
        last: the last entry that was handed over, or that an earlier import has written.
        end: the last entry of the topic partition.

    Returns:
        the last entry that is handed over or acknowledged; None: a message follows, or that is not known.
    """
    stats = admin.internal_stats(partition)
    if stats is None:
        return last
    acknowledged = Position(*stats.acknowledged.get(subscription, START))
    passed = acknowledged if acknowledged.entry_id >= 0 and acknowledged > last else last
    left = list(islice(positions_in(missing_ranges(Gap(passed, end.next), stats.ledgers)), _MAX_PARTS + 1))
    entries = (admin.entry_metadata(partition, *position) for position in left)
    try:
        is_over = len(left) <= _MAX_PARTS and all(entry is None or entry.is_no_message for entry in entries)
    except NoAnswerError:
        return None
    return passed if is_over else None


def _with_not_seen(
    chunks: Iterable[tuple[pa.Table, Position]],
    admin: AdminClient,
    source: SourceTopic,
    begin: Position,
    acknowledged: list[tuple[Position, Position]],
) -> Iterator[tuple[pa.Table, Position]]:
    """Adds to each chunk of a topic partition's messages those that the client did not hand over, to be rejected.

    Args:
        chunks: (messages, position): MESSAGES, and the entry up to which they are.
        begin: the entry before the first one.
        acknowledged: ranges of entries that are not missed, as of `not_acknowledged`.
    """
    continuity = Continuity(begin)
    for messages, last in chunks:
        gaps = continuity.gaps(messages)
        if continuity.last < last:
            gaps.append(Gap(continuity.last, last.next))
            continuity.begin_after(last)
        gaps = list(not_acknowledged(gaps, acknowledged))
        found = pa.concat_tables(
            [REJECTS.empty_table(), *(find_not_seen(admin, source, gap, lambda _: None).rows for gap in gaps)]
        )
        n = found.num_rows
        columns = {name: found[name] for name in found.column_names} | {
            "batch_size": pa.repeat(1, n),
            "deliver_at": found["publish_time"],
            "event_time": pa.repeat(0, n),
        }
        yield concat([messages, typed(columns, MESSAGES)]), last


def _as_imported(messages: pa.Table) -> pa.Table:
    """Moves the messages of another topic to ledger ids of imported messages, which no cluster has."""
    i = messages.schema.get_field_index("ledger_id")
    ledgers = pc.add(messages["ledger_id"], FIRST_IMPORTED_LEDGER)
    return messages.set_column(i, messages.schema.field(i), ledgers)


def _number(position: Position) -> int:
    """Returns the number of a position: it rises with the position."""
    return (position.ledger_id << _ENTRY_BITS) + position.entry_id


def _position(number: int) -> Position:
    """Returns the position whose `_number` it is; START for -1."""
    return START if number < 0 else Position(number >> _ENTRY_BITS, number & ((1 << _ENTRY_BITS) - 1))


def _numbers(imported: pa.Table) -> Int64Array:
    """Returns the `_number` of each imported message's original position: int64, (messages,)."""
    return ((int64(imported, "ledger_id") - FIRST_IMPORTED_LEDGER) << _ENTRY_BITS) + int64(imported, "entry_id")
