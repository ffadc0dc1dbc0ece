"""What a run before has written down of a part, of all that is sent for a destination."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from status.alerts import NOT_SENT, Alerts
from streaming.release.driver.release_records import ReleaseRecords, recipient_conditions
from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import with_columns
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES

Delivery = tuple[int, int | None, int | None]  # entry, attempt, occurrence


def rows(*deliveries: Delivery, **columns: Any) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"topic": TOPIC, "subscription": "a", "ledger_id": 1, "entry_id": entry, "batch_index": -1, "batch_id": 5}
            | {"position": f"1:{entry}:-1:-1", "attempt": attempt, "occurrence": occurrence, **columns}
            for entry, attempt, occurrence in deliveries
        ],
        schema=DELIVERIES,
    )


FIRST, RETRY, OCCURRENCE, OTHER = (1, None, None), (1, 1, None), (1, None, 2), (2, None, None)


@pytest.mark.parametrize("written", [FIRST, RETRY, OCCURRENCE])
def test_only_the_very_delivery_counts_as_written_down(tmp_path: Path, written: Delivery) -> None:
    """A message's first delivery, its retries and its occurrences have the same position."""
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    tables.append("deliveries", rows(written), {"run": 5})
    for others in ({"subscription": "b"}, {"batch_id": 4}):
        tables.append("deliveries", rows(OTHER, **others), {})
    sent = [FIRST, RETRY, OCCURRENCE, OTHER]
    records = ReleaseRecords(tables, "app", threading.Event())
    missing = records.missing("deliveries", rows(*sent), [5, 9], *recipient_conditions((TOPIC, "a")))
    found = [missing[name].to_pylist() for name in ("entry_id", "attempt", "occurrence")]
    assert list(zip(*found, strict=True)) == [one for one in sent if one != written]
    entry, attempt, occurrence = written
    key = f"1:{entry}:-1:-1", str(attempt or ""), str(occurrence or "")
    assert records.recorded([5, 9], (TOPIC, "a")) == {key}


def test_what_no_message_can_be_made_of_is_written_down_once_and_told(tmp_path: Path) -> None:
    tables, alerts = Tables(f"file:{tmp_path}"), Alerts()
    tables.create()
    kind = pa.map_(pa.string(), pa.string())
    n = 2
    refused = with_columns(
        messages([(1, 7, 1_000), (1, 8, 1_000)], event_time=-5),
        properties=pa.array([[("region", None)]] * n, kind),
        subscription=pa.array(["a"] * n),
        reason=pa.array(["not delivered to a: why"] * n),
    )
    for _ in range(2):  # as after a crash before the release was confirmed
        records = ReleaseRecords(tables, "app", threading.Event(), alerts)
        assert records.write_refused(refused, "app:planned0", 5)
    rejects = tables.query("rejects", "SELECT entry_id, properties, reason FROM rejects ORDER BY entry_id").to_pylist()
    assert [(row["entry_id"], dict(row["properties"])) for row in rejects] == [
        (7, {"region": None}),
        (8, {"region": None}),
    ]
    outcomes = tables.query("outcomes", "SELECT entry_id, operation FROM outcomes ORDER BY entry_id").to_pylist()
    assert [(row["entry_id"], row["operation"]) for row in outcomes] == [(7, "CANCEL"), (8, "CANCEL")]
    [trouble] = alerts.current()
    assert (trouble.kind, trouble.name) == (NOT_SENT, TOPIC)
    assert trouble.text == "1:8:-1:-1 was not delivered to a: why; the table rejects has it"
