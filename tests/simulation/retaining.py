"""Maintenance in a simulation: the real code, on real Delta tables that are made of those in memory.

What a commit of it takes out of a table the one in memory loses at once. After each commit, and after each vacuum, a
listing that was begun before is read on. A vacuum goes by the simulated clock (`file_times.py`). After it the tables in
memory have no versions any more that were too old: the job must not read them again.

Each commit of the job is a file, as in the real tables: a run merges many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.settings import Settings
from tests.simulation import tables as fake_tables
from tests.simulation.accounts import Pair, require
from tests.simulation.live_tables import KEPT_MILLIS, LiveTables, require_old
from tests.simulation.scheduler import wall_seconds
from warehouse.delta.fencing import EPOCH, FencedError
from warehouse.delta.opening import open_newest
from warehouse.maintenance.maintain import _Maintenance, maintain
from warehouse.maintenance.retention import OutdatedError
from warehouse.queries.listing import PendingFilter, PendingMessage, VersionGoneError
from warehouse.queries.pending_messages import Pending

if TYPE_CHECKING:
    from tests.simulation.world import World

_KEPT_MILLIS = 15_000  # of rows that nobody needs; of deliveries and outcomes the service keeps more
_MAX_NUM_BUCKETS = 4  # files overlap by half of it at most: a run has some to merge
_PAGE = 4  # messages
_REST = 1_000  # of a listing when maintenance has ended
_OF_JOB = re.compile("delaylake-[0-9a-f]{12}")  # the app id of a job's transactions
_OVERDUE_TOO = PendingFilter(due_from=0)
_NAMED = ["ledger_id", "entry_id", "partition", "batch_index", "subscription"]


class Maintenance:
    """Maintenance beside the job, and listings that are read meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = world.live_tables()
        for name in world.logs:
            self.copy.bring(name)
        self._rows = {name: self.copy.rows(name) for name in world.logs}
        self._joined = _epoch(world.logs["entries"])
        self.settings = of_copy(world.settings, self.copy)

    def run(self) -> int:
        """Returns the number of rows that are deleted."""
        listings = self.copy.listings
        before, begun = [*listings], [Listing(self, route.source, self._world) for route in self.settings.routes]
        listings += begun
        began_at = self._world.scheduler.now
        try:
            reports = maintain(self.settings)
        except OutdatedError as error:
            require_old("maintenance", self._world.scheduler.now - began_at, error)
            raise
        for listing in (*before, begun[0]):  # the other one is read on beside the next run
            listing.check_end()
            listings.remove(listing)
        return sum(report.rows_deleted for report in reports)

    def committed(self, uri: str) -> None:
        """Takes out of the table in memory what a commit has taken out of the real one.

        Raises:
            FencedError: somebody else has overtaken the job beside which this runs.
        """
        log = self._world.logs.get(Path(uri).name)
        if log is None:  # a table that is of no job, as what has expired
            return
        if (newest := _epoch(log)) > self._joined:
            self.copy.has_other_rows(log.name)
            raise FencedError(uri, self._joined, newest)
        before, after = self._rows[log.name], self.copy.rows(log.name)
        deleted = Counter(map(repr, before.to_pylist())) - Counter(map(repr, after.to_pylist()))
        if deleted:
            self.copy.bring(log.name)
            rows = log.rows(log.newest)
            is_kept = []
            for row in map(repr, rows.to_pylist()):
                is_kept.append(not deleted[row])
                deleted[row] -= deleted[row] > 0
            gone = rows.filter(pa.array([not kept for kept in is_kept], pa.bool_()))
            log.commits.append(fake_tables.Commit(rows.filter(pa.array(is_kept)), {}, replaces=True))
            self.copy.has_brought(log.name)
            for version in range(log.forced_to, log.newest + 1):
                log.force(version)
            self._world.oracle.deleted(log.name, gone)
            self._world.trace(f"{log.name}: {gone.num_rows} rows are deleted")
        self._rows[log.name] = self.copy.rows(log.name)
        self.copy.note_files()
        self.read_on()
        self._world.point(f"maintenance: {log.name} is written")

    def vacuum(self, name: str, work: Callable[[], int]) -> int:
        """Vacuums a table; then old versions of the one in memory are gone, too."""
        n = self.copy.vacuum(name, work)
        self._world.trace(f"{name}: {n} files are vacuumed")
        self._world.forget_versions(name, KEPT_MILLIS / 1000)
        self._world.point(f"maintenance: {name} is vacuumed")
        if n:
            self.read_on()
        return n

    def read_on(self) -> None:
        """Reads the next page of a listing, of one after another."""
        listings = self.copy.listings
        listings.append(listings.pop(0))
        listings[-1].read_on()


def of_copy(settings: Settings, copy: LiveTables) -> Settings:
    """Returns settings with which real tables are maintained and audited."""
    kept = {"delayed_index_millis": _KEPT_MILLIS, "entries_millis": _KEPT_MILLIS}
    return settings.model_copy(
        update={
            "warehouse": copy.uri,
            "retention": settings.retention.model_copy(update=kept),
            "maintain": settings.maintain.model_copy(update={"keep_versions_millis": KEPT_MILLIS}),
            "tracker": settings.tracker.model_copy(update={"max_num_buckets": _MAX_NUM_BUCKETS}),
        }
    )


def _epoch(log: fake_tables.Log) -> int:
    return log.transaction(EPOCH, log.newest) or 0


def pairs_of(deliveries: pa.Table) -> set[Pair]:
    """Returns (position, subscription) of each row."""
    return set(zip(deliveries["position"].to_pylist(), deliveries["subscription"].to_pylist(), strict=True))


def delivered_for_good(world: World) -> set[Pair]:
    """Returns what is delivered for whoever reads the tables now.

    What is due later by the reader's clock, which may have been set back, waits for a reader. So does what has just
    been delivered (docs/rest.md): the rows of its batch are not written yet.
    """
    log = world.logs["deliveries"]
    is_past = pc.field("deliver_at") <= round(wall_seconds() * 1000)
    is_written = pc.field("batch_id") <= _last_tick(world.logs["delayed_index"])
    return pairs_of(log.rows(log.newest).filter(is_past & is_written))


def _last_tick(index: fake_tables.Log) -> int:
    """Returns the last tick of which a job has written rows; -1: none has."""
    ticks = [number for app, number in index.transactions(index.newest).items() if _OF_JOB.fullmatch(app)]
    return max(ticks, default=-1)


class Listing:
    """A listing of what waits of a topic, page after page."""

    def __init__(self, maintenance: Maintenance, topic: str, world: World) -> None:
        self._settings, self._topic = maintenance.settings, topic
        index, deliveries = maintenance.copy.rows("delayed_index"), maintenance.copy.rows("deliveries")
        # A row without a subscription is for all.
        indexed = {
            (f"{ledger}:{entry}:{partition}:{number}", name)
            for ledger, entry, partition, number, name in zip(
                *(c.to_pylist() for c in index.filter(pc.equal(index["operation"], "DELAY")).select(_NAMED).columns),
                strict=True,
            )
        }
        delivered = pairs_of(deliveries)
        wanted = world.oracle.wanted(topic)
        self._waiting = {(one, name) for one, name in wanted if {(one, None), (one, name)} & indexed} - delivered
        self._done = wanted & delivered_for_good(world)
        self._cursor: str | None = None
        self._is_whole = False
        self._is_gone = False
        self._began_at = world.scheduler.now
        self._world = world
        self._found: list[PendingMessage] = []
        self.read_on()
        # The first page may have read a version of `deliveries` that came since.
        self._waiting -= pairs_of(maintenance.copy.rows("deliveries"))

    def read_on(self, messages: int = _PAGE) -> None:
        """Reads the next page."""
        if not self._is_whole:
            try:
                page = Pending(self._settings, self._topic, _OVERDUE_TOO, self._cursor).page(messages)
            except VersionGoneError as error:
                require_old(f"a listing of {self._topic}", self._world.scheduler.now - self._began_at, error)
                self._world.trace(f"a listing of {self._topic} is over: {error}")
                self._is_whole = self._is_gone = True
                return
            self._found += page.messages
            self._cursor = page.cursor
            self._is_whole = page.cursor is None

    def check_end(self) -> None:
        """The listing is as when it was begun: what waited then is in it, once for each time, soonest first."""
        while not self._is_whole:
            self.read_on(_REST)
        if self._is_gone:
            return
        places = [one.place for one in self._found]
        require(places == sorted(set(places)), f"a listing of {self._topic} is out of order: {places}")
        listed = {(_position(one), name) for one in self._found for name in one.subscriptions}
        missing, wrong = self._waiting - listed, self._done & listed
        require(not missing, f"a listing of {self._topic} lacks {sorted(missing)[:3]}")
        require(not wrong, f"a listing of {self._topic} has {sorted(wrong)[:3]}, which were delivered")


def _position(message: PendingMessage) -> str:
    ref = message.ref
    return f"{ref.ledger_id}:{ref.entry_id}:{ref.partition}:{ref.batch_index}"


def maintenance_names(world: World) -> dict[Any, dict[str, Any]]:
    """What a vacuum has around it."""
    vacuum = _Maintenance._vacuum

    def by_simulated_clock(self: _Maintenance, dry_run: bool) -> int:
        maintenance = world.rebuild_of()
        assert isinstance(maintenance, Maintenance)
        if world.clocks_jump:
            return 0  # by more than versions are kept: it can't tell whether the job stands still

        def work() -> int:
            self._files._table = open_newest(self._tables.path(self._name))  # its log has been written anew
            return vacuum(self, dry_run)

        return maintenance.vacuum(self._name, work)

    return {_Maintenance: {"_vacuum": by_simulated_clock}}
