"""What was said to all subscriptions and later ones is applied to a subscription that is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from delaylake.commands import Ids
from delaylake.wire.delaylake_pb2 import ControlOutcome, Result

from admin.control.requests import request_factory
from broker.entries.message_ids import MessageRef
from conf.settings import Settings
from streaming.source.later_commands import later_commands
from tests.support.warehouse.tables import NOW, TOPIC, rows
from tests.unit.warehouse.routes.test_membership import known
from tracker.commands.kinds import CANCEL
from tracker.schemas import MAX_REQUEST_ID_BYTES
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import LOOKED_UP
from warehouse.routes.membership import changes

HOUR = 3_600_000


def outcome(entry: int, sequence: int, operation: str = "CANCEL", **given: Any) -> dict[str, Any]:
    default = {
        "request_id": f"r{sequence}",
        "subscription": "*",
        "result": "APPLIED",
        "issued_by": "me",
        "issued_at": 7,
    }
    at = {"ledger_id": 1, "entry_id": entry, "sequence": sequence, "operation": operation, "deliver_at": None}
    return {**default, **at, **given}


def test_what_still_waits_is_cancelled_for_it_as_from_the_others(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    published = [
        outcome(1, 1, partition=-1),
        outcome(2, 2, "SKIP", batch_index=1),
        outcome(3, 3),
        outcome(3, 4, "RESTORE"),
        outcome(4, 5, "RESCHEDULE", deliver_at=NOW + 2 * HOUR),
        outcome(5, 6),  # was handed out before
        outcome(6, 7),  # is durable, and was never sealed
        outcome(7, 8),  # is not durable yet
        outcome(1, 9, result="TOO_LATE"),
        outcome(1, 10, subscription="a"),
        outcome(1, 11, topic="other"),
        outcome(8, 12),
        outcome(8, 12, subscription="c"),  # it was there then, and was taken out
    ]
    tables.append("outcomes", rows("outcomes", published), {})
    due = [{"ledger_id": 1, "entry_id": i, "deliver_at": NOW + (HOUR if i != 5 else -1)} for i in (1, 2, 3, 4, 5, 8)]
    tables.append("delayed_index", rows("delayed_index", [{**row, "operation": "DELAY"} for row in due]), {})
    tables.append("entries", rows("entries", [*due, {"ledger_id": 1, "entry_id": 6}]), {})
    first, second = known(tmp_path, ("a",), ("c", "a"))
    found = changes(first, second, NOW, {TOPIC: "1:7"})

    versions = [tables.version(name) for name in LOOKED_UP]
    tables.append("outcomes", rows("outcomes", [outcome(1, 20)]), {})  # of the very tick
    commands, pause_changes = later_commands(tables, versions, found, second)
    names = ("request_id", "kind", "operation", "entry_id", "batch_index", "deliver_at")
    assert [tuple(row[name] for name in names) for row in commands.to_pylist()] == [
        ("r1", "skip", "CANCEL", 1, -1, 0),
        ("r2", "skip", "SKIP", 2, 1, 0),
        ("r3", "skip", "CANCEL", 3, -1, 0),
        ("r4", "restore", "RESTORE", 3, -1, 0),
        ("r5", "reschedule", "RESCHEDULE", 4, -1, NOW + 2 * HOUR),
        ("r8", "skip", "CANCEL", 7, -1, 0),
    ]
    assert set(commands["subscriptions"].to_pylist()) == {0b10}
    assert pause_changes == []
    assert later_commands(tables, versions, {}, second)[0].num_rows == 0


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared", "Exclusive", "Failover"])
def test_a_skip_is_not_for_one_that_acknowledges_cumulatively(tmp_path: Path, kind: str) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    tables.append("outcomes", rows("outcomes", [outcome(1, 1), outcome(2, 2, "SKIP")]), {})
    [first] = known(tmp_path, ("a",))
    route = {"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b", "type": kind}]}
    second = first.updated_to(Settings(routes=[route]))  # type: ignore[arg-type]

    versions = [tables.version(name) for name in LOOKED_UP]
    commands, _ = later_commands(tables, versions, changes(first, second, NOW, {TOPIC: "1:7"}), second)
    is_single = kind in ("Shared", "Key_Shared")
    assert commands["operation"].to_pylist() == ["CANCEL"] + ["SKIP"] * is_single


def test_it_begins_paused_where_the_last_word_was_a_pause(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    first, second = known(tmp_path, ("a",), ("a", "b"))
    found = changes(first, second, NOW, {})
    for sequence, (operation, is_paused) in enumerate([("PAUSE", True), ("RESUME", False), ("PAUSE", True)]):
        row = outcome(-1, sequence, operation, ledger_id=-1)
        tables.append("outcomes", rows("outcomes", [row]), {})
        versions = [tables.version(name) for name in LOOKED_UP]
        commands, pause_changes = later_commands(tables, versions, found, second)
        paused = [(s.request_id, s.subscriptions, s.is_paused) for s in pause_changes]
        assert paused == [(f"r{sequence} b", 0b10, True)] * is_paused
        published = [(r["request_id"], r["subscription"], r["operation"], r["result"]) for r in commands.to_pylist()]
        assert published == [(f"r{sequence} b", "b", "PAUSE", Result.APPLIED)] * is_paused


def test_the_request_id_of_its_pause_is_as_long_as_one_may_be_in_bytes(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    first, second = known(tmp_path, ("a",), ("a", "b"))
    row = outcome(-1, 0, "PAUSE", ledger_id=-1, request_id="ä" * (MAX_REQUEST_ID_BYTES // 2 - 1) + "x")
    tables.append("outcomes", rows("outcomes", [row]), {})
    versions = [tables.version(name) for name in LOOKED_UP]
    _, [change] = later_commands(tables, versions, changes(first, second, NOW, {}), second)
    assert change.request_id == f"{row['request_id']} "
    row["request_id"] = "ä" * (MAX_REQUEST_ID_BYTES // 2)
    tables.append("outcomes", rows("outcomes", [row | {"sequence": 1}]), {})
    versions = [tables.version(name) for name in LOOKED_UP]
    _, [change] = later_commands(tables, versions, changes(first, second, NOW, {}), second)
    assert change.request_id == row["request_id"]


def test_who_sends_it_waits_for_an_answer_of_each_subscription_and_one_for_later_ones() -> None:
    settings = Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}]}])  # type: ignore[arg-type]
    [request] = request_factory(settings, "me", TOPIC, ["*"]).make(CANCEL, Ids([MessageRef(1, 2)], [5]))
    assert list(request.command.subscriptions) == ["*"]
    for name, is_last in (("a", False), ("*", True)):
        request.take(ControlOutcome(subscription=name, ledger_id=1, entry_id=2, batch_index=-1, result=Result.APPLIED))
        assert request.is_answered == is_last
