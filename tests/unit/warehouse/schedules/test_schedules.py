"""Schedules, read from tables as the job writes them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from broker.entries.message_ids import MessageRef
from conf.settings import local_path
from status.job_status import FILE as STATUS_FILE
from tests.support.warehouse.schedule_tables import DAY, NINE, PUBLISHED, TOPIC, ScheduleTables
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.schemas import SEQUENCE_BITS
from warehouse.audit.accounts import run_audit
from warehouse.queries.listing import CursorError, NoTablesError, UnknownTopicError
from warehouse.routes.membership import write_changes
from warehouse.schedules.live_schedules import live_schedules
from warehouse.schedules.schedule import Occurrence, Schedule, ScheduleState
from warehouse.schedules.schedules import Schedules
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

NONE_LIVE = {(TOPIC, "a"): 0, (TOPIC, "b"): 0}


@pytest.fixture
def tables(tmp_path: Path) -> ScheduleTables:
    return ScheduleTables(tmp_path)


def found(tables: ScheduleTables, entry: int, subscription: str | None = None, batch_index: int = -1) -> Schedule:
    schedule = Schedules(tables.settings, TOPIC, subscription).find(MessageRef(7, entry, -1, batch_index))
    assert schedule is not None
    return schedule


def test_a_new_schedule_waits_for_its_first_occurrence_for_all_subscriptions(tables: ScheduleTables) -> None:
    tables.came(1, timeZone="Europe/Berlin", repeatTimes="3")
    schedule = found(tables, 1)
    assert [(p.subscription, p.state, p.delivered, p.last, p.next) for p in schedule.progress] == [
        ("a", ScheduleState.WAITING, 0, None, Occurrence(1, NINE)),
        ("b", ScheduleState.WAITING, 0, None, Occurrence(1, NINE)),
    ]
    assert (schedule.key, schedule.publish_time, schedule.rule.time_zone) == ("k1", PUBLISHED, "Europe/Berlin")
    # The rule is of another zone than the first occurrence: what follows is by the rule.
    assert [one.number for one in schedule.upcoming(9)] == [1, 2, 3]
    assert schedule.upcoming(0) == []


def test_the_last_delivery_is_when_it_was_and_what_follows_goes_by_the_rule(tables: ScheduleTables) -> None:
    """The third occurrence was delivered at once by a command, a day before its time."""
    tables.came(1)
    for subscription in "ab":
        tables.delivered(subscription, 1, 2, NINE + DAY, by_rule=NINE + DAY)
    tables.delivered("a", 1, 3, NINE + DAY + 5, by_rule=NINE + 2 * DAY)
    a, b = found(tables, 1).progress
    assert (a.last, a.next) == (Occurrence(3, NINE + DAY + 5), Occurrence(4, NINE + 3 * DAY))
    assert (b.last, b.next) == (Occurrence(2, NINE + DAY), Occurrence(3, NINE + 2 * DAY))
    assert a.to_json()["lastDeliverAt"] == NINE + DAY + 5
    rows = Warehouse(tables.settings).sql("SELECT last_occurrence, last_at FROM schedules ORDER BY subscription")
    assert [tuple(row.values()) for row in rows.to_pylist()] == [(3, NINE + DAY + 5), (2, NINE + DAY)]


def test_what_follows_the_last_delivery_is_next_where_it_has_no_row_yet(tables: ScheduleTables) -> None:
    tables.came(1)
    for number in range(1, 4):
        tables.delivered("a", 1, number, NINE + (number - 1) * DAY)
    tables.delivered("b", 1, 1, NINE)
    a, b = found(tables, 1).progress
    assert (a.delivered, a.last, a.next) == (3, Occurrence(3, NINE + 2 * DAY), Occurrence(4, NINE + 3 * DAY))
    assert (b.delivered, b.last, b.next) == (1, Occurrence(1, NINE), Occurrence(2, NINE + DAY))
    assert found(tables, 1).upcoming(2) == [Occurrence(2, NINE + DAY), Occurrence(3, NINE + 2 * DAY)]
    assert found(tables, 1, "a").upcoming(1) == [Occurrence(4, NINE + 3 * DAY)]


def test_it_waits_also_where_its_producers_clock_was_ahead_of_its_end(tables: ScheduleTables) -> None:
    first = NINE - 7 * DAY
    tables.came(1, first=first, deliverAt=str(first), repeatUntil=str(PUBLISHED - 1))
    tables.delivered("a", 1, 1, first)
    schedule = Schedules(tables.settings, TOPIC, "a", now=first + 1).find(MessageRef(7, 1))
    assert schedule is not None
    assert schedule.progress[0].next == Occurrence(2, first + DAY)


def test_a_row_of_the_next_occurrence_says_when_it_is_due(tables: ScheduleTables) -> None:
    tables.came(1)
    tables.delivered("a", 1, 1, NINE)
    tables.waits("a", 1, 2, NINE + DAY, sequence=5)
    tables.waits("a", 1, 2, NINE + DAY // 2, sequence=6, by_rule=NINE + DAY)
    schedule = found(tables, 1, "a")
    (a,) = schedule.progress
    assert (a.next, a.next_by_rule) == (Occurrence(2, NINE + DAY // 2), NINE + DAY)
    # It was moved: the one after it is by the rule still.
    assert schedule.upcoming(2) == [Occurrence(2, NINE + DAY // 2), Occurrence(3, NINE + 2 * DAY)]
    tables.delivered("a", 1, 2, NINE + DAY)
    assert found(tables, 1, "a").progress[0].next == Occurrence(3, NINE + 2 * DAY)


def test_a_skipped_occurrence_is_done_but_not_delivered(tables: ScheduleTables) -> None:
    tables.came(1)
    tables.commanded("SKIP_NEXT", "a", 1, sequence=5, occurrence=1, deliver_at=NINE)
    a, b = found(tables, 1).progress
    assert (a.delivered, a.last, a.next) == (0, Occurrence(1, NINE), Occurrence(2, NINE + DAY))
    assert b.next == Occurrence(1, NINE)


def test_what_was_due_while_a_subscription_was_not_there_has_ended_for_it(tables: ScheduleTables) -> None:
    for entry in (1, 2):
        tables.came(entry)
        for name in ("a", "b"):
            tables.delivered(name, entry, 1, NINE)
            tables.waits(name, entry, 2, NINE + DAY * entry, sequence=5)
    for tick, (change, at) in enumerate((("REMOVED", NINE + 9), ("ADDED", NINE + DAY + 9))):
        changed = {"handed_out": at, "positions": {"-1": "7:9"}, "subscriptions": {"a": change, "b": "KEPT"}}
        write_changes(tables.tables, {TOPIC: changed}, tick, at, f"w{tick}")
    states = {(entry, p.subscription): (p.state, p.next) for entry in (1, 2) for p in found(tables, entry).progress}
    view = Warehouse(tables.settings).sql("SELECT * FROM schedules").to_pylist()
    assert {(row["entry_id"], row["subscription"]): (row["state"], row["next_at"]) for row in view} == {
        of: (str(state), following and following.at) for of, (state, following) in states.items()
    }
    waiting = Warehouse(tables.settings).sql("SELECT entry_id, subscription FROM pending").to_pylist()
    assert {(row["entry_id"], row["subscription"]) for row in waiting} == states.keys() - {(1, "a")}
    overdue = run_audit(tables.settings, NINE + DAY * 3 // 2).findings["overdue"]["examples"]
    assert [(one["position"], one["subscription"]) for one in overdue] == [("7:1:-1:-1", "b")]
    assert states == {
        (1, "a"): (ScheduleState.ENDED, None),
        (1, "b"): (ScheduleState.WAITING, Occurrence(2, NINE + DAY)),
        (2, "a"): (ScheduleState.WAITING, Occurrence(2, NINE + 2 * DAY)),
        (2, "b"): (ScheduleState.WAITING, Occurrence(2, NINE + 2 * DAY)),
    }
    # Of a first occurrence, too, that was rescheduled; and what was rescheduled when it was back is not concerned.
    late = {3: (NINE + DAY, 5), 4: (NINE + DAY, 2 << SEQUENCE_BITS), 5: (NINE + 2 * DAY, 5)}
    for entry, (due, sequence) in late.items():
        tables.came(entry, first=NINE + DAY - entry)
        tables.waits("a", entry, 1, due, sequence=sequence)
        tables.moved("a", entry, due, sequence=sequence)
    ended = {3: ScheduleState.ENDED, 4: ScheduleState.WAITING, 5: ScheduleState.WAITING}
    assert {entry: found(tables, entry, "a").progress[0].state for entry in late} == ended
    view = "SELECT entry_id, state FROM schedules WHERE subscription = 'a' AND entry_id IN (3, 4, 5)"
    assert dict(zip(*Warehouse(tables.settings).sql(view).to_pydict().values(), strict=True)) == ended
    # What came only when it was back is handed out, however late.
    tables.came(10)
    tables.delivered("a", 10, 1, NINE)
    assert found(tables, 10).progress[0].next == Occurrence(2, NINE + DAY)


def test_what_is_held_back_has_no_time(tables: ScheduleTables) -> None:
    tables.came(1)
    tables.waits("a", 1, 1, HELD_DELIVER_AT, sequence=5, by_rule=NINE)
    schedule = found(tables, 1, "a")
    assert schedule.progress[0].state is ScheduleState.HELD
    assert schedule.is_active
    assert schedule.progress[0].to_json()["nextDeliverAt"] is None
    assert schedule.upcoming(2) == [Occurrence(1, NINE), Occurrence(2, NINE + DAY)]


def test_what_is_paused_has_no_time_until_it_is_resumed(tables: ScheduleTables) -> None:
    tables.came(1)

    def state() -> tuple[str, int | None]:
        (a,) = found(tables, 1, "a").progress
        assert found(tables, 1, "a").is_active
        assert found(tables, 1, "a").upcoming(2) == [Occurrence(1, NINE), Occurrence(2, NINE + DAY)]
        return str(a.state), a.to_json()["nextDeliverAt"]

    assert state() == ("waiting", NINE)
    # At once by the command, and by the row that follows it alone.
    tables.commanded("PAUSE_SCHEDULE", "a", 1, sequence=5, occurrence=1)
    assert state() == ("paused", None)
    tables.waits("a", 1, 1, PAUSED_DELIVER_AT, sequence=5, by_rule=NINE)
    tables.moved("a", 1, PAUSED_DELIVER_AT, sequence=5)
    assert state() == ("paused", None)
    view = "SELECT state, next_at FROM schedules WHERE subscription = 'a'"
    assert Warehouse(tables.settings).sql(view).to_pylist() == [{"state": "paused", "next_at": None}]
    assert found(tables, 1).to_json()["state"] == "waiting"  # for b
    tables.commanded("RESUME_SCHEDULE", "a", 1, sequence=6, occurrence=1, deliver_at=NINE)
    assert state() == ("waiting", NINE)
    tables.waits("a", 1, 1, NINE, sequence=6, by_rule=NINE)
    tables.moved("a", 1, PAUSED_DELIVER_AT, sequence=6)
    assert state() == ("waiting", NINE)
    assert Warehouse(tables.settings).sql(view).to_pylist() == [{"state": "waiting", "next_at": NINE}]
    tables.waits("a", 1, 1, PAUSED_DELIVER_AT, sequence=7, by_rule=NINE)
    assert state() == ("paused", None)
    assert live_schedules(tables.settings, NINE - 1) == {(TOPIC, "a"): 1, (TOPIC, "b"): 1}


@pytest.mark.parametrize("rests_at", [HELD_DELIVER_AT, PAUSED_DELIVER_AT])
@pytest.mark.parametrize(
    ("misfire", "late", "expected"),
    [
        ("once", 30 * DAY - 1, [(1, 30 * DAY - 1), (2, 30 * DAY), (3, 31 * DAY)]),
        ("skip", 30 * DAY - 1, [(1, 30 * DAY), (2, 31 * DAY), (3, 32 * DAY)]),
        ("skip", 59_000, [(1, 59_000), (2, DAY), (3, 2 * DAY)]),
        ("skip", 50 * DAY, []),  # it ends before
        ("all", 30 * DAY - 1, [(1, 0), (2, DAY), (3, 2 * DAY)]),
        ("once", -1, [(1, 0), (2, DAY), (3, 2 * DAY)]),
    ],
)
def test_what_comes_next_of_a_schedule_that_rests_is_as_if_it_went_on_now(
    tables: ScheduleTables, rests_at: int, misfire: str, late: int, expected: list[tuple[int, int]]
) -> None:
    tables.came(1, misfire=misfire, repeatUntil=str(NINE + 40 * DAY))
    tables.waits("a", 1, 1, rests_at, sequence=5, by_rule=NINE)
    schedule = Schedules(tables.settings, TOPIC, "a", now=NINE + late).find(MessageRef(7, 1))
    assert schedule is not None
    assert schedule.upcoming(3) == [Occurrence(number, NINE + after) for number, after in expected]


def test_a_cancel_of_a_schedule_names_the_same_time_however_far_it_has_got(tables: ScheduleTables) -> None:
    tables.came(1, first=NINE + 1)
    times = [found(tables, 1).cancel_at]
    tables.delivered("a", 1, 1, NINE)
    times.append(found(tables, 1).cancel_at)
    tables.waits("b", 1, 2, HELD_DELIVER_AT, sequence=5, by_rule=NINE + DAY)
    times.append(found(tables, 1).cancel_at)
    for name in ("a", "b"):
        tables.commanded("CANCEL", name, 1, sequence=6)
    # It is that of the row with which it came, by which the job finds it soonest.
    assert [*times, found(tables, 1).cancel_at] == [NINE + 1] * 4


def test_a_schedule_is_over_when_it_was_cancelled_until_it_is_restored_or_when_its_rule_has_ended(
    tables: ScheduleTables,
) -> None:
    tables.came(1)
    tables.came(2, repeatTimes="1")
    tables.commanded("CANCEL", "a", 1, sequence=5)
    a, b = found(tables, 1).progress
    assert (a.state, b.state) == (ScheduleState.CANCELLED, ScheduleState.WAITING)
    assert found(tables, 1).is_active
    tables.commanded("SKIP", "b", 1, sequence=6)
    assert not found(tables, 1).is_active
    assert found(tables, 1).to_json()["state"] == "takenBack"
    tables.commanded("RESTORE", "a", 1, sequence=7)
    assert found(tables, 1, "a").is_active
    for name in ("a", "b"):
        tables.delivered(name, 2, 1, NINE)
    over = found(tables, 2)
    assert {one.state for one in over.progress} == {ScheduleState.ENDED}
    assert (over.next, over.upcoming(3), over.to_json()["state"]) == (None, [], "ended")


def test_pages_have_each_schedule_once_and_those_that_are_over_if_asked_for(tables: ScheduleTables) -> None:
    for entry in range(7):
        tables.came(entry)
    for name in ("a", "b"):
        tables.commanded("CANCEL", name, 3, sequence=5)

    def listed(with_ended: bool) -> list[int]:
        entries, cursor = [], None
        while True:
            page = Schedules(tables.settings, TOPIC).page(2, cursor, with_ended)
            assert len(page.schedules) <= 2
            entries += [schedule.ref.entry_id for schedule in page.schedules]
            if (cursor := page.cursor) is None:
                return entries

    assert listed(with_ended=False) == [0, 1, 2, 4, 5, 6]
    assert listed(with_ended=True) == list(range(7))
    with pytest.raises(CursorError):
        Schedules(tables.settings, TOPIC).page(2, "nonsense")


def test_a_message_of_a_batch_is_named_by_its_index(tables: ScheduleTables) -> None:
    tables.came(1, batch_index=0, batch_size=2)
    tables.came(1, batch_index=1, batch_size=2, repeat="0 9 * * MON")
    tables.delivered("a", 1, 1, NINE, batch_index=1)
    assert found(tables, 1, "a", batch_index=1).progress[0].next == Occurrence(2, NINE + 7 * DAY)
    assert found(tables, 1, "a", batch_index=0).progress[0].next == Occurrence(1, NINE)
    assert Schedules(tables.settings, TOPIC).find(MessageRef(7, 1)) is None  # which of them?
    assert Schedules(tables.settings, TOPIC).find(MessageRef(8, 1)) is None


def test_the_view_says_what_the_listing_says(tables: ScheduleTables) -> None:
    tables.came(0)
    tables.came(1, timeZone="Europe/Berlin", repeatTimes="3", repeatUntil=str(NINE + 9 * DAY), misfire="all")
    tables.delivered("a", 1, 1, NINE)
    tables.waits("a", 1, 2, NINE + DAY, sequence=5)
    tables.commanded("SKIP_NEXT", "b", 1, sequence=6, occurrence=1, deliver_at=NINE)
    tables.waits("b", 1, 2, NINE + DAY // 2, sequence=6, by_rule=NINE + DAY)
    tables.came(2, batch_index=0, batch_size=2)
    tables.came(2, batch_index=1, batch_size=2, repeatTimes="1")
    for name in "ab":
        tables.delivered(name, 2, 1, NINE, batch_index=1)
    tables.came(3)
    tables.commanded("CANCEL", "a", 3, sequence=7)
    tables.waits("b", 3, 1, HELD_DELIVER_AT, sequence=8, by_rule=NINE)
    tables.moved("b", 3, HELD_DELIVER_AT, sequence=8)
    rows = Warehouse(tables.settings).sql("SELECT * FROM schedules ORDER BY entry_id, batch_index, subscription")
    of_view, listed = rows.to_pylist(), Schedules(tables.settings, TOPIC).page(9, with_ended=True).schedules
    of_listing = [
        {
            **{"topic": TOPIC, "partition": -1, "ledger_id": 7, "entry_id": schedule.ref.entry_id},
            **{"batch_index": schedule.ref.batch_index, "subscription": one.subscription, "state": str(one.state)},
            **{"repeat": schedule.rule.repeat, "time_zone": schedule.rule.time_zone, "times": schedule.rule.times},
            **{"until_time": schedule.rule.until_millis, "misfire": str(schedule.rule.misfire)},
            **{"first_at": NINE, "delivered": one.delivered, "key": schedule.key, "schedule_key": None},
            "last_occurrence": one.last and one.last.number,
            "last_at": one.last and one.last.at,
            "next_occurrence": one.next.number if one.next and one.is_active else None,
            "next_at": one.to_json()["nextDeliverAt"] if one.is_active else None,
            **{"publish_time": PUBLISHED, "producer_name": "p", "payload": None},
        }
        for schedule in listed
        for one in schedule.progress
    ]
    assert of_view == of_listing


def test_a_schedule_without_a_next_occurrence_waits_for_it_a_minute(tables: ScheduleTables) -> None:
    at = time.time_ns() // 1_000_000
    tables.came(1, repeatUntil=str(NINE + 1))
    for subscription, ago in (("a", 50_000), ("b", 70_000)):
        tables.delivered(subscription, 1, 1, at - ago)
    sql = "SELECT subscription, state, next_at FROM schedules ORDER BY subscription"
    rows = [tuple(row.values()) for row in Warehouse(tables.settings).sql(sql).to_pylist()]
    assert rows == [("a", "waiting", None), ("b", "ended", None)]

    # While the job is down no next occurrence can come.
    job = {"state": "stopped", "updated_at": at, "started_at": at - 90_000, "last_batch_at": at - 65_000}
    (Path(local_path(tables.settings.warehouse)) / STATUS_FILE).write_text(json.dumps(job))
    states = Warehouse(tables.settings).sql("SELECT DISTINCT state FROM schedules")["state"].to_pylist()
    assert states == ["waiting"]


def test_the_view_has_one_row_although_the_last_occurrence_is_not_written_down_yet(tables: ScheduleTables) -> None:
    tables.came(1)
    tables.waits("a", 1, 2, NINE + DAY, sequence=5)
    rows = Warehouse(tables.settings).sql("SELECT next_occurrence AS n FROM schedules ORDER BY subscription")
    assert rows["n"].to_pylist() == [1, 1]


def test_live_schedules_are_counted_for_each_subscription(tables: ScheduleTables) -> None:
    assert live_schedules(tables.settings.model_copy(update={"warehouse": "file:/none"}), NINE) == NONE_LIVE
    assert live_schedules(tables.settings, NINE) == NONE_LIVE
    tables.came(1)
    tables.came(2, batch_index=0, batch_size=2)
    tables.came(2, batch_index=1, batch_size=2)
    assert live_schedules(tables.settings, NINE) == {(TOPIC, "a"): 3, (TOPIC, "b"): 3}
    # Its first occurrence is over: the second one is in the index, or has just been delivered, too.
    tables.waits("a", 1, 2, NINE + DAY, sequence=5)
    tables.delivered("b", 1, 2, NINE + 1_000)
    assert live_schedules(tables.settings, NINE + 2_000) == {(TOPIC, "a"): 1, (TOPIC, "b"): 1}
    assert live_schedules(tables.settings, NINE + 62_000) == {(TOPIC, "a"): 1, (TOPIC, "b"): 0}
    tables.commanded("CANCEL", "a", 1, sequence=6)
    tables.commanded("SKIP", "a", 2, sequence=7)
    assert live_schedules(tables.settings, NINE) == {(TOPIC, "a"): 0, (TOPIC, "b"): 3}
    tables.commanded("RESTORE", "a", 1, sequence=8)
    assert live_schedules(tables.settings, NINE) == {(TOPIC, "a"): 1, (TOPIC, "b"): 3}


def test_a_schedule_that_went_on_while_its_subscription_was_out_of_the_settings_is_not_live(
    tables: ScheduleTables,
) -> None:
    for entry in (1, 2):
        tables.came(entry, repeat="@every 2s")
        for name in ("a", "b"):
            tables.delivered(name, entry, 1, NINE)
    tables.waits("a", 2, 2, NINE + DAY, sequence=5)
    changes = (("REMOVED", NINE + 1_000), ("ADDED", NINE + 9_000))
    for tick, (change, at) in enumerate(changes):
        changed = {"handed_out": at, "positions": {"-1": "7:9"}, "subscriptions": {"a": change, "b": "KEPT"}}
        write_changes(tables.tables, {TOPIC: changed}, tick, at, f"w{tick}")
    assert found(tables, 1, "a").progress[0].state is ScheduleState.ENDED
    assert live_schedules(tables.settings, NINE + 10_000) == {(TOPIC, "a"): 1, (TOPIC, "b"): 2}
    # What comes when it is back is its again, however late.
    tables.came(10, repeat="@every 2s")
    for entry, at in ((3, NINE + 10_000), (10, NINE)):
        tables.delivered("a", entry, 1, at)
    assert live_schedules(tables.settings, NINE + 11_000) == {(TOPIC, "a"): 3, (TOPIC, "b"): 2}


def test_what_can_t_be_asked_is_told(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path / "some")
    with pytest.raises(UnknownTopicError):
        Schedules(tables.settings, "persistent://public/default/other")
    with pytest.raises(UnknownTopicError):
        Schedules(tables.settings, TOPIC, "nobody")
    with pytest.raises(NoTablesError):
        Schedules(tables.settings.model_copy(update={"warehouse": str(tmp_path / "none")}), TOPIC)
