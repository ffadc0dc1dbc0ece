"""A rebuild finds the places that shaping has given, and where its queues end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.warehouse.rebuilt import of_all_shards, prepared
from tests.support.warehouse.tables import DAY, HOUR, NOW, TOPIC, make, rows
from tracker.message_state.changes import HELD_DELIVER_AT


@pytest.mark.slow
def test_what_was_put_off_keeps_its_place_and_what_comes_later_goes_behind_it(tmp_path: Path) -> None:
    made, tables = make(tmp_path)

    def put_off(entry: int, at: int, subscription: str) -> list[dict[str, object]]:
        moved = {"ledger_id": 1, "entry_id": entry, "deliver_at": at, "subscription": subscription, "sequence": entry}
        return [
            {"ledger_id": 1, "entry_id": entry, "deliver_at": NOW - HOUR, "operation": "DELAY"},
            {**moved, "operation": "DELAY", "shaped_from": NOW - HOUR},
            {**moved, "operation": "MOVE"},
        ]

    index = [
        *put_off(1, NOW - 10, "a"),  # has gone out
        *put_off(2, NOW + HOUR, "a"),
        *put_off(3, NOW + DAY, "a"),
        *put_off(4, NOW + 2 * HOUR, "b"),
        *put_off(5, HELD_DELIVER_AT, "b"),
        {"ledger_id": 1, "entry_id": 6, "deliver_at": NOW + 9 * DAY, "operation": "DELAY"},
    ]
    tables.append("delayed_index", rows("delayed_index", index), {"job": 1})
    entries = [{"ledger_id": 1, "entry_id": i} for i in range(1, 7)]
    tables.append("entries", rows("entries", entries), {"job": 1})
    found = prepared(made, tmp_path / "checkpoint", NOW)
    meta = found.inputs(found.shards)[0][0]
    assert meta["shaped_until"] == {TOPIC: {"a": NOW + DAY, "b": NOW + 2 * HOUR}}
    places = of_all_shards(found).moved
    assert dict(zip(places["entry_id"].to_pylist(), places["deliver_at"].to_pylist(), strict=True))[3] == NOW + DAY
