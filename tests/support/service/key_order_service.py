"""Shards, the releaser's jobs and a broker, without Spark: releases are sent side by side, and take any time at all."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt
from streaming.release.driver.lane_release import LaneRelease, SentRelease, lane_release_of
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.feedback import Feedback
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.planning.sending_order import arriving_before, by_time
from streaming.release.task.producer_line import Line
from streaming.sinks.batch_sink import _waiting
from streaming.source.clock import _places
from tests.support.naive.key_order_history import Came
from tests.support.naive.parked import rounds
from tests.support.tracker.messages import TOPIC, commands, messages
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.messages import concat, int64, where
from tracker.packing import pack
from tracker.schemas import KNOWN, SEQUENCE_BITS, PauseChange
from tracker.shard import Shard
from tracker.sharding import ShardId
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result
from warehouse.routes.known_routes import KnownRoutes, known_routes

LANES, LOOKAHEAD, NEAR, LOAD = 2, 1_000, 3_000, 6_000
ENTRY = 65  # from one message's entry to the next one's

_COLUMNS = ("key", "ordering_key", "ledger_id", "entry_id", "batch_index")
_MORE_COLUMNS = ("was_due", "sequence", "attempt", "shaped_from", "occurrence")


def settings_of(**one: Any) -> Settings:
    """Settings of two subscriptions: `one`, in order and with what is given, and `other`, which has neither."""
    subscriptions = [{"name": "one", "order": "key", **one}, {"name": "other"}]
    return Settings(routes=[{"source": TOPIC, "subscriptions": subscriptions}])  # type: ignore[arg-type]


def _named(bits: int) -> list[str]:
    return [name for number, name in enumerate(("one", "other")) if bits >> number & 1]


@dataclass
class Broker:
    """Topics with deduplication; `came` has the history of each, oldest first."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)
    came: dict[str, list[Came]] = field(default_factory=lambda: defaultdict(list))

    def take(self, send: PlannedSend, plan: Plan, taken_in: Sequence[int]) -> None:
        """Takes a message, unless it has it; `taken_in` has by entry the tick in which it came in."""
        line = (send.topic, send.producer)
        if send.sequence_id <= self.last.get(line, -1):
            return
        self.last[line] = send.sequence_id
        row = {name: plan.columns[name][send.row] for name in (*_COLUMNS, *_MORE_COLUMNS)}
        sequence = row["sequence"] or 0
        had_its_time = sequence >> SEQUENCE_BITS or taken_in[row["entry_id"] // ENTRY]
        came = Came(
            key=(row["ordering_key"] or row["key"] or "").encode(),
            due=send.due,
            position=(row["ledger_id"], row["entry_id"], row["batch_index"]),
            tick=plan.tick,
            was_due=row["was_due"],
            sequence=sequence,
            # A place may be given long after the message has come in, and an occurrence makes the next one.
            since=had_its_time if row["shaped_from"] is None and row["occurrence"] is None else None,
            attempt=row["attempt"],
            occurrence=row["occurrence"],
        )
        self.came[send.topic].append(came)


class Task:
    """A job being sent: its lines go side by side, each in order, as far as they need not wait for each other."""

    def __init__(self, settings: Settings, job: LaneRelease, broker: Broker, taken_in: Sequence[int]) -> None:
        self.broker = broker
        self.taken_in = taken_in
        self.pending = by_time([plan_release(settings, one, Attempt()) for one in job.assignments])
        self.lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        lines: dict[tuple[str, str], Line] = {}
        for i, (send, _) in enumerate(self.pending):
            name = (send.topic, send.producer)
            send.line = lines.setdefault(name, Line(*name, create=None, patience_seconds=1))  # type: ignore[arg-type]
            self.lines[name].append(i)
        for of_line in self.lines.values():
            ids = [self.pending[i][0].sequence_id for i in of_line]
            assert ids == sorted(ids)
        self.after = arriving_before(self.pending) or [-1] * len(self.pending)
        self.sent: set[int] = set()

    def step(self, random: random.Random) -> bool:
        """Sends one message of some line; whether any is left."""
        heads = [of_line[0] for of_line in self.lines.values() if of_line]
        ready = [i for i in heads if self.after[i] < 0 or self.after[i] in self.sent]
        if not heads:
            return False
        assert ready, "lines wait for each other"
        i = random.choice(ready)
        self.broker.take(*self.pending[i], self.taken_in)
        self.sent.add(i)
        send = self.pending[i][0]
        self.lines[send.topic, send.producer].pop(0)
        return True


class Service:
    """Shards, and a releaser whose jobs take any time at all.

    Args:
        seed: of what goes on first.
        settings: as `settings_of` makes them.
        shards: how many there are.
    """

    def __init__(self, seed: int, settings: Settings | None = None, shards: int = 2) -> None:
        self.random = random.Random(seed)
        self.settings = settings or settings_of()
        self.routes: KnownRoutes = known_routes(self.settings)
        self.stores = [MemoryStore() for _ in range(shards)]
        self.shard_ids = [ShardId(number, shards) for number in range(shards)]
        self.broker = Broker()
        self.now, self.seal_epoch, self.confirmed, self.run = 1_000_000, 0, 0, 0
        self.last = Offset(load_horizon=self.now, near_until=self.now)
        self.taken_in: list[int] = []  # by entry
        self.times = [self.now]  # by tick
        self.sealed: list[pa.Table] = []
        self.applied: Counter[tuple[str, int, str]] = Counter()  # by operation, entry and subscription
        self.feedback = Feedback()
        self.round_rows = 1_000  # of what was parked
        self.resuming: tuple[str, ...] = ()
        self.start()

    @property
    def tick(self) -> int:
        return self.last.tick

    @property
    def entries(self) -> int:
        return len(self.taken_in)

    def start(self) -> None:
        """Begins a run: what an earlier one was sending is lost."""
        self.run += 1
        self.releases = Releases()
        self.lanes: dict[str, list[LaneRelease]] = defaultdict(list)
        self.running: dict[str, Task] = {}
        self.open: dict[int, int] = Counter()  # by tick the jobs that have not ended
        self.is_new = True  # no batch yet
        self.feedback = Feedback()

    def batch(self, later: int, entries: list[tuple[int, int]], **changes: Any) -> list[Effects]:
        """A tick; entries have each a key, 0: none, and a delay, ms; `changes` are those of `tick_all`."""
        rows = [self.message(key, self.now + later + delay) for key, delay in entries]
        return self.tick_all(later, rows, **changes)

    def message(self, key: int, due: int, **columns: object) -> pa.Table:
        """Makes the next message, which is to come in with the next tick; keys are partition and ordering keys."""
        n = self.entries
        if key:
            columns |= {"key": f"k{key}"} if key % 2 else {"ordering_key": f"k{key}", "key": f"p{n}"}
        self.taken_in.append(self.tick + 1)
        # 64 entries share a shard.
        return messages([(1, ENTRY * n, due)], **columns)

    def tick_all(
        self,
        later: int,
        rows: Sequence[pa.Table] = (),
        orders: Sequence[dict[str, object]] = (),
        pauses: Sequence[PauseChange] = (),
    ) -> list[Effects]:
        """A tick of all shards, whose releases are given to the lanes."""
        self.now += later
        while not self.is_new and self.confirmed < self.tick - 1 and not self.open[self.confirmed + 1]:
            self.confirmed += 1
        self.is_new = False
        offset, last = self._next_offset(), self.last
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = where(stored, (due >= last.load_horizon) & (due < offset.load_horizon))
        named = pa.array([order["entry_id"] for order in orders], pa.int64())
        of_orders = stored.filter(pc.is_in(stored["entry_id"], named))
        known = of_orders.filter(pc.is_null(of_orders["sequence"])).select(KNOWN.names).cast(KNOWN)
        resumed = {*self.resuming, *(n for one in pauses if not one.is_paused for n in _named(one.subscriptions))}
        going_out = rounds(stored, sorted(resumed), self.round_rows) if resumed else {}
        requests = {str(order["request_id"]): 1 for order in orders} | {change.request_id: 1 for change in pauses}
        found = []
        for shard_id, store in zip(self.shard_ids, self.stores, strict=True):

            def own(table: pa.Table, shard_id: ShardId = shard_id) -> pa.Table:
                return where(table, shard_id.has(table)) if table.num_rows else table

            shard = Shard(store, self.routes.subscriptions, 1_000_000, shard_id=shard_id)
            new = concat(rows)
            given = TickInput(
                messages=own(new),
                elsewhere=where(new, shard_id.is_home(new) & ~shard_id.has(new)).select(ENTRY_LOG_ROWS.names),
                segment=own(segment),
                commands=own(commands(orders)),
                request_ids=requests,
                known_messages=own(known),
                payload_rows=own(of_orders),
                pause_changes=pauses,
                **{name: own(part) if isinstance(part, pa.Table) else part for name, part in going_out.items()},
            )
            found.append(shard.apply(offset.to_tick(), given))
        self.last = offset
        self.times.append(self.now)
        self._keep(found)
        self._hand_over(found)
        return found

    def _next_offset(self) -> Offset:
        last, tick = self.last, self.tick + 1
        ends = tick % 3 == 0 or self.now + LOOKAHEAD >= last.near_until
        self.seal_epoch += ends
        return Offset(
            tick=tick,
            now=self.now,
            cutoff=self.now + LOOKAHEAD,
            seal_epoch=self.seal_epoch,
            load_horizon=max(last.load_horizon, self.now + LOAD) if ends else last.load_horizon,
            near_until=max(last.near_until, self.now + NEAR) if ends else last.near_until,
            run_id=f"run{self.run}",
            confirmed=self.confirmed,
            ingested_through=tick,
            lanes=LANES,
            batch_millis=5,
            routes=self.routes.to_json(),
            places=_places(last, self.now, self.feedback, {}, 1_000_000),
        )

    def _keep(self, found: Sequence[Effects]) -> None:
        """Keeps what the tables and the feedback would have of a tick."""
        [self.resuming] = {tuple(effects.resuming.get(TOPIC, ())) for effects in found}
        self.sealed += [effects.bucket for effects in found if effects.bucket.num_rows]
        self.feedback = Feedback(waiting=(self.tick, _waiting([effects.waiting for effects in found])))
        for effects in found:
            for row in effects.outcomes.to_pylist():
                if row["result"] in (Result.APPLIED, Result.SUPERSEDED):
                    operation = row["operation"] if row["result"] == Result.APPLIED else "SUPERSEDED"
                    self.applied[operation, row["entry_id"] // ENTRY, row["subscription"]] += 1

    def _hand_over(self, found: Sequence[Effects]) -> None:
        releases: dict[tuple[int, int], list[Assignment]] = {}
        for number, effects in enumerate(found):
            for one in effects.releases:
                assignment = Assignment("app", number, one.tick, one.kind, pack(one.rows))
                releases.setdefault((one.tick, one.kind), []).append(assignment)
        for release, assignments in sorted(releases.items()):
            job = lane_release_of(*release, assignments, self.tick)
            self.releases.add(job)
            self.lanes[job.lane].append(job)
            self.open[job.tick] += 1

    def step(self) -> bool:
        """Lets some lane go on; whether anything is left to do."""
        lanes = [name for name, jobs in self.lanes.items() if jobs]
        free = [name for name in lanes if name in self.running or not self.releases.must_wait(self.lanes[name][0].id)]
        if not lanes:
            return False
        assert free, "jobs wait for each other"
        name = self.random.choice(free)
        job = self.lanes[name][0]
        task = self.running.get(name) or Task(self.settings, job, self.broker, self.taken_in)
        self.running[name] = task
        if self.random.random() < 0.02:
            del self.running[name]  # it fails, and is sent again
        elif not task.step(self.random):
            del self.running[name]
            self.lanes[name].pop(0)
            self.releases.begin_next(job.lane)
            for event in (ReleaseEvent.TIME, ReleaseEvent.UNBLOCKED):
                self.releases.note(job, event)
            self.releases.end(SentRelease(job), ReleaseEvent.COMPLETE)
            self.open[job.tick] -= 1
        return True

    def finish(self) -> None:
        while self.step():
            pass

    def came(self, name: str) -> list[Came]:
        """The history of a subscription's destination."""
        return self.broker.came[f"{TOPIC}-{name}"]
