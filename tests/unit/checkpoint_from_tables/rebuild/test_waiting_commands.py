"""Commands that wait for their messages go on waiting after a rebuild, and are answered."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.batch_schema import InputKind, OutputKind, input_rows
from streaming.operator.processor import Operator
from streaming.source.reader import SourceReader
from tests.support.tracker.messages import TOPIC, batches, command, commands, handed_out, messages, tick_at
from tests.support.warehouse.rebuilt import of_all_shards, prepared
from tests.unit.streaming.test_batches import State
from tracker.commands.kinds import CANCEL, RESCHEDULE, RESTORE, SKIP
from tracker.commands.repeats import OTHER_BODY
from tracker.in_flight import SUBSCRIPTION_MASK
from tracker.packing import unpack
from tracker.schemas import SEQUENCE_BITS
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, outcomes_to_rows
from warehouse.queries.waiting_commands import find_waiting
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow

NOW = 1_000_000
DUE = NOW + 40
TICK_MILLIS = 1


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "warehouse": f"file:{tmp_path}/warehouse",
            "tracker": {"shards": 1},
            "routes": [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}],
        }
    )


def answered(tables: Tables, request_id: str, entry: int, result: str, **values: Any) -> None:
    row = {"request_id": request_id, "topic": TOPIC, "subscription": "b", "partition": -1, "ledger_id": 1}
    row |= {"entry_id": entry, "batch_index": -1, "result": result, "operation": "SKIP", "issued_by": "somebody"}
    row |= {"issued_at": NOW - 10, "applied_at": NOW, "batch_id": 7, "position": f"1:{entry}:-1:-1"}
    tables.append("outcomes", pa.Table.from_pylist([row | values], schema=SCHEMAS["outcomes"]), {})


def test_what_waits_meets_its_message_and_the_rest_is_not_there_once_all_has_come(
    settings: Settings, tmp_path: Path
) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    answered(tables, "waits", 0, "WAITING")
    answered(tables, "waits", 0, "WAITING", applied_at=NOW + 1)  # told again
    answered(tables, "of nothing", 1, "WAITING")
    answered(tables, "done", 2, "WAITING")
    answered(tables, "done", 2, "APPLIED", sequence=1)
    answered(tables, "done one by one", 3, "WAITING")
    answered(tables, "done one by one", 3, "TOO_LATE", batch_index=1)
    answered(tables, "of who is gone", 4, "WAITING", subscription="gone")
    answered(tables, "a cancel", 5, "WAITING", operation="CANCEL")

    found = prepared(settings, tmp_path / "checkpoint", NOW)
    assert found.offset is not None
    # Until the source topics have been read to where they end now, nothing is told to be missing.
    assert (found.offset.barriers, found.offset.ingested_through) == ([[0, {TOPIC: None}]], -1)

    store = MemoryStore()

    def step(
        tick: int, ingested_through: int, **changes: Any
    ) -> tuple[list[tuple[str, str, int]], list[tuple[int, int]]]:
        at = tick_at(tick, NOW + tick, ingested_through=ingested_through)
        effects = Shard(store, {TOPIC: ["a", "b"]}, 1_000_000).apply(at, TickInput(**changes))
        published = [(r["request_id"], r["subscription"], r["result"]) for r in effects.outcomes.to_pylist()]
        return published, handed_out(effects)

    assert step(1, -1, messages=messages([]), rebuilt=of_all_shards(found)) == ([], [])
    assert step(2, -1, messages=messages([(1, 0, NOW + 2)])) == ([("waits", "b", Result.APPLIED)], [(0, 0b01)])
    assert step(3, 0, messages=messages([])) == ([("of nothing", "b", Result.NOT_FOUND)], [])


def test_the_answers_of_another_message_of_the_same_request_say_nothing(settings: Settings, tmp_path: Path) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    for entry, index in ((0, 1), (0, 2), (1, -1)):
        answered(tables, "r", entry, "WAITING", batch_index=index)
    answered(tables, "r", 0, "APPLIED", batch_index=2)
    waiting = of_all_shards(prepared(settings, tmp_path / "checkpoint", NOW)).waiting.to_pylist()
    assert sorted((row["entry_id"], row["batch_index"], row["subscriptions"]) for row in waiting) == [
        (0, 1, 0b10),
        (1, -1, 0b10),
    ]
    assert {(row["kind"], row["issued_by"]) for row in waiting} == {("skip", "somebody")}


def test_another_command_under_its_request_id_that_was_refused_is_no_answer(settings: Settings, tmp_path: Path) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    answered(tables, "r", 0, "WAITING")
    answered(tables, "r", 0, "INVALID", operation="RESTORE", reason=OTHER_BODY)
    answered(tables, "done", 1, "WAITING")
    answered(tables, "done", 1, "INVALID", reason="cancelled: restore it first")
    waiting = of_all_shards(prepared(settings, tmp_path / "checkpoint", NOW)).waiting.to_pylist()
    assert [(row["request_id"], row["kind"]) for row in waiting] == [("r", "skip")]


KINDS = {SKIP: None, CANCEL: DUE, RESTORE: None, "later": DUE + 20, "now": 0}


def commands_of(order: tuple[str, ...], entry: int) -> list[dict[str, object]]:
    """Commands for one message, each for one subscription, all, or these and later ones."""
    made = []
    for number, name in enumerate(order):
        kind = RESCHEDULE if name in ("later", "now") else name
        row = command(f"{name} {number} of {entry}", 1, entry, [[0], [0, 1]][entry % 2], kind=kind)
        made.append(row | {"deliver_at": KINDS[name] or 0, "also_later": entry % 3 == 0})
    return made


class Job:
    """A shard on the state of a job, and what it has told and handed out, by entry."""

    def __init__(self, store: MemoryStore, tick: int, ingested_through: int) -> None:
        self.store, self.tick, self.ingested_through = store, tick, ingested_through
        self.published: list[tuple[object, ...]] = []
        self.handed_out: list[tuple[int, ...]] = []

    def step(self, now: int, **changes: Any) -> Effects:
        self.tick += 1
        at = tick_at(self.tick, now, confirmed=self.tick - 1, ingested_through=self.ingested_through)
        effects = Shard(self.store, {TOPIC: ["a", "b"]}, 1, TICK_MILLIS).apply(
            at, TickInput(**{"messages": messages([])} | changes)
        )
        names = ("request_id", "subscription", "entry_id", "result")
        self.published += [tuple(row[name] for name in names) for row in effects.outcomes.to_pylist()]
        self.handed_out += [(*row, now) for row in handed_out(effects)]
        return effects

    def go_on(self, n: int) -> None:
        """The messages come, and time passes until all are due."""
        self.published, self.handed_out = [], []
        self.step(NOW + 5, messages=messages([(1, entry, DUE) for entry in range(n)]))
        for now in (DUE, DUE + 20):
            self.step(now)
        self.published.sort(key=str)
        self.handed_out.sort()


@pytest.mark.parametrize(("in_one_batch", "is_sealed"), [(True, False), (False, True)])
def test_what_waits_is_applied_after_a_rebuild_as_it_would_have_been(
    settings: Settings, tmp_path: Path, in_one_batch: bool, is_sealed: bool
) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    orders = [order for n in (1, 2, 3) for order in itertools.product(KINDS, repeat=n)]
    named = [commands_of(order, entry) for entry, order in enumerate(orders)]
    batches = [list(itertools.chain(*named))]
    if not in_one_batch:
        batches = [[of_entry[i] for of_entry in named if i < len(of_entry)] for i in range(3)]

    undisturbed = Job(MemoryStore(), tick=1, ingested_through=0)
    for batch in batches:
        of_batch = {"commands": commands(batch), "request_ids": {str(row["request_id"]): 1 for row in batch}}
        effects = undisturbed.step(NOW, **of_batch)
        tick = {"test": undisturbed.tick}
        tables.append("outcomes", outcomes_to_rows(effects.outcomes, undisturbed.tick, NOW), tick)
        if is_sealed:
            tables.append("delayed_index", cancels_to_index(effects.cancels, undisturbed.tick), tick)
    assert {row[-1] for row in undisturbed.published} == {Result.WAITING}

    found = prepared(settings, tmp_path / "checkpoint", NOW)
    assert found.offset is not None
    rebuilt = Job(MemoryStore(), found.offset.tick, found.offset.ingested_through)
    rebuilt.step(NOW, rebuilt=of_all_shards(found))
    for job in (undisturbed, rebuilt):
        job.go_on(len(orders))
    assert rebuilt.published == undisturbed.published
    assert rebuilt.handed_out == undisturbed.handed_out
    assert {now for _, _, now in rebuilt.handed_out} == {NOW + 5, DUE, DUE + 20}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_cancelled_again", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("restored", [(), (0,), (1,), (0, 1), (0, 1, 2), (-1,)])
def test_what_was_restored_of_a_cancelled_entry_is_delivered_though_no_table_has_its_size(
    settings: Settings, tmp_path: Path, restored: tuple[int, ...], size: int, is_cancelled_again: bool, is_late: bool
) -> None:
    """An entry of which nothing was sealed comes again. Which messages it has is known only then."""
    tables = Tables(settings.warehouse)
    tables.create()
    entry = messages([(1, 0, DUE)]) if size == 1 else batches([(1, 0, i, size, DUE) for i in range(size)])
    restored = tuple(i for i in restored if i < size)
    asked = [command("cancel", 1, 0, [0, 1], cancel_at=DUE)]
    asked += [command(f"restore {i}", 1, 0, [1], batch_index=i, kind=RESTORE) for i in restored]
    asked += [command("cancel again", 1, 0, [1], batch_index=0, cancel_at=DUE)] if is_cancelled_again else []
    job = Job(MemoryStore(), tick=1, ingested_through=0)
    for batch in ({"messages": entry}, *({"commands": commands([one])} for one in asked)):
        effects = job.step(NOW, **batch)
        tables.append("outcomes", outcomes_to_rows(effects.outcomes, job.tick, NOW), {"test": job.tick})

    now = DUE + 20 if is_late else NOW
    found = prepared(settings, tmp_path / "checkpoint", now)
    assert found.offset is not None
    job = Job(MemoryStore(), found.offset.tick, found.offset.ingested_through)
    job.step(now, rebuilt=of_all_shards(found))
    after = [job.step(now, messages=entry), job.step(DUE), job.step(DUE + 20)]
    sent = [row for one in after for release in one.releases for row in release.rows.to_pylist()]
    left = set(range(size)) if restored == (-1,) else set(restored)
    left -= {0} if is_cancelled_again else set()
    assert sorted(max(row["batch_index"], 0) for row in sent) == sorted(left)
    assert {row[SUBSCRIPTION_MASK] for row in sent} <= {0b10}


def test_many_commands_that_wait_come_back_in_the_order_in_which_they_came(settings: Settings) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    values = {
        "topic": TOPIC,
        "ledger_id": 1,
        "batch_index": -1,
        "result": "WAITING",
        "operation": "SKIP",
        "batch_id": 7,
    }
    rows = [
        {
            **values,
            "request_id": f"{n * 7919 % 3_000}",
            "entry_id": n,
            "subscription": name,
            "sequence": n,
            "batch_id": n,
        }
        for n in range(3_000)
        for name in "ba*"
    ]
    tables.append("outcomes", pa.Table.from_pylist(rows[::-1], schema=SCHEMAS["outcomes"]), {})
    found = find_waiting(tables, {TOPIC: ["a", "b"]})
    assert found["request_id"].to_pylist() == [row["request_id"] for row in rows[::3]]
    assert set(found["subscriptions"].to_pylist()) == {0b11}
    assert set(found["also_later"].to_pylist()) == {True}


def test_a_cancel_that_waits_in_vain_is_answered_after_a_rebuild(settings: Settings, tmp_path: Path) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    answered(tables, "r", 0, "WAITING", operation="CANCEL", deliver_at=DUE, sequence=1)
    found = prepared(settings, tmp_path / "checkpoint", NOW)
    job = Job(MemoryStore(), 7, ingested_through=0)
    job.step(NOW, rebuilt=of_all_shards(found))
    job.step(DUE)
    assert job.published == []
    for now in (DUE + 2 * TICK_MILLIS, DUE + 10):
        job.step(now)
    assert job.published == [("r", "b", 0, Result.NOT_FOUND)]


@pytest.mark.parametrize("shards", [1, 3])
def test_what_was_written_down_and_perhaps_not_published_is_told_again_by_the_first_batch_after_a_rebuild(
    settings: Settings, tmp_path: Path, shards: int
) -> None:
    tracker = settings.tracker.model_copy(update={"shards": shards})
    settings = settings.model_copy(update={"tracker": tracker})
    tables = Tables(settings.warehouse)
    tables.create()
    answered(tables, "of before", 0, "APPLIED")
    for name in ("waited", "waits"):
        answered(tables, name, 1, "WAITING", command_hash=5)
    answered(tables, "waited", 1, "APPLIED", command_hash=5, batch_id=8, sequence=2, reason="so it is")
    superseded = {"superseded_by": "1:3:-1:-1", "schedule_key": "k", "deliver_at": NOW}
    answered(tables, "of nobody", 2, "SUPERSEDED", batch_id=8, **superseded)
    answered(tables, "comes again", 3, "APPLIED", command_hash=6, batch_id=8)
    assert told_by_the_first_batch(settings, tmp_path / "checkpoint") == [
        ("of nobody", 2, "b", Result.SUPERSEDED, None, "1:3:-1:-1", True),
        ("waited", 1, "b", Result.APPLIED, "so it is", None, True),
    ]


def told_by_the_first_batch(settings: Settings, folder: Path) -> list[tuple[Any, ...]]:
    """What the operator puts out for the outcome topic, in all shards."""
    first = prepared(settings, folder, NOW).offset
    assert first is not None
    keys = list(range(settings.tracker.shard_count))
    of_run = settings.model_copy(update={"checkpoint": f"file:{folder}"})
    reader = SourceReader({"settings": of_run.model_dump_json(), "shard_keys": json.dumps(keys), "epoch": "0"})
    reader.__dict__["_intake"] = SimpleNamespace(parts=lambda *_: [], has_segment=lambda *_: False)
    end = replace(first, tick=first.tick + 1, now=NOW, run_id="r")
    rows: list[Any] = list(input_rows(InputKind.TICK, end.to_json(), keys))
    for part in reader.partitions(first.to_json(), end.to_json()):
        rows += [tuple(row.values()) for read in reader.read(part) for row in read.to_pylist()]
    told = []
    for key in keys:
        operator = Operator(State(), keys, settings.tracker.model_dump_json(), settings.warehouse)
        own = (SimpleNamespace(kind=kind, body=body) for of, kind, body in rows if of == key)
        outputs = [output for output in operator.apply(key, own) if output.kind == OutputKind.OUTCOMES]
        told += [row for output in outputs for row in unpack(output.body).to_pylist()]
    names = ("request_id", "entry_id", "subscription", "result", "reason", "superseded_by", "is_repeat")
    return sorted(tuple(row[name] for name in names) for row in told)


@pytest.mark.parametrize(("result", "is_cancelled"), [("TOO_LATE", False), ("APPLIED", True)])
def test_a_cancel_that_waited_counts_in_a_rebuild_only_if_it_was_applied_at_last(
    settings: Settings, tmp_path: Path, result: str, is_cancelled: bool
) -> None:
    """The delayed index has its row from when it began to wait. The message it came too late for may not be sent."""
    tables = Tables(settings.warehouse)
    tables.create()
    waits, comes = (tick << SEQUENCE_BITS for tick in (7, 8))
    answered(tables, "r", 0, "WAITING", operation="CANCEL", deliver_at=DUE, sequence=waits + 1)
    answered(tables, "r", 0, result, operation="CANCEL", sequence=comes, batch_id=8)
    row = {"operation": "CANCEL", "topic": TOPIC, "partition": -1, "ledger_id": 1, "batch_index": -1}
    row |= {"subscription": "b", "deliver_at": DUE}
    rows = [row | {"entry_id": 0, "sequence": waits + 2}, row | {"entry_id": 1, "sequence": waits + 3}]
    tables.append("delayed_index", pa.Table.from_pylist(rows, schema=SCHEMAS["delayed_index"]), {})
    found = of_all_shards(prepared(settings, tmp_path / "checkpoint", NOW))
    cancelled = {(row["entry_id"], row["subscription"]) for row in found.cancelled.to_pylist()}
    assert cancelled == ({(0, 1), (1, 1)} if is_cancelled else {(1, 1)})


def test_what_an_earlier_version_let_wait_without_its_time_is_not_guessed(settings: Settings, tmp_path: Path) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    for operation in ("CANCEL", "RESCHEDULE"):
        answered(tables, operation, 0, "WAITING", operation=operation)
    row = {"operation": "CANCEL", "topic": TOPIC, "partition": -1, "ledger_id": 1, "entry_id": 0, "batch_index": -1}
    row |= {"subscription": "b", "sequence": 1, "deliver_at": DUE}
    tables.append("delayed_index", pa.Table.from_pylist([row], schema=SCHEMAS["delayed_index"]), {})
    found = of_all_shards(prepared(settings, tmp_path / "checkpoint", NOW))
    assert found.waiting.num_rows == 0
    assert [(row["entry_id"], row["subscription"]) for row in found.cancelled.to_pylist()] == [(0, 1)]
