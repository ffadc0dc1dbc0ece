"""Batches from the source through the operator to the plan of what is sent, while the settings change between runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.batch_schema import InputKind, OutputKind, input_rows
from streaming.checkpoint.offset import Offset
from streaming.operator.processor import Operator
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.planning.plan_release import plan_release
from streaming.source.reader import SourceReader
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import MESSAGES, concat
from tracker.packing import unpack
from tracker.wire.delaylake_pb2 import ControlCommand, Result, SkipEntry, SkipMessages
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, rows_due, to_index
from warehouse.routes.known_routes import KnownRoutes
from warehouse.schemas import DELAYED_INDEX

pytestmark = pytest.mark.slow

OTHER = "persistent://public/default/other"
KEY = 0


class State:
    """Spark's map state."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], tuple[bytes]] = {}
        self.getValue = self.values.get
        self.updateValue = self.values.__setitem__

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self.values.pop(key, None)


class Job:
    """What a job does in a batch, without Spark and Pulsar: one shard, and a seal each batch."""

    def __init__(self, folder: Path, *routes: str) -> None:
        self.folder = folder
        self.state = State()
        self.offset = Offset()
        self.runs = self.confirmed = 0
        self.tables = Tables(f"file:{folder}/warehouse")
        self.tables.create()
        self.outcomes: list[dict[str, Any]] = []
        self.delivered: Counter[tuple[int, str]] = Counter()  # entry, destination
        self.unconfirmed: dict[tuple[int, bool], bytes] = {}
        self.start(*routes)

    def start(self, *routes: str) -> None:
        """Starts on settings with routes such as `t: a b`."""
        self.runs += 1
        given = [route.split(": ") for route in routes]
        self.settings = Settings(
            warehouse=f"file:{self.folder}/warehouse",
            checkpoint=f"file:{self.folder}/checkpoint",
            tracker={"shards": 1},  # type: ignore[arg-type]
            routes=[  # type: ignore[arg-type]
                {
                    "source": f"persistent://public/default/{topic}",
                    "subscriptions": [{"name": name} for name in names.split()],
                }
                for topic, names in given
            ],
        )

    def batch(
        self,
        now: int,
        came: Sequence[tuple[int, int]] = (),
        commands: Sequence[ControlCommand] = (),
        is_sent: bool = True,
    ) -> None:
        """A batch at a time: entries of ledger 1 that come in, as (entry id, due), and commands.

        Args:
            is_sent: else what it hands out is in flight when the job ends.
        """
        rows = messages([(1, entry, due) for entry, due in came])
        control = messages([(9, i, 0) for i in range(len(commands))])
        payloads = pa.array([command.SerializeToString() for command in commands], pa.binary())
        control = control.set_column(MESSAGES.get_field_index("payload"), MESSAGES.field("payload"), payloads)
        last, run_id = self.offset, f"run{self.runs}"
        before = last.known_routes
        routes = last.routes
        back: list[list[str]] = []
        if last.run_id != run_id:
            known = (before or KnownRoutes({})).updated_to(self.settings)
            routes, back = known.to_json(), [list(p) for p in known.reinstated_since(before)] if before else []
        version = self.tables.version("delayed_index")
        self.offset = Offset(
            tick=last.tick + 1,
            now=now,
            cutoff=now,
            seal_epoch=last.seal_epoch + 1,
            load_horizon=now + 2_000,
            near_until=now + 1_000,
            run_id=run_id,
            confirmed=self.confirmed,
            index_version=version,
            lookup_versions=[version, self.tables.version("entries")] if commands else [],
            routes=routes,
            reinstated=back,
            ingested_through=last.tick + 1,
        )
        reader = SourceReader({"settings": self.settings.model_dump_json(), "shard_keys": f"[{KEY}]", "epoch": "0"})
        reader.__dict__["_intake"] = SimpleNamespace(
            parts=lambda *_: [
                *input_rows(InputKind.TICK, self.offset.to_json(), [KEY]),
                *input_rows(InputKind.MESSAGES, rows, [KEY]),
            ],
            has_segment=lambda first, end: bool(
                rows_due(self.tables, end.index_version, first.load_horizon, end.load_horizon)
            ),
            control_messages=lambda *_: control,
        )
        parts = [
            SimpleNamespace(kind=kind, body=body)
            for partition in reader.partitions(last.to_json(), self.offset.to_json())
            for read in reader.read(partition)
            for kind, body in zip(read["kind"].to_pylist(), read["body"].to_pylist(), strict=True)
        ]
        operator = Operator(
            self.state, [KEY], self.settings.tracker.model_dump_json(),
            self.settings.warehouse,
        )  # fmt: skip
        outputs = list(operator.apply(KEY, iter(parts)))
        self._write(outputs)
        for output in outputs:
            if output.kind in (OutputKind.RELEASE, OutputKind.SHORT_NOTICE):
                key = output.tick, output.kind == OutputKind.RELEASE
                assert self.unconfirmed.setdefault(key, output.body) == output.body
                if is_sent:
                    self._send(*key, output.body)
        if is_sent:
            self.confirmed = self.offset.tick

    def _write(self, outputs: list[Any]) -> None:
        index = [to_index(unpack(o.body), self.offset.tick) for o in outputs if o.kind == OutputKind.BUCKET]
        index += [cancels_to_index(unpack(o.body), self.offset.tick) for o in outputs if o.kind == OutputKind.CANCELS]
        if rows := concat(index, DELAYED_INDEX):
            self.tables.append("delayed_index", rows, {})
        self.outcomes += [row for o in outputs if o.kind == OutputKind.OUTCOMES for row in unpack(o.body).to_pylist()]

    def _send(self, tick: int, is_planned: bool, body: bytes) -> None:
        plan = plan_release(self.settings, Assignment("app", 0, tick, is_planned, body), Attempt())
        entries = unpack(body)["entry_id"].to_pylist()
        self.delivered.update(
            (entries[send.row], send.topic.removeprefix("persistent://public/default/")) for send in sends_of(plan)
        )


def skip(*entries: int, by: str) -> ControlCommand:
    named = [SkipEntry(ledger_id=1, entry_id=entry) for entry in entries]
    return ControlCommand(
        request_id=f"{by}{entries[0]}", topic=TOPIC, subscriptions=[by], skip=SkipMessages(entries=named)
    )


def test_what_was_skipped_stays_skipped_by_its_subscription_when_two_are_swapped(tmp_path: Path) -> None:
    job = Job(tmp_path, "t: a b")
    job.batch(10_000, [(i, 30_000) for i in range(200)])
    job.batch(11_000, commands=[skip(*range(100), by="a")])
    assert {(row["subscription"], row["result"]) for row in job.outcomes} == {("a", Result.APPLIED)}
    job.start("t: new b a")
    job.batch(12_000)
    # A command goes by the names, too.
    job.batch(13_000, commands=[skip(150, by="b")])
    for now in range(20_000, 34_000, 1_000):
        job.batch(now)
    expected = Counter({(i, f"t-{name}"): 1 for i in range(200) for name in ("new", "b", "a")})
    for i in range(100):
        del expected[i, "t-a"]
    del expected[150, "t-b"]
    assert job.delivered == expected


def test_what_waits_for_a_route_that_is_missing_comes_late_and_once(tmp_path: Path) -> None:
    job = Job(tmp_path, "t: a b", "other: x")
    job.batch(10_000, [(i, 20_000) for i in range(10)] + [(i, 60_000) for i in range(10, 15)])
    job.start("other: x")
    for now in range(15_000, 30_000, 1_000):
        job.batch(now)
    assert not job.delivered
    job.batch(30_000, commands=[skip(3, by="b")])
    assert [row["result"] for row in job.outcomes] == [Result.APPLIED]
    job.start("t: b a", "other: x")
    for now in range(31_000, 40_000, 1_000):
        job.batch(now)
    expected = Counter({(i, f"t-{name}"): 1 for i in range(10) for name in ("a", "b")})
    del expected[3, "t-b"]
    assert job.delivered == expected
    for now in range(50_000, 64_000, 1_000):
        job.batch(now)
    assert job.delivered == expected + Counter({(i, f"t-{name}"): 1 for i in range(10, 15) for name in ("a", "b")})


def test_what_is_in_flight_when_its_route_is_taken_out_is_sent_where_it_was_to_go(tmp_path: Path) -> None:
    job = Job(tmp_path, "t: a", "other: x")
    job.batch(10_000, [(0, 11_000)])
    job.batch(12_000, is_sent=False)
    assert not job.delivered
    job.start("other: x")
    job.batch(13_000)
    job.batch(14_000)
    assert job.delivered == Counter({(0, "t-a"): 1})


def test_what_is_in_flight_for_a_subscription_that_is_away_for_one_run_is_sent_to_it_under_the_same_ids(
    tmp_path: Path,
) -> None:
    """The broker then drops what it has from the run before."""
    job = Job(tmp_path, "t: a b")
    job.batch(9_000, [(0, 11_000), (1, 11_000)])
    job.batch(10_000, commands=[skip(1, by="b")])
    job.batch(12_000, is_sent=False)
    [before] = job.unconfirmed.values()
    job.start("t: b")
    job.batch(13_000, is_sent=False)
    job.start("t: b a")
    job.batch(14_000)
    job.batch(15_000)
    assert [*job.unconfirmed.values()] == [before]
    assert job.delivered == Counter({(0, "t-a"): 1, (0, "t-b"): 1, (1, "t-a"): 1})


def test_of_a_subscription_that_is_taken_out_nothing_is_left_for_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, "t: a b")
    job.batch(10_000, [(0, 20_000), (1, 20_000), (2, 40_000)])
    job.batch(11_000, commands=[skip(0, by="b"), skip(2, by="a")])
    job.start("t: b")
    for now in range(12_000, 24_000, 1_000):
        job.batch(now)
    assert job.delivered == Counter({(1, "t-b"): 1})
    job.start("t: c a b")
    for now in range(30_000, 44_000, 1_000):
        job.batch(now)
    assert job.delivered == Counter({(1, "t-b"): 1, (2, "t-b"): 1, (2, "t-c"): 1})
