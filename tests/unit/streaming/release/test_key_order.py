"""Order per key, from the shards to the destination, whatever is sent side by side, fails or is sent again."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt
from streaming.release.job import Job, job_of
from streaming.release.plan import Plan, PlannedSend, by_time, plan_release
from streaming.release.producer_line import Line
from streaming.release.sender import _after
from streaming.release.turns import Turns
from tests.examples import examples
from tests.key_order_history import Came, violations
from tests.messages import TOPIC, messages, tick_at
from tracker.messages import concat, pack
from tracker.shard import Shard
from tracker.sharding import Place
from tracker.store import MemoryStore
from tracker.tick import TickInput
from warehouse.known_routes import known_routes

SHARDS, LANES, LOOKAHEAD = 2, 2, 1_000
SETTINGS = Settings(
    routes=[{"source": TOPIC, "subscriptions": [{"name": "one", "order": "key"}, {"name": "other"}]}]  # type: ignore[arg-type]
)
OFFSET = Offset(lanes=LANES, batch_millis=5, routes=known_routes(SETTINGS).to_json())


@dataclass
class Broker:
    """Topics with deduplication; `came` has by topic (producer, sequence id, tick, row of the message)."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)
    came: dict[str, list[Came]] = field(default_factory=lambda: defaultdict(list))

    def take(self, send: PlannedSend, plan: Plan) -> None:
        line = (send.topic, send.producer)
        if send.sequence_id <= self.last.get(line, -1):
            return
        self.last[line] = send.sequence_id
        row = {name: plan.columns[name][send.row] for name in ("ledger_id", "entry_id", "batch_index")}
        key = (plan.columns["ordering_key"][send.row] or plan.columns["key"][send.row] or "").encode()
        self.came[send.topic].append(Came(key, send.due, tuple(row.values()), plan.tick))


class Task:
    """A job being sent: its lines go side by side, each in order, as far as they need not wait for each other."""

    def __init__(self, job: Job, broker: Broker) -> None:
        self.broker = broker
        self.pending = by_time([plan_release(SETTINGS, one, Attempt()) for one in job.assignments])
        self.lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        lines: dict[tuple[str, str], Line] = {}
        for i, (send, _) in enumerate(self.pending):
            name = (send.topic, send.producer)
            send.line = lines.setdefault(name, Line(*name, create=None, patience_seconds=1))  # type: ignore[arg-type]
            self.lines[name].append(i)
        for of_line in self.lines.values():
            ids = [self.pending[i][0].sequence_id for i in of_line]
            assert ids == sorted(ids)
        self.after = _after(self.pending) or [-1] * len(self.pending)
        self.sent: set[int] = set()

    def step(self, random: random.Random) -> bool:
        """Sends one message of some line; whether any is left."""
        heads = [of_line[0] for of_line in self.lines.values() if of_line]
        ready = [i for i in heads if self.after[i] < 0 or self.after[i] in self.sent]
        if not heads:
            return False
        assert ready, "lines wait for each other"
        i = random.choice(ready)
        self.broker.take(*self.pending[i])
        self.sent.add(i)
        send = self.pending[i][0]
        self.lines[send.topic, send.producer].pop(0)
        return True


class Service:
    """Shards, and a releaser whose jobs take any time at all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stores = [MemoryStore() for _ in range(SHARDS)]
        self.broker = Broker()
        self.tick, self.now, self.entries, self.confirmed, self.run = 0, 1_000_000, 0, 0, 0
        self.start()

    def start(self) -> None:
        """Begins a run: what an earlier one was sending is lost."""
        self.run += 1
        self.turns = Turns(threading.Condition(), threading.Event())
        self.lanes: dict[str, list[Job]] = defaultdict(list)
        self.running: dict[str, Task] = {}
        self.open: dict[int, int] = Counter()  # by tick the jobs that have not ended
        self.is_new = True  # no batch yet

    def batch(self, later: int, entries: list[tuple[int, int]]) -> None:
        """A tick; entries have each a key, 0: none, and a delay, ms."""
        self.tick, self.now = self.tick + 1, self.now + later
        taken = []
        for key, delay in entries:
            keys = {"key": f"k{key}"} if key % 2 else {"ordering_key": f"k{key}", "key": f"p{self.entries}"}
            # 64 entries share a shard.
            row = (1, 64 * self.entries + self.entries, self.now + delay)
            taken.append(messages([row], **(keys if key else {})))
            self.entries += 1
        rows = concat(taken)
        while not self.is_new and self.confirmed < self.tick - 1 and not self.open[self.confirmed + 1]:
            self.confirmed += 1
        self.is_new = False
        cutoff = self.now + LOOKAHEAD
        tick = tick_at(
            self.tick, cutoff, run_id=f"run{self.run}", confirmed=self.confirmed, now=self.now, seal_epoch=0,
            load_horizon=0, near_until=cutoff + 10_000, sending=OFFSET.to_tick().sending,
        )  # fmt: skip
        releases: dict[tuple[int, int], list[Assignment]] = {}
        for number, store in enumerate(self.stores):
            place = Place(number, SHARDS)
            shard = Shard(store, OFFSET.known_routes.subscriptions, 1_000_000, place=place)
            here = rows.filter(place.has(rows)) if rows.num_rows else rows
            for one in shard.apply(tick, TickInput(messages=here)).releases:
                assignment = Assignment("app", number, one.tick, one.kind, pack(one.rows))
                releases.setdefault((one.tick, one.kind), []).append(assignment)
        for release, assignments in sorted(releases.items()):
            job = job_of(*release, assignments, self.tick)
            self.turns.add(job)
            self.lanes[job.lane].append(job)
            self.open[job.tick] += 1

    def step(self) -> bool:
        """Lets some lane go on; whether anything is left to do."""
        lanes = [name for name, jobs in self.lanes.items() if jobs]
        free = [name for name in lanes if name in self.running or not self.turns.must_wait(self.lanes[name][0])]
        if not lanes:
            return False
        assert free, "jobs wait for each other"
        name = self.random.choice(free)
        job = self.lanes[name][0]
        task = self.running.setdefault(name, Task(job, self.broker))
        if self.random.random() < 0.02:
            del self.running[name]  # it fails, and is sent again
        elif not task.step(self.random):
            del self.running[name]
            self.lanes[name].pop(0)
            self.turns.end(job)
            self.open[job.tick] -= 1
        return True

    def finish(self) -> None:
        while self.step():
            pass


TICK = st.tuples(
    st.integers(1, 7).map(lambda n: n * 100),  # so that many are due at the same time
    st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 25).map(lambda n: n * 100)), max_size=8),
    st.integers(0, 25),
    st.integers(0, 12).map(lambda n: n == 0),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(TICK, min_size=2, max_size=15), st.integers(0, 1 << 30))
def test_messages_of_a_key_come_in_order_however_jobs_and_lines_go_and_whatever_ends(
    ticks: list[tuple[int, list[tuple[int, int]], int, bool]], seed: int
) -> None:
    service = Service(seed)
    for later, entries, steps, is_crash in [*ticks, (5_000, [], 0, True), (1, [], 0, False)]:
        if is_crash:
            service.start()
        service.batch(later, entries)
        for _ in range(steps):
            service.step()
    service.finish()
    for name in ("one", "other"):
        came = service.broker.came[f"{TOPIC}-{name}"]
        counts = Counter(one.position for one in came)
        assert len(counts) == service.entries
        assert set(counts.values()) <= {1}
    assert violations([one for one in service.broker.came[f"{TOPIC}-one"] if one.key]) == []


def test_without_it_the_same_service_has_messages_of_a_key_overtake_each_other() -> None:
    service = Service(7)
    for _ in range(12):
        service.batch(300, [(1 + i % 3, 200 * i) for i in range(8)])
    service.batch(5_000, [])
    service.finish()
    assert violations(service.broker.came[f"{TOPIC}-other"])
    assert not violations(service.broker.came[f"{TOPIC}-one"])


def test_the_history_checker_knows_what_could_have_come_before() -> None:
    def came(key: str, due: int, position: int, tick: int) -> Came:
        return Came(key.encode(), due, (position,), tick)

    first, then = came("a", 20, 1, tick=5), came("a", 10, 2, tick=5)
    assert violations([then, first]) == []
    assert violations([first, then]) == [(first, then)]
    assert violations([first, came("a", 10, 2, tick=6)]) == []  # it came in too late
    assert violations([first, came("b", 10, 2, tick=5)]) == []
    assert violations([came("a", 20, 2, tick=5), came("a", 20, 1, tick=4)]) != []


def test_those_of_a_key_stay_in_order_where_ticks_are_sent_together() -> None:
    """As what was handed out for a destination that could not be written."""
    service = Service(1)
    service.batch(1, [(1, 900), (3, 1_000), (2, 800), (2, 100)])
    service.batch(500, [(1, -100), (3, 400), (2, 0), (1, 1_000), (3, 600)])
    service.batch(500, [(1, 0), (3, 10), (2, 900)])
    plans = [
        plan_release(SETTINGS, a, Attempt()) for jobs in service.lanes.values() for j in jobs for a in j.assignments
    ]
    ordered = [(send, plan) for send, plan in by_time(plans) if send.key is not None]
    by_line: dict[str, list[int]] = defaultdict(list)
    for send, _ in ordered:
        by_line[send.producer].append(send.sequence_id)
    assert all(ids == sorted(ids) for ids in by_line.values())
    assert [send.at for send, _ in ordered] == sorted(send.at for send, _ in ordered)
    assert len(ordered) == 12
    came = [Came(send.key[2], send.due, send.rank[3:], plan.tick) for send, plan in ordered if send.key is not None]
    assert violations(came) == []


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_message_with_an_ordering_key_alone_stays_with_the_others_of_its_key(partitions: int) -> None:
    rows = messages([(1, i, 10) for i in range(20)], ordering_key="k")
    offset = Offset(lanes=1, routes=OFFSET.routes, destinations={f"{TOPIC}-one": partitions})
    tick = tick_at(1, 100, sending=offset.to_tick().sending)
    [release] = [
        one
        for one in Shard(MemoryStore(), offset.known_routes.subscriptions, 100)
        .apply(tick, TickInput(messages=rows))
        .releases
        if one.kind & 2
    ]
    plan = plan_release(SETTINGS, Assignment("app", 0, 1, release.kind, pack(release.rows)), Attempt())
    assert len({send.topic for send in plan.sends}) == 1
    assert len(plan.sends) == 20
