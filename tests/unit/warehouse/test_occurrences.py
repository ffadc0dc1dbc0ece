"""Recurring messages in the tables: what is pending, delivered once each, and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conf.settings import Settings
from tests.support.warehouse.tables import DAY, HOUR, NOW, make, rows
from tracker.message_state.changes import PAUSED_DELIVER_AT
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import maintain
from warehouse.queries.pending_messages import Pending
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

KEPT = {f"{name}_millis": DAY for name in ("delayed_index", "deliveries", "outcomes", "entries", "rejects")}
TOPIC = "persistent://public/default/t"

Write = Callable[..., None]


@pytest.fixture
def made(tmp_path: Path) -> tuple[Settings, Tables]:
    return make(tmp_path, **KEPT)


@pytest.fixture
def write(made: tuple[Settings, Tables]) -> Write:
    def append(table: str, *values: dict[str, Any]) -> None:
        made[1].append(
            table, rows(table, [{"ledger_id": 1, **value} for value in values]), {"t": made[1].version(table)}
        )

    return append


def row(number: int, due: int, subscription: str | None = None, **columns: Any) -> dict[str, Any]:
    """A DELAY row of the first entry, which recurs each hour."""
    properties = {"deliverAt": str(columns.pop("start", due)), "repeat": "@every 1h", **columns.pop("properties", {})}
    return {
        **{"operation": "DELAY", "occurrence": number, "deliver_at": due, "subscription": subscription},
        **{"sequence": None if subscription is None else number, "properties": list(properties.items()), **columns},
    }


def delivery(number: int, due: int, subscription: str, **columns: Any) -> dict[str, Any]:
    return {
        **{"occurrence": number, "deliver_at": due, "occurrence_at": due, "sent_at": due + 5},
        **{"subscription": subscription, "position": "1:0:-1:-1", "batch_id": number, **columns},
    }


def pending(settings: Settings) -> list[tuple[str, int]]:
    found = Warehouse(settings).sql("SELECT subscription, occurrence FROM pending ORDER BY subscription, occurrence")
    return [(one["subscription"], one["occurrence"]) for one in found.to_pylist()]


def test_the_next_occurrence_is_pending_with_its_number(made: tuple[Settings, Tables], write: Write) -> None:
    settings, _ = made
    write("delayed_index", row(1, NOW - HOUR))
    assert pending(settings) == [("a", 1), ("b", 1)]
    write("deliveries", delivery(1, NOW - HOUR, "a"))
    write("delayed_index", row(2, NOW + HOUR, "a"))
    assert pending(settings) == [("a", 2), ("b", 1)]
    [soon, later] = Pending(settings, TOPIC, now=NOW).page(10).messages
    assert (soon.occurrence, soon.subscriptions) == (1, ("b",))
    assert (later.occurrence, later.subscriptions, later.to_json()["occurrence"]) == (2, ("a",), 2)
    skipped = {"result": "APPLIED", "operation": "SKIP_NEXT", "subscription": "b", "sequence": 7}
    write("outcomes", {**skipped, "occurrence": 1, "deliver_at": NOW - HOUR})
    assert pending(settings) == [("a", 2)]
    write("outcomes", {"result": "APPLIED", "operation": "CANCEL", "subscription": "a", "sequence": 8})
    assert pending(settings) == []


@pytest.mark.parametrize(
    ("deliveries", "cancelled_in", "kinds"),
    [
        ([(1, "a"), (2, "a"), (1, "b")], None, set()),
        ([(1, "a"), (1, "a")], None, {"doubled"}),
        ([(1, "a"), (2, "a")], 3, set()),
        ([(1, "a"), (2, "a")], 2, {"delivered_although_cancelled"}),
    ],
)
def test_the_audit_tells_occurrences_apart(
    made: tuple[Settings, Tables],
    write: Write,
    deliveries: list[tuple[int, str]],
    cancelled_in: int | None,
    kinds: set[str],
) -> None:
    settings, _ = made
    write("delayed_index", row(1, NOW))
    write("entries", {"entry_id": 0, "batch_size": 1})
    write("deliveries", *(delivery(number, NOW + number * HOUR, name) for number, name in deliveries))
    if cancelled_in is not None:
        cancel = {"result": "APPLIED", "operation": "CANCEL", "subscription": "a", "sequence": cancelled_in << 20}
        write("outcomes", cancel)
    with (
        mock.patch("warehouse.audit.broker_comparison.read_broker"),
        mock.patch("warehouse.audit.broker_comparison.compare") as compare,
    ):
        compare.return_value.not_seen = []
        audit = run_audit(settings, now=NOW)
    assert set(audit.findings) == kinds
    assert {r["subscription"]: r["occurrences"] for r in audit.counts}["a"] == len(
        [n for n, s in deliveries if s == "a"]
    )


@pytest.mark.parametrize(("is_sealed", "is_moved"), [(True, True), (True, False), (False, False)])
def test_to_the_audit_a_schedule_whose_only_occurrence_is_skipped_neither_waits_nor_is_overdue(
    made: tuple[Settings, Tables], write: Write, is_sealed: bool, is_moved: bool
) -> None:
    settings, _ = made
    if is_sealed:
        write("delayed_index", row(1, NOW - DAY, properties={"repeatTimes": "1"}))
    write("entries", {"entry_id": 0, "batch_size": 1})
    write("deliveries", delivery(1, NOW - DAY, "b"))
    skip = {"result": "APPLIED", "operation": "SKIP_NEXT", "effect": "CANCEL", "subscription": "a", "occurrence": 1}
    write("outcomes", {**skip, "deliver_at": NOW - DAY, "sequence": 3 << 20})
    if is_moved:
        write("delayed_index", {"operation": "MOVE", "subscription": "a", "sequence": 3 << 20, "deliver_at": NOW - DAY})
    with (
        mock.patch("warehouse.audit.broker_comparison.read_broker"),
        mock.patch("warehouse.audit.broker_comparison.compare") as compare,
    ):
        compare.return_value.not_seen = []
        audit = run_audit(settings, now=NOW)
    assert not audit.findings
    of_a, of_b = audit.counts
    assert [of_a[name] for name in ("delivered", "taken_back", "pending")] == [0, 1, 0]
    assert [of_b[name] for name in ("delivered", "taken_back", "pending")] == [1, 0, 0]


def test_a_schedule_goes_on_whose_producers_clock_was_ahead_of_its_end(
    made: tuple[Settings, Tables], write: Write
) -> None:
    settings, tables = made
    start, end = NOW - 8 * DAY, NOW + DAY
    write("delayed_index", row(1, start, properties={"repeatUntil": str(end)}, publish_time=end + HOUR))
    write("deliveries", *(delivery(n, start + (n - 1) * HOUR, name) for n in (1, 2) for name in "ab"))
    write("entries", {"entry_id": 0, "batch_size": 1, "publish_time": end + HOUR})
    for _ in range(3):
        maintain(settings, now=NOW)
    left = tables.sql("SELECT occurrence FROM delayed_index WHERE operation = 'DELAY'")["occurrence"].to_pylist()
    assert left == [1]


@pytest.mark.parametrize(
    ("properties", "is_cancelled", "kept"),
    [({}, False, True), ({"repeatTimes": "200"}, False, False), ({}, True, False)],
)
def test_a_recurring_message_stays_until_it_has_ended(
    made: tuple[Settings, Tables], write: Write, properties: dict[str, str], is_cancelled: bool, kept: bool
) -> None:
    settings, tables = made
    start = NOW - 20 * DAY
    times = {n: start + (n - 1) * HOUR for n in range(1, 201)}
    of: dict[str, Any] = {"publish_time": start - 1}
    index = [row(1, start, properties=properties, **of)]
    index += [row(n, times[n], name, start=start, properties=properties, **of) for n in range(2, 201) for name in "ab"]
    write("delayed_index", *index)
    write("deliveries", *(delivery(n, due, name) for n, due in times.items() for name in "ab"))
    write("entries", {"entry_id": 0, "batch_size": 1, "publish_time": start - 1})
    write("entries", {"entry_id": 9, "batch_size": 1, "publish_time": NOW})
    if is_cancelled:
        cancel = {"result": "APPLIED", "operation": "CANCEL", "sequence": 300 << 20}
        write("outcomes", *({**cancel, "subscription": name} for name in "ab"))
    for _ in range(3):
        maintain(settings, now=NOW)
    left = tables.sql("SELECT occurrence FROM delayed_index WHERE operation = 'DELAY'")["occurrence"].to_pylist()
    assert left == ([1] if kept else [])
    numbers = tables.sql("SELECT occurrence FROM deliveries WHERE subscription = 'a'")["occurrence"].to_pylist()
    # Of one that has ended those of the last hour in which anything was delivered, as of any message.
    assert sorted(numbers) == (list(range(176, 201)) if kept else [199, 200])


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_paused_schedule_and_its_pause_stay_until_it_is_cancelled(
    made: tuple[Settings, Tables], write: Write, is_cancelled: bool
) -> None:
    settings, tables = made
    start = NOW - 90 * DAY
    of: dict[str, Any] = {"start": start, "publish_time": start - 1}
    write("delayed_index", row(1, start, **of))
    write(
        "delayed_index",
        *(row(2, PAUSED_DELIVER_AT, name, occurrence_at=start + HOUR, **of) for name in "ab"),
    )
    write("deliveries", *(delivery(1, start, name) for name in "ab"))
    write("entries", {"entry_id": 0, "batch_size": 1, "publish_time": start - 1})
    write("entries", {"entry_id": 9, "batch_size": 1, "publish_time": NOW})
    paused = {"result": "APPLIED", "operation": "PAUSE_SCHEDULE", "sequence": 2, "occurrence": 2, "applied_at": start}
    write("outcomes", *({**paused, "subscription": name} for name in "ab"))
    if is_cancelled:
        cancel = {"result": "APPLIED", "operation": "CANCEL", "sequence": 3, "applied_at": start}
        write("outcomes", *({**cancel, "subscription": name} for name in "ab"))
    for _ in range(4):
        maintain(settings, now=NOW)
    left = tables.sql("SELECT occurrence FROM delayed_index WHERE operation = 'DELAY'")["occurrence"].to_pylist()
    told = tables.sql("SELECT operation FROM outcomes")["operation"].to_pylist()
    assert (sorted(left), told) == (([], []) if is_cancelled else ([1, 2, 2], ["PAUSE_SCHEDULE"] * 2))
    assert len(tables.sql("SELECT 1 FROM deliveries")) == 2  # by their numbers it goes on


@pytest.mark.parametrize("due", [NOW + 10 * DAY, NOW - 2 * DAY])
def test_what_was_cancelled_can_be_restored_until_its_occurrence_is_past(
    made: tuple[Settings, Tables], write: Write, due: int
) -> None:
    settings, tables = made
    start = due - 30 * DAY
    of: dict[str, Any] = {"start": start, "publish_time": start - 1, "properties": {"repeat": "@every 30d"}}
    write("delayed_index", row(1, start, **of), *(row(2, due, name, occurrence_at=due, **of) for name in "ab"))
    write("deliveries", *(delivery(1, start, name) for name in "ab"))
    write("entries", {"entry_id": 0, "batch_size": 1, "publish_time": start - 1})
    write("entries", {"entry_id": 9, "batch_size": 1, "publish_time": NOW})
    told = {"result": "APPLIED", "sequence": 300 << 20, "applied_at": start + DAY, "deliver_at": due}
    write("outcomes", *({**told, "operation": "CANCEL", "subscription": name} for name in "ab"))
    for _ in range(4):
        maintain(settings, now=NOW)
    left = tables.sql("SELECT occurrence FROM delayed_index WHERE operation = 'DELAY'")["occurrence"].to_pylist()
    assert sorted(left) == ([1, 2, 2] if due > NOW else [])
    if due > NOW:
        restore = {**told, "operation": "RESTORE", "sequence": 301 << 20, "applied_at": NOW, "subscription": "a"}
        write("outcomes", restore)
        for _ in range(2):
            maintain(settings, now=NOW)
        assert pending(settings) == [("a", 2)]
        left = tables.sql("SELECT occurrence FROM delayed_index WHERE operation = 'DELAY' AND subscription IS NULL")
        assert left["occurrence"].to_pylist() == [1]
