"""A releaser on a fake Spark, whose destinations do as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.settings import Settings
from status.alerts import Alerts
from streaming.release.attempt import Assignment, Attempt, FailedProducer, SendReport
from streaming.release.driver.releaser import Releaser, Run
from streaming.release.driver.run_context import DispatchedBatch
from streaming.release.feedback import Feedback
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from tests.support.service.harness import now, wait_until
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.messages import MESSAGES, concat
from tracker.packing import pack, unpack
from warehouse.routes.known_routes import KnownRoutes
from warehouse.schemas import DELIVERIES

NAMES = ["a", "b"]
SENDING = '{"lanes": 2}'

# Messages that are not held back again once they have been handed out.
PASSED = {"schedule_key": "k"}


def batch(
    tick: int, bodies: Iterable[tuple[int, int, int, bytes]], unwritable: Any = None, drained: Any = None, at: int = 1
) -> DispatchedBatch:
    """A batch that dispatches releases, as `DispatchedBatch.bodies` has them; its times are all the same."""
    return DispatchedBatch(
        tick=tick, now=at, cutoff=at, next_due=at, bodies=bodies, unwritable=unwritable or {}, drained=drained or {}
    )


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
        self.throttled: set[str] = set()  # subscriptions whose destinations are slow, and hold up the others
        self.have_own = False  # each has a connection of its own in any case
        self.apart: list[frozenset[str]] = []  # in each attempt the subscriptions with connections of their own
        self.arrived_to = -1  # of what is sent to them
        self.known: list[int] = []  # what of that each attempt was told
        self.is_passed = True  # what is handed out has schedule keys, so that the shards do not hold it back again
        self.is_silent = False  # they do not answer, rather than refuse
        self.is_broker_there = True
        self.slow: set[int] = set()  # ticks whose releases take their time, as the first one of a run does
        self.probed: list[str] = []
        self.attempts: list[tuple[int, frozenset[str]]] = []
        self.sent: list[tuple[int, str, int]] = []  # due, producer and sequence id of what has arrived at `a`
        self.troubles = Alerts()
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
            Run("app", self.feedback, routes),  # type: ignore[arg-type]
            lambda rows: None,
            self.troubles,
        )
        self.releaser._release_sender._admin = self  # type: ignore[assignment]

    def health(self) -> bool:
        return self.is_broker_there

    def send(
        self, settings: str, attempt: Attempt, assignments: Iterable[Assignment], epoch: int, checked_at: float
    ) -> Iterator[SendReport]:
        while self.is_stuck.is_set() and not self.releaser._stopped.wait(0.05):
            pass
        self.told.append(dict(attempt.arrived_to))
        self.apart.append(frozenset(name for _, name in attempt.apart))
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
                recipient, line = (TOPIC, name), (f"{TOPIC}-{name.replace(' ', '-')}", assignment.lane(2))
                chosen = [row for row in rows.to_pylist() if row["subscription_mask"] & bit]
                chosen = [row for row in chosen if ((row["attempt"] or 0) > 5) == is_dead]
                done_line = (assignment.tick, *line)
                if (
                    not chosen
                    or done_line in attempt.done
                    or (attempt.only is not None and recipient not in attempt.only)
                ):
                    continue
                if recipient in attempt.skipped:
                    skipped.add(recipient)
                elif name in self.broken and not (self.is_short_well and not assignment.kind):
                    failed.append(
                        FailedProducer(*line, recipient, self.broken[name], not self.is_silent, None, self.arrived_to)
                    )
                    self.known.append(attempt.arrived_to.get(line, -1))
                elif self._is_late(attempt, name):
                    is_alone = self.have_own or recipient in attempt.apart
                    failed.append(
                        FailedProducer(
                            *line, recipient, "slow: it took 0", False, None, is_slow=True, is_alone=is_alone
                        )
                    )
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
            yield SendReport(pack(table), now(), tuple(done), tuple(failed), frozenset(skipped), not_taken)

    def _is_late(self, attempt: Attempt, name: str) -> bool:
        """Whether a destination is slow, or shares its connection with one that is, and is sent to."""
        apart = {of for _, of in attempt.apart}
        shared = {name} if self.have_own or name in apart else set(NAMES) - apart - {of for _, of in attempt.skipped}
        return attempt.only is None and bool(self.throttled & shared)

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
        drained: Any = None,
    ) -> None:
        """A batch that hands out releases, and whose offset has what the feedback had, if nothing else is said.

        Args:
            masks: by release the subscriptions as bits; both where it is not said.
            due: when all of them are, ms since the epoch.
        """
        bodies = []
        for of_tick in releases:
            bits = (masks or {}).get(of_tick, 3)
            rows = messages(
                [(1, of_tick, due)],
                attempt=attempt,
                was_due=due if drained else None,
                **(PASSED if self.is_passed else {}),
            )
            bodies.append((0, of_tick, True, pack(release_rows(rows, bits, SENDING))))
        recorded = (self.feedback.last.unwritable or {}) if unwritable is None else unwritable
        self.releaser.submit(batch(tick, bodies, recorded, drained or {}))

    def has_confirmed(self, tick: int) -> None:
        wait_until(lambda: self.feedback.last.confirmed >= tick, 5, f"{tick}: {self.feedback.last}")

    def open(self, subscription: str) -> list[int] | None:
        """The ticks whose releases are open for a subscription; None: it can be written."""
        unwritable = (self.feedback.last.unwritable or {}).get(TOPIC, {}).get(subscription)
        return None if unwritable is None else [tick for tick, _ in unwritable["open"]]
