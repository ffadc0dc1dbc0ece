"""Finds and deletes the rows of a table that nobody needs any more: not the job, not a rebuild, not the audit.

A row can go when it is older than its table's retention (a held row: when its message was delivered or cancelled that
long ago), and

- in `delayed_index`, all subscriptions are done with the message;
- in `entries`, `delayed_index` has no row of the entry any more, and it is none of the last ones;
- in `deliveries`, `outcomes` and `rejects`, `entries` does not have the entry any more.

So the audit finds every message of `entries` accounted for, and a rebuild knows which messages of `delayed_index` are
done. All rows of entries that a rebuild would read again from the source topics stay. A recurring message stays as long
as it recurs, and its deliveries within a day of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from conf.errors import DelayLakeError, UnreadableWarehouseError
from conf.settings import Settings
from tracker.commands.kinds import Effect
from tracker.commands.repeats import ANSWERS_KEPT_MILLIS
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    BoolArray,
    are_recurring,
    attempts_of,
    has_occurrences,
    int64,
    is_among,
    where,
)
from warehouse.delta.engine import LOCAL, Engine
from warehouse.delta.opening import is_gone, open_newest, reading_files
from warehouse.delta.snapshot import query_builder, run_sql
from warehouse.delta.tables import Tables
from warehouse.maintenance.past_occurrences import OccurrenceRetention
from warehouse.maintenance.table_files import DataFile, TableFiles, TableFolder, new_run
from warehouse.named_queries import TRUE, NamedQueries, Sql, columns
from warehouse.pending import IS_CANCEL, IS_RESTORE, are_cancelled, are_moved_on, effects_of
from warehouse.routes.known_routes import subscription_names
from warehouse.routes.membership import Memberships
from warehouse.schemas import SCHEMAS

# `deliveries` keeps at least this time before its newest row: a rebuild compares it with the ends of the destinations.
_LAST_DELIVERIES_MILLIS = 3_600_000

# `entries` keeps at least this time before the last entry of each topic partition: a restore with another broker
# compares it with the entries there.
LAST_ENTRIES_MILLIS = 3_600_000

# `deliveries` keeps at least this time before the last delivery of a recurring message: a rebuild finds missing
# occurrences within it by their numbers.
LAST_OCCURRENCES_MILLIS = 24 * 3_600_000

# Rows of a file are deleted, and its other rows written again, when at least this share of them can go, or when the
# file is small.
_LEAST_PART = 0.1
_SMALL_ROWS = 20_000

_MAX_LEDGERS = 200  # a query names at most so many one by one

_ENTRY = ["ledger_id", "entry_id"]
_MESSAGE = [*_ENTRY, "batch_index"]
_SUBSCRIPTION_MESSAGE = ["subscription", *_MESSAGE]
_SQL = NamedQueries(
    __file__,
    message_columns=columns(_SUBSCRIPTION_MESSAGE),
    is_cancel=IS_CANCEL,
    is_restore=IS_RESTORE,
    first_imported_ledger=FIRST_IMPORTED_LEDGER,
)
_NO_MOVES = pa.schema(
    [
        *[("topic", pa.string()), ("subscription", pa.string()), ("ledger_id", pa.int64()), ("entry_id", pa.int64())],
        *[("batch_index", pa.int32()), ("sequence", pa.int64())],
    ]
).empty_table()
_NEEDED = {
    "delayed_index": [
        *["topic", "partition", "ledger_id", "entry_id", "batch_index", "operation", "deliver_at"],
        *["subscription", "sequence", "attempt", "occurrence"],
    ],
    "entries": ["topic", "partition", "ledger_id", "entry_id", "publish_time", "first_index", "batch_size"],
    "deliveries": [
        *["topic", "partition", "ledger_id", "entry_id", "sent_at"],
        *["batch_index", "subscription", "occurrence"],
    ],
    "outcomes": [
        *["topic", "partition", "ledger_id", "entry_id", "result", "operation", "effect", "occurrence"],
        *["applied_at", "deliver_at"],
    ],
    "rejects": ["topic", "partition", "ledger_id", "entry_id", "publish_time"],
}


# The columns of deleted rows of `entries` that go into the table `expired`.
_RECORDED = ["topic", "partition", "first_index", "batch_size"]


@dataclass(frozen=True)
class Excess:
    """A file with rows that can go: all of them, or so many that it is worth writing the others again.

    Attributes:
        rows: the number of rows that can go.
        rest: the action that adds the file with the other rows; None: there are none, or they were not written.
        expired: the rows of `entries` that can go, with their indexes; None for another table.
    """

    file: DataFile
    rows: int
    rest: AddAction | None
    expired: pa.Table | None


class OutdatedError(DelayLakeError):
    """The versions of the tables by which rows are looked at are gone. The message is one line."""


class Retention:
    """Finds rows that can go, in the tables' newest versions at the time of the constructor's call.

    It can be pickled, and opens the same versions then.

    Args:
        now: the current time, ms since the epoch.
    """

    def __init__(self, settings: Settings, tables: Tables, now: int) -> None:
        self._names = subscription_names(settings)
        self._warehouse = settings.warehouse
        self._control_topic = settings.control.topic
        self._memberships = Memberships.of(settings.warehouse)
        self._now = now
        self._horizons = {name: now - getattr(settings.retention, f"{name}_millis") for name in SCHEMAS}
        # A repeated command is answered from `outcomes`, and a rebuild takes the known request ids from there.
        self._horizons["outcomes"] = min(self._horizons["outcomes"], now - ANSWERS_KEPT_MILLIS)
        # `entries` is opened first: its messages are in the other tables before, also while the job runs.
        names = sorted(SCHEMAS, key=lambda name: name != "entries")
        opened = {name: open_newest(tables.path(name)) for name in names}
        self._versions = {name: (table.table_uri, int(table.version())) for name, table in opened.items()}
        self._builder = query_builder(opened)
        newest = self._query(_SQL("last_delivery"))["t"][0].as_py() or 0
        self._horizons["deliveries"] = min(self._horizons["deliveries"], newest - _LAST_DELIVERIES_MILLIS)
        self._last: pa.Table | None = None

    def __getstate__(self) -> dict[str, Any]:
        self._last_durable()  # queried here once, and not in each task
        return {name: value for name, value in vars(self).items() if name != "_builder"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        opened = {name: DeltaTable(uri, version=version) for name, (uri, version) in self._versions.items()}
        self._builder = query_builder(opened)

    def excess(self, table: TableFiles, writes: bool, engine: Engine = LOCAL) -> Iterator[Excess]:
        """Yields the files of a table from which rows can go.

        Args:
            writes: whether to write the other rows of each such file again, for `remove`.
            engine: reads and writes the files.
        """
        horizon = self._horizons[table.name]
        # Held rows have a time in the far future, by which they never get old.
        held = HELD_DELIVER_AT if table.name == "delayed_index" else np.iinfo(np.int64).max
        files = [file for file in table.all() if file.first < horizon or file.last >= held]
        find = _ExcessFinder(self, table.folder, horizon, held, writes)
        engine = engine.of(sum(file.rows for file in files))
        return (found for found in engine.each(find, files) if found is not None)

    def can_go(self, name: str, rows: pa.Table) -> BoolArray:
        """Returns a mask, bool, (rows,), of the rows that can go.

        Args:
            name: the table.
            rows: its columns _NEEDED, of rows that are past its horizon or held.
        """
        if name == "delayed_index":
            is_held = int64(rows, "deliver_at") >= HELD_DELIVER_AT
            can_go = np.zeros(rows.num_rows, np.bool_)
            for part, condition in ((~is_held, self._can_go_from_index), (is_held, self._held_can_go)):
                if part.any():
                    can_go[part] = condition(where(rows, part))
            return can_go
        if name == "entries":
            return self._is_durable(rows) & ~self._is_of_last(rows) & ~self._is_in("delayed_index", rows)
        unneeded = self._is_durable(rows) & ~self._is_in("entries", rows)
        if name == "outcomes":
            is_proof = pc.is_in(rows["result"], pa.array(["APPLIED", "SUPERSEDED", "EXPIRED"]))
            # A rebuild knows by its last pause change whether a subscription is paused.
            is_pause_change = pc.is_in(effects_of(rows), pa.array([Effect.HOLD, Effect.RESUME]))
            is_pause_change = is_pause_change.to_numpy(zero_copy_only=False) & ~self._are_of_past_schedules(rows)
            may_go: BoolArray = ~is_pause_change & (unneeded | ~is_proof.to_numpy(zero_copy_only=False))
            # A rebuild takes waiting commands from here: a cancel waits until after the time that it names.
            may_come = pc.greater_equal(pc.fill_null(rows["deliver_at"], 0), self._horizons[name])
            waits: BoolArray = pc.and_(pc.equal(rows["result"], "WAITING"), may_come).to_numpy(zero_copy_only=False)
            may_go &= ~waits
            return may_go
        if name == "rejects":
            # `rejects` also has commands that could not be read, which `entries` never has.
            is_command: BoolArray = pc.equal(rows["topic"], self._control_topic).to_numpy(zero_copy_only=False)
            return unneeded | is_command
        if name == "deliveries" and has_occurrences(rows):
            return unneeded | self._was_long_ago(rows)
        return unneeded

    def _are_of_past_schedules(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the outcomes about an occurrence whose message is not in the index any more."""
        are_of_schedules: BoolArray = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
        return are_of_schedules & ~self._is_in("delayed_index", rows) if are_of_schedules.any() else are_of_schedules

    def _was_long_ago(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the deliveries of recurring messages that were more than a day before the last one."""
        last = self._query(_SQL("last_occurrence_sent", in_ledgers_of_rows=_in_ledgers(rows)))
        keys = rows.select([*_SUBSCRIPTION_MESSAGE, "sent_at"]).append_column("row", pa.array(np.arange(rows.num_rows)))
        found = keys.join(last, _SUBSCRIPTION_MESSAGE, join_type="inner", use_threads=False)
        is_old = np.zeros(rows.num_rows, np.bool_)
        is_old[int64(found, "row")] = int64(found, "sent_at") < int64(found, "last") - LAST_OCCURRENCES_MILLIS
        recurs: BoolArray = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
        return is_old & recurs

    def _can_go_from_index(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows of `delayed_index` past its horizon that can go."""
        # Rows of other operations can go once their entry is durable: `outcomes` has the cancels, too.
        can_go: BoolArray = np.where(_is_delay(rows), self._is_settled(rows), self._is_durable(rows))
        return can_go

    def _held_can_go(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows of `delayed_index` at HELD_DELIVER_AT that can go.

        A held row may be the only row of its message, also after that was released. It stays until the message was
        delivered or cancelled longer ago than the horizon. Its MOVE rows stay as long as there are DELAY rows.
        """
        horizon = self._horizons["delayed_index"]
        delivered = _SQL("sent_before", in_ledgers_of_rows=_in_ledgers(rows), horizon=horizon)
        settled = self._are_done(rows, delivered, _SQL("applied_before", horizon=horizon), _NO_MOVES)
        is_last = self._is_durable(rows) & ~self._is_in("delayed_index", rows)
        can_go: BoolArray = np.where(_is_delay(rows), settled, is_last)
        return can_go

    def _is_settled(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the DELAY rows with which all subscriptions of their topic's route are done.

        A subscription is done with a row if the row is not for it, or its message was delivered there, cancelled, or
        moved to a later row; with the row of an occurrence also if a later one was delivered. Rows of a topic without
        a route stay: its subscriptions are not known.
        """
        first, last = pc.min_max(rows["deliver_at"]).as_py().values()
        moved = self._query(_SQL("moves", in_ledgers_of_rows=_in_ledgers(rows)))
        return self._are_done(rows, _SQL("due_between", first=first, last=last), TRUE, moved)

    def _are_done(self, rows: pa.Table, delivered_when: Sql, cancelled_when: Sql, moved: pa.Table) -> BoolArray:
        """Returns a mask as `_is_settled` does, from a selection of deliveries, cancels and moves.

        Args:
            rows: rows of `delayed_index`.
            delivered_when: SQL condition: which rows of `deliveries` count.
            cancelled_when: SQL condition: which cancelling rows of `outcomes` count.
            moved: the MOVE rows that count, with the columns of _NO_MOVES.
        """
        delivered = self._query(_SQL("deliveries", delivered_when=delivered_when))
        recurs = has_occurrences(rows)
        horizon = self._horizons["delayed_index"]
        occurrences = OccurrenceRetention(self._query, _in_ledgers(rows), self._now, horizon) if recurs else None
        may_go_on = occurrences.may_go_on(rows) if occurrences else np.zeros(rows.num_rows, np.bool_)
        # The first row of a recurring message is needed for its next ones.
        is_first = pc.and_(pc.is_valid(rows["occurrence"]), pc.is_null(rows["sequence"])) if recurs else None
        # The row of a later occurrence: it shows that a schedule has ended, if that occurrence was missed.
        is_next = are_recurring(rows) & pc.is_valid(rows["sequence"]).to_numpy(zero_copy_only=False)
        ledgers = _in_ledgers(rows)
        cancelled = self._query(_SQL("cancels", cancelled_when=cancelled_when, in_ledgers_of_rows=ledgers))
        restored = self._query(_SQL("restores", in_ledgers_of_rows=ledgers))
        attempts = pa.array(attempts_of(rows))
        rows = rows.select([name for name in rows.column_names if name != "attempt"]).append_column("attempt", attempts)
        settled = np.zeros(rows.num_rows, np.bool_)
        for topic, subscriptions in self._names.items():
            is_of_topic = pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False)
            for subscription in subscriptions:
                delivered_to, cancels, restores, moves = (
                    done.filter(pc.and_(pc.equal(done["topic"], topic), pc.equal(done["subscription"], subscription)))
                    for done in (delivered, cancelled, restored, moved)
                )
                is_other = pc.fill_null(pc.not_equal(rows["subscription"], subscription), False)
                is_needed = np.zeros(rows.num_rows, np.bool_) if is_first is None else is_first.to_numpy()
                is_done = occurrences.are_done(rows, subscription) if occurrences else np.zeros(len(settled), np.bool_)
                is_of_topic &= (
                    is_done
                    | is_among(rows, delivered_to, [*_MESSAGE, "attempt"])
                    | are_cancelled(rows, cancels, restores)
                    | is_other.to_numpy(zero_copy_only=False)
                    | (are_moved_on(rows, moves) & ~is_needed)
                    | (self._memberships.were_missed(rows, topic, subscription) & ~is_next)
                )
            settled |= is_of_topic
        return settled & ~may_go_on

    def _is_durable(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows of entries that a rebuild would not read again from the source topics."""
        durable = int64(rows, "ledger_id") >= FIRST_IMPORTED_LEDGER
        joined = self._with_last(rows, _ENTRY)
        ledger, entry = int64(joined, "ledger_id"), int64(joined, "entry_id")
        last_ledger, last_entry = int64(joined, "last_ledger"), int64(joined, "last_entry")
        durable[int64(joined, "row")] = (ledger < last_ledger) | ((ledger == last_ledger) & (entry <= last_entry))
        return durable

    def _is_of_last(self, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows of `entries` among the last of their topic partitions, without imported ones.

        The last one tells a rebuild which entries are durable.
        """
        is_of_last = np.zeros(rows.num_rows, np.bool_)
        joined = self._with_last(rows, ["publish_time"])
        since = int64(joined, "last_published") - LAST_ENTRIES_MILLIS
        is_of_last[int64(joined, "row")] = int64(joined, "publish_time") >= since
        return is_of_last & (int64(rows, "ledger_id") < FIRST_IMPORTED_LEDGER)

    def _with_last(self, rows: pa.Table, columns: list[str]) -> pa.Table:
        """Returns columns of rows, and `row`, their number, with those of the last durable entry of their partition."""
        keys = rows.select(["topic", "partition", *columns]).append_column("row", pa.array(np.arange(rows.num_rows)))
        return keys.join(self._last_durable(), ["topic", "partition"], join_type="inner", use_threads=False)

    def _last_durable(self) -> pa.Table:
        """Returns topic, partition, last_ledger, last_entry and last_published of the last durable entry of each."""
        if self._last is None:
            last: dict[tuple[str, int], tuple[int, int, int]] = {}
            by_ledger = self._query(_SQL("last_entries"))
            for topic, partition, *entry in zip(*(c.to_pylist() for c in by_ledger.columns), strict=True):
                last[topic, partition] = max((*entry,), last.get((topic, partition), (-1, -1, -1)))
            columns = [[*column] for column in zip(*((*k, *v) for k, v in last.items()), strict=True)] or [[]] * 5
            types = [pa.string(), pa.int32(), pa.int64(), pa.int64(), pa.int64()]
            names = ["topic", "partition", "last_ledger", "last_entry", "last_published"]
            self._last = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=names)
        return self._last

    def _is_in(self, table: str, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows whose entry is in a table: `delayed_index` (as a DELAY row) or `entries`."""
        query = "entries_in_entries" if table == "entries" else "entries_in_delayed_index"
        found = self._query(_SQL(query, in_ledgers_of_rows=_in_ledgers(rows)))
        return is_among(rows, found, _ENTRY)

    def _query(self, sql: Sql) -> pa.Table:
        """Runs a query over the tables' versions.

        Raises:
            OutdatedError: a vacuum has removed files of them.
            UnreadableWarehouseError: they can't be read.
        """
        try:
            with reading_files(self._warehouse):
                return run_sql(self._builder, sql)
        except UnreadableWarehouseError as error:
            if is_gone(error):
                raise OutdatedError(
                    "the run has taken longer than the tables keep old versions (maintain.keep_versions_millis): "
                    "what it has done stays, and the next run goes on"
                ) from error
            raise


@dataclass(frozen=True)
class _ExcessFinder:
    """Finds the rows that can go in one file of a table.

    Attributes:
        horizon: rows before this time can go, ms since the epoch.
        held: rows from this time on are parked, and can go, too, ms since the epoch.
        writes: whether to write the other rows again.
    """

    retention: Retention
    folder: TableFolder
    horizon: int
    held: int
    writes: bool

    def __call__(self, file: DataFile) -> Excess | None:
        """Returns the rows that can go; None: none, or too few to write the file again."""
        name, time = self.folder.name, self.folder.time
        rows = self.folder.read(file.path, _NEEDED[name])
        goes = (int64(rows, time) < self.horizon) | (int64(rows, time) >= self.held)
        if goes.any():
            index = np.flatnonzero(goes)
            goes[index] = self.retention.can_go(name, rows.take(pa.array(index)))
        n = int(goes.sum())
        if n == 0 or (len(goes) > _SMALL_ROWS and n < _LEAST_PART * len(goes)):
            return None
        expired = where(rows, goes).select(_RECORDED) if name == "entries" else None
        return Excess(file, n, self._write(file, goes) if self.writes and n < len(goes) else None, expired)

    def _write(self, file: DataFile, goes: BoolArray) -> AddAction:
        rest = self.folder.read(file.path).filter(pa.array(~goes))
        return self.folder.write(rest, file.run if file.is_part else new_run(), changes_data=True)


def remove(table: TableFiles, excess: Sequence[Excess]) -> bool:
    """Deletes the rows that can go, in one commit.

    Args:
        excess: files whose other rows have been written again.

    Returns:
        whether it was done; False if some of the files were removed in the meantime.
    """
    added = [found.rest for found in excess if found.rest is not None]
    return table.replace([found.file for found in excess], added, changes_data=True)


def _is_delay(rows: pa.Table) -> BoolArray:
    is_delay: BoolArray = pc.equal(rows["operation"], "DELAY").to_numpy(zero_copy_only=False)
    return is_delay


def _in_ledgers(rows: pa.Table) -> Sql:
    """Returns the SQL condition that a row is of one of these rows' ledgers, or only between them if they are many."""
    ledgers = pc.unique(rows["ledger_id"]).to_pylist()
    if len(ledgers) > _MAX_LEDGERS:
        return _SQL("between_ledgers", first=min(ledgers), last=max(ledgers))
    return _SQL("in_ledgers", ledgers=ledgers)
