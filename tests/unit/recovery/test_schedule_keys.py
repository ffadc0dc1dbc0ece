"""A rebuild finds the schedule keys whose message waits, and gives each shard its own."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from recovery.rebuild import rebuild
from streaming.checkpoint.prepared import PreparedState
from tests.unit.warehouse.maintenance.test_maintenance import HOUR, NOW, TOPIC, make, rows
from tracker.schedule import MAX_TIME_MILLIS
from tracker.schedule_key import key_hash


def test_keys_of_what_waits_are_rebuilt_and_those_that_go_on(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    made = made.model_copy(update={"tracker": made.tracker.model_copy(update={"shards": 3})})

    def delay(entry: int, key: str | None, due: int = NOW + HOUR) -> dict[str, object]:
        keyed = {"schedule_key": key, "key_since": None if key is None else NOW - entry}
        return {
            "operation": "DELAY",
            "ledger_id": 1,
            "entry_id": entry,
            "deliver_at": due,
            "subscription": None,
            **keyed,
        }

    def superseded(entry: int, by: str, subscription: str = "a") -> dict[str, object]:
        return {
            **{"ledger_id": 1, "entry_id": entry, "subscription": subscription, "request_id": "superseded"},
            **{"result": "SUPERSEDED", "operation": "CANCEL", "sequence": 9, "schedule_key": "goes on"},
            **{"superseded_by": by, "deliver_at": NOW - 77, "issued_by": "delaylake"},
        }

    imported = {**delay(5, "imported"), "key_since": None}
    index = [imported, delay(0, "waits"), delay(1, "goes on"), delay(2, "delivered", NOW - HOUR), delay(3, None)]
    held = {**delay(4, "held", MAX_TIME_MILLIS + 1), "subscription": "a", "sequence": 5}
    moved = {**held, "operation": "MOVE"}
    original = delay(4, "held", NOW - HOUR)
    delivered = [{"ledger_id": 1, "entry_id": 2, "subscription": name, "deliver_at": NOW - HOUR} for name in "ab"]
    delivered.append({"ledger_id": 1, "entry_id": 4, "subscription": "b", "deliver_at": NOW - HOUR})
    tables.append("delayed_index", rows("delayed_index", [*index, original, held, moved]), {"job": 1})
    tables.append("deliveries", rows("deliveries", delivered), {"job": 1})
    tables.append("entries", rows("entries", [{"ledger_id": 1, "entry_id": i} for i in range(6)]), {"job": 1})
    outcomes = [superseded(1, "1:7:-1:-1"), superseded(1, "1:7:-1:-1", "b")]
    tables.append("outcomes", rows("outcomes", outcomes), {"job": 1})

    with mock.patch("recovery.rebuild.write_missing_deliveries", return_value=0):
        rebuild(made, tables, tmp_path / "checkpoint", now=NOW)

    found = PreparedState(tmp_path / "checkpoint")
    assert found.offset is not None
    assert found.offset.keyed == [TOPIC]
    keys = {}
    for shard, (_, inputs) in enumerate(found.inputs(3)):
        assert inputs["rebuilt_taken"].num_rows == 2  # in every shard: a message may be in any
        for row in inputs["rebuilt_keys"].to_pylist():
            assert key_hash(TOPIC, row["schedule_key"])[1] % 3 == shard
            keys[row["schedule_key"]] = row["ledger_id"], row["entry_id"], row["since"]
    assert keys == {
        "waits": (1, 0, NOW),
        "held": (1, 4, NOW - 4),
        "imported": (1, 5, NOW + HOUR),
        "goes on": (-1, -1, NOW - 77),
    }
