"""Skips that wait for their messages go on waiting after a rebuild, and are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from conf.settings import Settings
from recovery.rebuild import rebuild
from streaming.checkpoint.prepared import PreparedState
from streaming.operator_input import REBUILT_WAITING
from tests.messages import TOPIC, messages
from tracker import Intake, MemoryStore, Shard, Tick
from tracker.commands.rebuilt import Rebuilt
from tracker.wire.delaylake_pb2 import Result
from warehouse.tables import SCHEMAS, Tables

NOW = 1_000_000


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


def lost(settings: Settings, tables: Tables, folder: Path) -> PreparedState:
    with mock.patch("recovery.rebuild.write_missing_deliveries", return_value=0):  # what needs a broker
        rebuild(settings, tables, folder, now=NOW)
    return PreparedState(folder)


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

    found = lost(settings, tables, tmp_path / "checkpoint")
    [(_, parts)] = found.inputs(1)
    assert found.offset is not None
    # Until the source topics have been read to where they end now, nothing is told to be missing.
    assert (found.offset.barriers, found.offset.passed) == ([[0, {TOPIC: None}]], -1)

    store = MemoryStore()

    def step(tick: int, passed: int, **changes: Any) -> tuple[list[tuple[str, str, int]], list[tuple[int, int]]]:
        at = Tick(
            tick=tick,
            cutoff=NOW + tick,
            turn=tick,
            load_horizon=NOW + 1_000,
            near_until=NOW + 500,
            run="run",
            confirmed=0,
            booked=0,
            now=NOW + tick,
            passed=passed,
        )
        effects = Shard(store, {TOPIC: ["a", "b"]}, 1_000_000).apply(at, Intake(**changes))
        told = [(r["request_id"], r["subscription"], r["result"]) for r in effects.outcomes.to_pylist()]
        return told, [(row["entry_id"], row["wants"]) for one in effects.releases for row in one.rows.to_pylist()]

    rebuilt = Rebuilt(sealed=0, unwanted=0, waiting=parts[REBUILT_WAITING], released=NOW - 1)
    assert step(1, -1, messages=messages([]), rebuilt=rebuilt) == ([], [])
    assert step(2, -1, messages=messages([(1, 0, NOW + 2)])) == ([("waits", "b", Result.APPLIED)], [(0, 0b01)])
    assert step(3, 0, messages=messages([])) == ([("of nothing", "b", Result.NOT_FOUND)], [])


def test_the_answers_of_another_message_of_the_same_request_say_nothing(settings: Settings, tmp_path: Path) -> None:
    tables = Tables(settings.warehouse)
    tables.create()
    for entry, index in ((0, 1), (0, 2), (1, -1)):
        answered(tables, "r", entry, "WAITING", batch_index=index)
    answered(tables, "r", 0, "APPLIED", batch_index=2)
    [(_, parts)] = lost(settings, tables, tmp_path / "checkpoint").inputs(1)
    waiting = parts[REBUILT_WAITING].to_pylist()
    assert sorted((row["entry_id"], row["batch_index"], row["subscriptions"]) for row in waiting) == [
        (0, 1, 0b10),
        (1, -1, 0b10),
    ]
    assert {(row["kind"], row["issued_by"]) for row in waiting} == {("skip", "somebody")}
