"""The releaser: what a destination does that can't be written, to the others and to what is known after a crash."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from status.troubles import Troubles
from streaming.release.attempt import Assignment, Attempt, Failed, Sent
from streaming.release.driver import spark_jobs, unwritable_destinations
from streaming.release.driver.releaser import Releaser
from streaming.release.feedback import Feedback
from streaming.release.sequence_ids import last_sequence_id, tick_of
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from tests.support.service.harness import now, wait_until
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.commands.holding.giving_up import NOT_DELIVERED, NOT_TAKEN
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.messages import MESSAGES, concat, with_columns
from tracker.packing import pack, unpack
from warehouse.delta import tables as warehouse
from warehouse.routes.known_routes import KnownRoutes, known_routes
from warehouse.schemas import DELIVERIES

pytestmark = pytest.mark.slow

NAMES = ["a", "b"]
SENDING = '{"lanes": 2}'


@dataclass
class Tables:
    """Appended rows, and the last version of each writer."""

    epoch = 1
    versions: dict[str, int] = field(default_factory=dict)
    delivered: list[tuple[int, str, int]] = field(default_factory=list)  # tick, subscription, entry
    appended: list[tuple[str, pa.Table]] = field(default_factory=list)

    def written(self, table: str, name: str) -> int:
        return self.versions.get(name, -1)

    def query(self, table: str, sql: str) -> pa.Table:
        """The rows of those subscriptions that a query names."""
        rows = concat([rows for name, rows in self.appended if name == table], DELIVERIES)
        return rows.filter(pa.array([f"= '{name}'" in sql for name in rows["subscription"].to_pylist()], pa.bool_()))

    def check_epoch(self, max_age_seconds: float) -> None:
        pass

    def append(self, table: str, rows: pa.Table, versions: dict[str, int]) -> None:
        self.appended.append((table, rows))
        self.versions |= versions
        if table != "deliveries":
            return
        columns = (rows[name].to_pylist() for name in ("batch_id", "subscription", "entry_id"))
        self.delivered += list(zip(*columns, strict=True))


class Recorded:
    """A feedback file, as the source reads it."""

    def __init__(self) -> None:
        self.last = Feedback()

    def write(self, feedback: Feedback) -> None:
        self.last = Feedback(**json.loads(json.dumps(asdict(feedback))))


class Spark:
    """Runs tasks in the thread that asks for them."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.tasks: list[int] = []

    def setLocalProperty(self, name: str, value: str) -> None:
        pass

    def parallelize(self, items: Iterable[Any], tasks: int) -> Any:
        self.tasks.append(tasks)

        @dataclass
        class Rdd:
            made: list[Any]

            def mapPartitions(self, function: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
                return Rdd(list(function(self.made)))

            def collect(self) -> list[Any]:
                return self.made

        return Rdd(list(items))


class Job:
    """A releaser on a fake Spark and fake destinations."""

    def __init__(
        self,
        folder: Path,
        tables: Tables | None = None,
        names: Sequence[str] = NAMES,
        routes: KnownRoutes | None = None,
        **changes: Any,
    ) -> None:
        self.tables = tables or Tables()
        self.feedback = Recorded()
        self.broken: dict[str, str] = {}  # by subscription why its destination can't be written
        self.refused: dict[str, str] = {}  # by subscription why the client does not take its messages
        self.is_short_well = False  # short notice arrives there
        self.told: list[dict[tuple[str, str], int]] = []  # up to where it has arrived, in each attempt
        self.is_stuck = threading.Event()  # nothing that is sent has arrived until the job ends
        self.arrived_to = -1  # of what is sent to them
        self.known: list[int] = []  # what of that each attempt was told
        self.is_silent = False  # they do not answer, rather than refuse
        self.is_broker_there = True
        self.slow: set[int] = set()  # ticks whose releases take their time, as the first one of a run does
        self.probed: list[str] = []
        self.attempts: list[tuple[int, frozenset[str]]] = []
        self.sent: list[tuple[int, str, int]] = []  # due, producer and sequence id of what has arrived at `a`
        self.troubles = Troubles()
        self.lock = threading.Lock()
        self.settings = settings = Settings(
            checkpoint=f"file:{folder}",
            release={"lanes": 2, "retry_max_millis": 1_000, **changes},  # type: ignore[arg-type]
            routes=[{"source": TOPIC, "subscriptions": [{"name": name} for name in names]}],  # type: ignore[arg-type]
        )
        self.spark = Spark()
        self.releaser = Releaser(
            self.spark,  # type: ignore[arg-type]
            settings,
            self.tables,  # type: ignore[arg-type]
            self.feedback,  # type: ignore[arg-type]
            "app",
            lambda rows: None,
            self.troubles,
            routes,
        )
        self.releaser._job_sender._admin = self  # type: ignore[assignment]

    def health(self) -> bool:
        return self.is_broker_there

    def send(
        self, settings: str, attempt: Attempt, assignments: Iterable[Assignment], epoch: int, checked_at: float
    ) -> Iterator[Sent]:
        while self.is_stuck.is_set() and not self.releaser._stopped.wait(0.05):
            pass
        self.told.append(dict(attempt.arrived_to))
        assignments = list(assignments)
        plans = [plan_release(self.settings, assignment, attempt) for assignment in assignments]
        if "a" not in self.broken:
            pending = [send for send, _ in by_time(plans) if send.subscription == "a"]
            self.sent += [(send.due, send.producer, send.sequence_id) for send in pending]
        for assignment in assignments:
            if assignment.tick in self.slow and attempt.only is None:
                self.releaser._stopped.wait(2.5)
            rows = unpack(assignment.body)
            delivered, failed, done, skipped, refused = [], [], [], set(), []
            for number, name, is_dead in [(n, name, dead) for n, name in enumerate(NAMES) for dead in (False, True)]:
                bit, name = 1 << number, f"{name} dlq" if is_dead else name
                target, line = (TOPIC, name), (f"{TOPIC}-{name.replace(' ', '-')}", assignment.lane(2))
                chosen = [row for row in rows.to_pylist() if row["subscription_mask"] & bit]
                chosen = [row for row in chosen if ((row["attempt"] or 0) > 5) == is_dead]
                done_line = (assignment.tick, *line)
                if not chosen or done_line in attempt.done or (attempt.only is not None and target not in attempt.only):
                    continue
                if target in attempt.skipped:
                    skipped.add(target)
                elif name in self.broken and not (self.is_short_well and not assignment.kind):
                    failed.append(Failed(*line, target, self.broken[name], not self.is_silent, None, self.arrived_to))
                    self.known.append(attempt.arrived_to.get(line, -1))
                elif name in self.refused:
                    done.append(done_line)
                    refused += [{**row, "subscription": name, "reason": self.refused[name]} for row in chosen]
                else:
                    done.append(done_line)
                    of = name.removesuffix(" dlq")
                    delivered += [{**row, "subscription": of, "batch_id": assignment.tick} for row in chosen]
            with self.lock:
                self.attempts.append((assignment.tick, frozenset(name for _, name in skipped)))
            table = pa.Table.from_pylist(delivered, schema=DELIVERIES)
            release = (assignment.tick, assignment.kind)
            not_taken = {release: pack(pa.Table.from_pylist(refused, schema=MESSAGES))} if refused else {}
            yield Sent(pack(table), now(), tuple(done), tuple(failed), frozenset(skipped), not_taken)

    def probe(self, settings: str, topics: Iterable[str]) -> Iterator[str]:
        for topic in topics:
            self.probed.append(topic)
            yield self.broken.get(topic.removeprefix(f"{TOPIC}-").replace("-dlq", " dlq"), "")

    def submit(
        self,
        tick: int,
        releases: Iterable[int] = (),
        unwritable: Any = None,
        masks: Any = None,
        due: int = 1,
        attempt: int | None = None,
    ) -> None:
        """A batch that hands out releases, and whose offset has what the feedback had, if nothing else is said.

        Args:
            masks: by release the subscriptions as bits; both where it is not said.
            due: when all of them are, ms since the epoch.
        """
        bodies = []
        for of_tick in releases:
            bits = (masks or {}).get(of_tick, 3)
            rows = messages([(1, of_tick, due)], attempt=attempt)
            bodies.append((0, of_tick, True, pack(release_rows(rows, bits, SENDING))))
        recorded = (self.feedback.last.unwritable or {}) if unwritable is None else unwritable
        self.releaser.submit(tick, 1, 1, 1, bodies, recorded)

    def has_confirmed(self, tick: int) -> None:
        wait_until(lambda: self.feedback.last.confirmed >= tick, 5, f"{tick}: {self.feedback.last}")

    def open(self, subscription: str) -> list[int] | None:
        """The ticks whose releases are open for a subscription; None: it can be written."""
        unwritable = (self.feedback.last.unwritable or {}).get(TOPIC, {}).get(subscription)
        return None if unwritable is None else [tick for tick, _ in unwritable["open"]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def one(tables: Tables | None = None, names: Sequence[str] = NAMES, **changes: Any) -> Job:
        job = Job(tmp_path, tables, names, **changes)
        made.append(job)
        monkeypatch.setattr(spark_jobs, "send_releases", job.send)
        monkeypatch.setattr(spark_jobs, "can_write", job.probe)
        return job

    yield one
    for job in made:
        job.releaser.stop()


def test_one_that_refuses_leaves_the_others_alone_and_gets_its_own_in_order_later(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"] = "TopicTerminated"
    for tick in range(1, 6):
        job.submit(tick, [tick])
    wait_until(lambda: job.open("a") == [1, 2, 3, 4, 5], 5, "all are open")
    job.submit(6)
    job.has_confirmed(6)
    assert sorted(job.tables.delivered) == [(tick, "b", tick) for tick in range(1, 6)]
    assert [(t.kind, t.name) for t in job.troubles.current()] == [("unwritable", f"{TOPIC}-a")]
    assert "TopicTerminated" in job.troubles.current()[0].text

    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 2, 3, 4, 5]
    assert job.troubles.current() == []
    job.submit(7, [7])
    job.has_confirmed(7)
    assert sorted(name for tick, name, _ in job.tables.delivered if tick == 7) == NAMES


def test_dead_letters_that_can_not_be_written_wait_alone_also_for_another_run(make: Callable[..., Job]) -> None:
    job = make(unwritable="reject", unwritable_after_millis=1)
    job.broken["a dlq"] = "TopicTerminated"
    job.submit(1, [1], attempt=6)
    wait_until(lambda: job.open("a dlq") == [1], 5, "it is open")
    for tick in (2, 3):
        job.submit(tick, [tick], attempt=None if tick == 2 else 6)
    wait_until(lambda: job.open("a dlq") == [1, 3], 5, "they are open")
    job.submit(4)
    job.has_confirmed(4)
    assert sorted(job.tables.delivered) == [(1, "b", 1), (2, "a", 2), (2, "b", 2), (3, "b", 3)]
    assert [(t.kind, t.name) for t in job.troubles.current()] == [("unwritable", f"{TOPIC}-a-dlq")]
    recorded = job.feedback.last.unwritable
    assert recorded is not None
    assert recorded[TOPIC].keys() == {"a dlq"}
    wait_until(lambda: job.known.count(-1) > 3, 10, "it is tried again")
    assert "rejects" not in (job.feedback.last.unwritable or {})[TOPIC]["a dlq"]
    job.releaser.stop()

    again = make(job.tables)
    again.submit(5, [1, 3], unwritable=recorded, masks={1: 1, 3: 1}, attempt=6)
    wait_until(lambda: again.open("a dlq") is None, 10, "it can be written")
    again.has_confirmed(5)
    rows = [(1, "b", 1), (2, "a", 2), (2, "b", 2), (3, "b", 3), (1, "a", 1), (3, "a", 3)]
    assert sorted(again.tables.delivered) == sorted(rows)
    assert again.troubles.current() == []


def test_what_is_open_is_sent_by_when_it_is_due_and_of_each_producer_by_sequence_id(make: Callable[..., Job]) -> None:
    """A tick's short notice is due before, among and after its planned rows, and those of the ticks around."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    chance = random.Random(7)
    for tick in range(1, 7):
        bodies = []
        for is_planned, times in ((False, range(200)), (True, range(50, 150))):
            due = sorted(100 * tick + chance.choice(times) for _ in range(20))
            rows = messages([(tick, 20 * is_planned + i, at) for i, at in enumerate(due)])
            bodies.append((0, tick, is_planned, pack(release_rows(rows, 3, SENDING))))
        job.releaser.submit(tick, 1, 1, 1, bodies, job.feedback.last.unwritable or {})
    wait_until(lambda: len(job.open("a") or []) == 12, 5, "all are open")
    job.submit(7)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    delivered = [tick for tick, name, _ in job.tables.delivered if name == "a"]
    assert sorted(delivered) == [tick for tick in range(1, 7) for _ in range(40)]
    assert len(job.sent) == 240
    due = [at for at, *_ in job.sent]
    assert due == sorted(due)
    for producer in {producer for _, producer, _ in job.sent}:
        ids = [sequence_id for _, of, sequence_id in job.sent if of == producer]
        assert ids == sorted(ids)


def test_of_very_much_the_oldest_ticks_are_sent_first_and_each_as_a_whole(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritable_destinations, "_ROWS_AT_ONCE", 5)
    job = make()
    job.broken["a"] = "TopicTerminated"
    body = pack(release_rows(messages([(1, i, 1) for i in range(2)]), 3, SENDING))
    for tick in range(1, 4):
        both = [(0, tick, is_planned, body) for is_planned in (False, True)]
        job.releaser.submit(tick, 1, 1, 1, both, job.feedback.last.unwritable or {})
    wait_until(lambda: len(job.open("a") or []) == 6, 5, "all are open")
    job.submit(4)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick_of(sequence_id) for *_, sequence_id in job.sent] == [1] * 4 + [2] * 4 + [3] * 4
    written = [rows["subscription"].to_pylist() for name, rows in job.tables.appended if name == "deliveries"]
    assert [len(names) for names in written if "a" in names] == [4, 4, 4]


def test_what_is_sent_together_is_written_down_together_and_what_has_arrived_of_it_is_known(
    make: Callable[..., Job],
) -> None:
    """Else it would come again where the destination's topic is made anew before the rest arrives."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    rows = [release_rows(messages([(1, i, 1)]), 3, SENDING) for i in range(2)]
    job.releaser.submit(1, 1, 1, 1, [(0, 1, bool(i), pack(rows[i])) for i in range(2)], {})
    wait_until(lambda: len(job.open("a") or []) == 2, 5, "both are open")
    job.is_short_well, job.arrived_to = True, 7
    job.submit(2)
    short, planned = (f"{TOPIC}-a", "short1"), (f"{TOPIC}-a", "planned1")
    wait_until(lambda: job.told[-1] == {short: last_sequence_id(1), planned: 7}, 10, "it is told what has arrived")
    job.has_confirmed(2)
    assert sorted(job.tables.delivered) == [(1, "b", 0), (1, "b", 1)]
    assert job.open("a") == [1, 1]
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert sorted(job.tables.delivered) == [(1, name, i) for name in NAMES for i in range(2)]
    assert {f"app:{lane}:{TOPIC}:a" for lane in ("short1", "planned1")} <= job.tables.versions.keys()


def test_what_has_arrived_of_a_release_is_told_to_each_further_attempt(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"], job.arrived_to = "TopicTerminated", 7
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2)
    wait_until(lambda: len(job.known) == 2, 5, "it was tried again")
    job.arrived_to = 3  # a producer that is not opened knows of nothing
    wait_until(lambda: len(job.known) == 4, 10, "and again")
    assert job.known == [-1, 7, 7, 7]


def test_one_is_not_there_again_before_all_has_arrived_that_was_handed_out_before_it_was_held_back(
    make: Callable[..., Job],
) -> None:
    """Else what was held back since would overtake it."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    job.submit(2, [2], unwritable={}, due=now() + 4_000)  # nobody sends it for a while
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(3)
    job.broken.clear()
    wait_until(lambda: (1, "a", 1) in job.tables.delivered, 10, "the first has arrived")
    wait_until(lambda: job.open("a") != [], 10, "the second is open, or has arrived")
    job.submit(4)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 2]


def test_a_release_is_confirmed_only_when_an_offset_says_what_is_open_of_it(make: Callable[..., Job]) -> None:
    """Else a crash in between would take the whole of it for delivered."""
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2, [2], unwritable={})
    job.submit(3, [3], unwritable={})
    assert job.feedback.last.confirmed == 0
    assert job.tables.delivered == []
    wait_until(lambda: job.open("a") == [1, 2, 3], 5, "all are open")
    job.submit(4)
    job.has_confirmed(4)


def test_while_the_broker_is_away_all_wait_and_nothing_is_left_open(make: Callable[..., Job]) -> None:
    job = make()
    job.is_silent, job.is_broker_there = True, False
    job.broken |= {"a": "ConnectError", "b": "ConnectError"}
    job.submit(1, [1])
    wait_until(lambda: len(job.attempts) >= 2, 5, "it is tried again")
    assert job.open("a") is None
    del job.broken["b"]
    n = len(job.attempts)
    wait_until(lambda: len(job.attempts) >= n + 2, 10, "the last attempt is over for which it was broken, too")
    job.is_broker_there = True
    wait_until(lambda: job.open("a") == [1], 5, "the broker is there, and the destination is not")
    job.submit(2)
    job.has_confirmed(2)
    assert job.tables.delivered == [(1, "b", 1)]


def test_another_run_goes_on_with_what_was_open_and_sends_nothing_twice(make: Callable[..., Job]) -> None:
    job = make()
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    job.submit(2, [2])
    wait_until(lambda: job.open("a") == [1, 2], 5, "they are open")
    job.submit(3)
    job.has_confirmed(3)
    recorded = job.feedback.last.unwritable
    job.releaser.stop()

    again = make(job.tables)
    assert again.feedback.last.unwritable is None
    again.broken["a"] = "TopicTerminated"
    # Of release 1 only what is open is left; of 2 nothing was forgotten yet.
    again.submit(4, [1, 2], unwritable=recorded, masks={1: 1})
    assert again.open("a") == [1, 2]
    rows = [(1, "b", 1), (2, "b", 2)]
    assert sorted(again.tables.delivered) == rows
    again.broken.clear()
    wait_until(lambda: again.open("a") is None, 10, "it can be written")
    rows += [(1, "a", 1), (2, "a", 2)]
    assert sorted(again.tables.delivered) == sorted(rows)
    again.has_confirmed(4)

    # Written down, but no offset says so yet.
    third = make(job.tables)
    third.submit(5, [1, 2], unwritable=recorded, masks={1: 1})
    wait_until(lambda: third.open("a") is None, 10, "it can be written")
    third.has_confirmed(5)
    assert sorted(third.tables.delivered) == sorted(rows)


def test_what_had_arrived_of_an_open_release_before_a_crash_is_not_written_down_again(make: Callable[..., Job]) -> None:
    tables = Tables()
    arrived = [{"topic": TOPIC, "subscription": "a", "ledger_id": 1, "entry_id": 1, "batch_index": -1, "batch_id": 1}]
    tables.append("deliveries", pa.Table.from_pylist(arrived, schema=DELIVERIES), {"app:lane": 1})
    job = make(tables)
    open_releases = {TOPIC: {"a": {"since": 1, "open": [[1, 1], [2, 1]]}}}
    job.submit(3, [1, 2], unwritable=open_releases, masks={1: 1, 2: 1})
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert sorted(tables.delivered) == [(1, "a", 1), (2, "a", 2)]


@pytest.mark.parametrize("names", [["rejects"], ["rejects", "outcomes"]])
def test_what_was_refused_of_an_open_release_before_a_crash_is_not_written_down_again(
    make: Callable[..., Job], tmp_path: Path, names: list[str]
) -> None:
    """The run before was killed when it had written down what the client refused, with or without the outcomes."""
    made = [warehouse.Tables(str(tmp_path / name)) for name in ("before", "after")]
    for tables in made:
        tables.create()
        tables.take_over(1)
    job = make(made[0])
    job.refused["a"] = f"{NOT_DELIVERED}a{NOT_TAKEN}MessageTooBig"
    job.submit(1, [1], masks={1: 1})
    job.has_confirmed(1)
    job.releaser.stop()
    for name in names:
        made[1].append(name, made[0].query(name, f"SELECT * FROM {name}"), {})

    again = make(made[1])
    again.refused |= job.refused
    open_releases = {TOPIC: {"a": {"since": 1, "open": [[1, 1], [2, 1]]}}}
    again.submit(3, [1, 2], unwritable=open_releases, masks={1: 1, 2: 1})
    wait_until(lambda: again.open("a") is None, 10, "it can be written")
    for name in ("rejects", "outcomes"):
        written = made[1].query(name, f"SELECT batch_id, entry_id FROM {name} ORDER BY batch_id").to_pylist()
        assert [(row["batch_id"], row["entry_id"]) for row in written] == [(1, 1), (2, 2)], name


def test_an_older_release_that_is_open_only_later_is_not_taken_for_the_newer_one_that_was_written_down(
    make: Callable[..., Job],
) -> None:
    """The run before was killed when the older one of a lane had arrived, and was not written down yet."""
    job = make()
    job.slow.add(1)
    job.submit(4, [1, 3], unwritable={TOPIC: {"a": {"since": 1, "open": [[3, 1]]}}})
    wait_until(lambda: job.open("a") == [1, 3], 10, "the older one is open, too")
    job.submit(5)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.has_confirmed(5)
    assert [tick for tick, name, _ in job.tables.delivered if name == "a"] == [1, 3]
    assert sorted(tick for tick, name, _ in job.tables.delivered if name == "b") == [1, 3]


def test_a_subscription_that_was_taken_out_while_it_could_not_be_written_is_let_go_when_nothing_is_open(
    make: Callable[..., Job],
) -> None:
    """Its destination's name is not the source topic's."""
    both = known_routes(Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": name} for name in NAMES]}]))  # type: ignore[arg-type]
    job = make(names=["b"], routes=both)
    job.broken["a"] = "TopicTerminated"
    recorded = {TOPIC: {"a": {"since": 1, "open": [[1, 1]]}}}
    job.submit(2, [1], unwritable=recorded)
    wait_until(lambda: job.troubles.current(), 5, "it is tried")
    assert {t.name for t in job.troubles.current()} == {f"{TOPIC}-a"}
    job.submit(3, unwritable=recorded)
    job.broken.clear()  # what is open goes nowhere, or where it was to go
    wait_until(lambda: job.open("a") is None, 10, "it is let go")
    assert (job.troubles.current(), job.probed) == ([], [])


def test_what_the_client_does_not_take_is_rejected_and_cancelled_before_the_rest_counts_as_delivered(
    make: Callable[..., Job],
) -> None:
    """Else a crash in between would leave it pending for ever."""
    job = make()
    job.refused["a"] = "not delivered to a: MessageTooBig"
    job.submit(1, [1])
    job.has_confirmed(1)
    assert [name for name, _ in job.tables.appended] == ["rejects", "outcomes", "deliveries"]
    rejects, outcomes = (rows.to_pylist()[0] for _, rows in job.tables.appended[:2])
    assert (rejects["position"], rejects["reason"]) == ("1:1:-1:-1", "not delivered to a: MessageTooBig")
    told = {name: outcomes[name] for name in ("subscription", "position", "operation", "result", "issued_by")}
    assert told == {
        "subscription": "a",
        "position": "1:1:-1:-1",
        "operation": "CANCEL",
        "result": "APPLIED",
        "issued_by": "delaylake",
    }
    assert job.tables.delivered == [(1, "b", 1)]

    # The same where it is sent only when its destination is there again.
    job.broken["a"] = "TopicTerminated"
    job.submit(2, [2])
    wait_until(lambda: job.open("a") == [2], 5, "it is open")
    job.submit(3)
    job.broken.clear()
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    assert [name for name, _ in job.tables.appended[3:]] == ["deliveries", "rejects", "outcomes"]


def test_what_is_open_for_too_long_is_left_to_the_shards_to_reject_once_an_offset_says_so(
    make: Callable[..., Job],
) -> None:
    job = make(unwritable="reject", unwritable_after_millis=2_500)
    job.broken["a"] = "TopicTerminated"
    job.submit(1, [1])
    wait_until(lambda: job.open("a") == [1], 5, "it is open")
    job.submit(2)

    def rejects() -> str:
        text: str = (job.feedback.last.unwritable or {})[TOPIC]["a"].get("rejects", "")
        return text

    assert not rejects()
    wait_until(rejects, 10, "it is rejected")
    assert rejects() == f"{TOPIC}-a can't be written: TopicTerminated"
    assert "rejected" in job.troubles.current()[0].text
    # The destination is there again, but what is open is on its way to be rejected, as soon as an offset says so.
    recorded = job.feedback.last.unwritable
    job.broken.clear()
    assert job.open("a") == [1]
    job.submit(3, unwritable=recorded)
    wait_until(lambda: job.open("a") is None, 10, "it can be written")
    job.submit(4, [4])
    job.has_confirmed(4)
    assert sorted(job.tables.delivered) == [(1, "b", 1), (4, "a", 4), (4, "b", 4)]


def test_another_run_goes_on_rejecting(make: Callable[..., Job]) -> None:
    job = make(unwritable="reject", unwritable_after_millis=3_600_000)
    job.broken["a"] = "TopicTerminated"
    recorded = {TOPIC: {"a": {"since": 1, "open": [[1, 1]], "rejects": "gone"}}}
    job.submit(7, [1], unwritable=recorded, masks={1: 2})
    wait_until(lambda: job.open("a") == [], 5, "nothing is open any more")
    assert job.feedback.last.unwritable == {TOPIC: {"a": {"since": 1, "open": [], "rejects": "gone"}}}


def test_another_run_that_is_told_to_wait_rejects_no_longer(make: Callable[..., Job]) -> None:
    job = make(unwritable="wait")
    job.broken["a"] = "TopicTerminated"
    job.submit(7, unwritable={TOPIC: {"a": {"since": 1, "open": [], "rejects": "gone"}}})
    assert job.feedback.last.unwritable == {TOPIC: {"a": {"since": 1, "open": []}}}


def test_what_waits_in_a_lane_since_the_clock_was_ahead_is_in_flight_when_it_comes_near(
    make: Callable[..., Job],
) -> None:
    """Else nothing would be taken in until it is sent, for as long as the clock was set back."""
    job = make(lookahead_millis=600, max_lookahead_millis=2_000)
    step, n = 200, 3_600
    rows = release_rows(messages([(1, i, 0) for i in range(n)]), 3, SENDING)  # takes its time on a slow machine
    began = now() + 4_000
    body = pack(with_columns(rows, deliver_at=pa.array([began + i * step for i in range(n)])))
    job.releaser.submit(1, 1, 1, 1, [(0, 1, True, body)], {})
    assert job.feedback.last.in_flight == 0
    job.submit(2, [2])
    wait_until(lambda: 2 in {tick for tick, *_ in job.tables.delivered}, 5, "another lane's release")
    # Without another batch, and no more of it than comes near.
    job.is_stuck.set()
    wait_until(lambda: job.feedback.last.in_flight, 10, "it comes near")
    assert job.feedback.last.in_flight <= 1 + (now() + 2_000 - began) / step
    assert job.feedback.last.confirmed == 0


@pytest.mark.parametrize(("key", "due", "order"), [("k", 5, [1, 2]), ("k", 4, [2, 1]), ("other", 5, [2, 1])])
def test_what_comes_in_order_begins_when_what_comes_before_it_of_its_keys_has_arrived(
    make: Callable[..., Job], key: str, due: int, order: list[int]
) -> None:
    """What is due before that, or has other keys, need not wait."""
    job = make()
    job.slow = {1}
    for tick, of_tick, at in ((1, "k", 5), (2, key, due)):
        rows = concat([messages([(1, 10 * tick + i, at)], key=name) for i, name in enumerate((of_tick, f"k{tick}"))])
        job.releaser.submit(tick, 1, 1, 1, [(0, tick, IN_ORDER | PLANNED, pack(release_rows(rows, 3, SENDING)))], {})
    job.has_confirmed(2)
    assert [tick for tick, _ in job.attempts] == order


@pytest.mark.parametrize(("was_due", "tasks"), [(None, 2), (7, 1)])
def test_what_was_held_back_is_sent_by_one_task_for_all_shards_however_much_it_is(
    make: Callable[..., Job], was_due: int | None, tasks: int
) -> None:
    """Tasks side by side, or one after the other, would mix up the order in which it was due."""
    job = make()
    rows = with_columns(messages([(1, i, 1) for i in range(3_000)]), was_due=pa.array([was_due] * 3_000, pa.int64()))
    body = pack(release_rows(rows, 3, SENDING))
    job.releaser.submit(1, 1, 1, 1, [(shard, 1, False, body) for shard in range(2)], {})
    job.has_confirmed(1)
    assert job.spark.tasks == [tasks]
