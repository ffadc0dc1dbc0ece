"""Maintenance in a simulation: the real code, on real Delta tables that are made of those in memory.

What a commit of it takes out of a table the one in memory loses at once. After each commit a listing that was begun
before is read on.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from conf.settings import Settings
from tests.simulation import tables as fake_tables
from tests.simulation.accounts import Pair, require
from tests.simulation.live_tables import Place
from tests.simulation.rebuilding import Copy
from tests.simulation.scheduler import wall_seconds
from warehouse.delta.fencing import EPOCH, FencedError
from warehouse.maintenance.maintain import maintain
from warehouse.queries.listing import PendingFilter, PendingMessage
from warehouse.queries.pending_messages import Pending

if TYPE_CHECKING:
    from tests.simulation.world import World

_KEPT_MILLIS = 15_000  # of rows that nobody needs; of deliveries and outcomes the service keeps more
_PAGE = 4  # messages
_OF_JOB = re.compile("delaylake-[0-9a-f]{12}")  # the app id of a job's transactions
_OVERDUE_TOO = PendingFilter(due_from=0)
_NAMED = ["ledger_id", "entry_id", "partition", "batch_index", "subscription"]


class _MaintainedCopy(Copy):
    """The tables in memory, as Delta tables that are maintained."""

    def __init__(self, maintenance: Maintenance, world: World) -> None:
        super().__init__(world.logs, world.oracle.replaced, world.point)
        self._maintenance, self._world = maintenance, world
        self._rows = {name: self.rows(name) for name in world.logs}
        self._joined = self._open("entries").transaction_version(EPOCH) or 0

    def committed(self, uri: str) -> None:
        """Takes out of the table in memory what a commit has taken out of the copy.

        Raises:
            FencedError: somebody else has overtaken the job beside which this runs.
        """
        if (log := self._logs.get(Path(uri).name)) is None:
            return
        newest = log.transaction(EPOCH, log.newest) or 0
        if newest > self._joined:
            raise FencedError(uri, self._joined, newest)
        before, after = self._rows[log.name], self.rows(log.name)
        self._rows[log.name] = after
        deleted = Counter(map(repr, before.to_pylist())) - Counter(map(repr, after.to_pylist()))
        if deleted:
            rows = log.rows(log.newest)
            is_kept = []
            for row in map(repr, rows.to_pylist()):
                is_kept.append(not deleted[row])
                deleted[row] -= deleted[row] > 0
            gone = rows.filter(pa.array([not kept for kept in is_kept], pa.bool_()))
            log.commits.append(fake_tables.Commit(rows.filter(pa.array(is_kept)), {}, replaces=True))
            for version in range(log.forced_to, log.newest + 1):
                log.force(version)
            self._world.oracle.deleted(log.name, gone)
            self._world.trace(f"{log.name}: {gone.num_rows} rows are deleted")
        self._maintenance.read_on()
        self._point(f"maintenance: {log.name} is written")


class Maintenance:
    """Maintenance beside the job, and listings that are read meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = _MaintainedCopy(self, world)
        self.settings = of_copy(world.settings, self.copy)
        self._listings: list[_Listing] = []

    def run(self) -> int:
        """Returns the number of rows that are deleted."""
        self._listings = [_Listing(self, route.source, self._world) for route in self.settings.routes]
        reports = maintain(self.settings)
        for listing in self._listings:
            listing.check_end()
        return sum(report.rows_deleted for report in reports)

    def read_on(self) -> None:
        """Reads the next page of each listing."""
        for listing in self._listings:
            listing.read_on()


def of_copy(settings: Settings, copy: Copy | Place) -> Settings:
    """Returns settings with which the tables of a copy are maintained and audited."""
    kept = {"delayed_index_millis": _KEPT_MILLIS, "entries_millis": _KEPT_MILLIS}
    return settings.model_copy(
        update={"warehouse": f"file:{copy.folder}", "retention": settings.retention.model_copy(update=kept)}
    )


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


class _Listing:
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
        self._found: list[PendingMessage] = []
        self.read_on()

    def read_on(self) -> None:
        if not self._is_whole:
            page = Pending(self._settings, self._topic, _OVERDUE_TOO, self._cursor).page(_PAGE)
            self._found += page.messages
            self._cursor = page.cursor
            self._is_whole = page.cursor is None

    def check_end(self) -> None:
        """The listing is as when it was begun: what waited then is in it, once for each time, soonest first."""
        while not self._is_whole:
            self.read_on()
        places = [one.place for one in self._found]
        require(places == sorted(set(places)), f"a listing of {self._topic} is out of order: {places}")
        listed = {(_position(one), name) for one in self._found for name in one.subscriptions}
        missing, wrong = self._waiting - listed, self._done & listed
        require(not missing, f"a listing of {self._topic} lacks {sorted(missing)[:3]}")
        require(not wrong, f"a listing of {self._topic} has {sorted(wrong)[:3]}, which were delivered")


def _position(message: PendingMessage) -> str:
    ref = message.ref
    return f"{ref.ledger_id}:{ref.entry_id}:{ref.partition}:{ref.batch_index}"
