"""What is parked, and the rounds in which it goes out, by one look at all rows that were ever sealed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from tests.support.tracker.messages import TOPIC
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.parking import Round
from tracker.messages import MESSAGES


def parked(stored: pa.Table, name: str) -> list[dict[str, Any]]:
    """The rows parked for a subscription of TOPIC, in the order in which they were due."""
    last: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in stored.to_pylist():
        key = row["ledger_id"], row["entry_id"], row["batch_index"]
        if row["subscription"] == name and (row["sequence"] or 0) >= (last.get(key, row)["sequence"] or 0):
            last[key] = row
    waiting = [row for row in last.values() if row["deliver_at"] == HELD_DELIVER_AT]
    return sorted(waiting, key=lambda row: (row["was_due"], row["sequence"], row["entry_id"], row["batch_index"]))


def rounds(stored: pa.Table, names: Iterable[str], most: int) -> dict[str, Any]:
    """The fields of a tick's input with a round of at most so many messages for each of some subscriptions of TOPIC."""
    found, read = [], {}
    for name in names:
        rows = parked(stored, name)
        found += rows[:most]
        left = rows[most:]
        read[name] = Round(rows[most - 1]["was_due"], len(left)) if left else Round()
    return {"drained": pa.Table.from_pylist(found, schema=MESSAGES), "rounds": {TOPIC: read}}
