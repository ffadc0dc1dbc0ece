"""What the pages show of tables that hold it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from admin.dashboard.data import changes_log, outcomes_of, refusals, storage
from admin.dashboard.message import history_of, message_of, standings
from admin.security.refusals import TABLE as REFUSED
from broker.entries.message_ids import MessageRef
from conf.settings import Route, Settings
from tests.support.warehouse.tables import NOW, TOPIC, rows
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import merge
from warehouse.maintenance.table_files import TableFiles, new_run
from warehouse.queries.listing import time_as_it_came
from warehouse.schemas import REFUSALS

PUBLISHED, HOUR = NOW - 100_000_000, 3_600_000


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(str(tmp_path))
    made.create()
    return made


def delay(due: int, **given: Any) -> dict[str, Any]:
    at = {"ledger_id": 1, "entry_id": 2, "operation": "DELAY", "deliver_at": due, "publish_time": PUBLISHED}
    return {**at, "properties": [("deliverAt", str(NOW))], **given}


def held(sequence: int) -> dict[str, Any]:
    return delay(HELD_DELIVER_AT, sequence=sequence, subscription="a")


def rescheduled(sequence: int, due: int, applied_at: int) -> dict[str, Any]:
    outcome = {"operation": "RESCHEDULE", "result": "APPLIED", "subscription": "a", "sequence": sequence}
    return {"ledger_id": 1, "entry_id": 2, "deliver_at": due, "applied_at": applied_at, **outcome}


@pytest.mark.parametrize(
    ("index", "outcomes", "held_at"),
    [
        ([delay(NOW), held(5)], [], [NOW]),
        ([held(5)], [], [NOW]),  # came in too late to be sealed before
        ([delay(NOW), delay(NOW + HOUR, sequence=4, subscription="b"), held(5)], [], [NOW]),
        ([delay(NOW), held(5), delay(NOW + HOUR, sequence=7, subscription="a"), held(9)], [], [NOW, NOW + HOUR]),
        ([delay(NOW), held(9)], [rescheduled(4, NOW + HOUR, NOW)], [NOW + HOUR]),
        ([delay(NOW), held(9)], [rescheduled(4, NOW - HOUR, NOW - 7)], [NOW - 7]),  # it was due at once
        ([delay(NOW), held(3)], [rescheduled(4, NOW + HOUR, NOW)], [NOW]),
        ([delay(1, properties=None), {**held(3), "properties": None}], [], [PUBLISHED]),
        ([delay(NOW), {**held(3), "properties": [("deliverAt", "soon")]}], [], [NOW]),  # of an import
    ],
    ids=[
        *("sealed", "not sealed", "moved for another", "twice", "moved", "moved to now", "moved later", "due at once"),
        "no time",
    ],
)
def test_a_message_was_held_back_when_it_came_due(
    tables: Tables,
    tmp_path: Path,
    index: list[dict[str, Any]],
    outcomes: list[dict[str, Any]],
    held_at: list[int],
) -> None:
    tables.append("delayed_index", rows("delayed_index", index), {})
    tables.append("outcomes", rows("outcomes", outcomes), {})
    events = history_of(Settings(warehouse=str(tmp_path)), TOPIC, MessageRef(1, 2))
    assert [(e["at"], e["subscription"]) for e in events if e["what"] == "held back"] == [(at, "a") for at in held_at]


@pytest.fixture
def at_times(tables: Tables, tmp_path: Path) -> tuple[Settings, Route, int]:
    """A message that five subscriptions stand differently to, and a time that is not over."""
    soon = time.time_ns() // 1_000_000 + HOUR
    index = [
        delay(soon, properties=[("deliverAt", str(soon))]),
        delay(HELD_DELIVER_AT, properties=[("deliverAt", str(soon))], sequence=5, subscription="b"),
        delay(soon + HOUR, properties=[("deliverAt", str(soon))], sequence=9, subscription="c"),
    ]
    moved = {"operation": "MOVE", "deliver_at": soon, "ledger_id": 1, "entry_id": 2}
    cancelled = {"operation": "CANCEL", "deliver_at": soon, "ledger_id": 1, "entry_id": 2, "subscription": "d"}
    index += [{**moved, "sequence": i, "subscription": name} for i, name in ((5, "b"), (9, "c"), (3, "e"))]
    tables.append("delayed_index", rows("delayed_index", [*index, {**cancelled, "sequence": 7}]), {})
    over = {"ledger_id": 1, "entry_id": 2, "subscription": "e", "deliver_at": NOW, "sent_at": NOW}
    tables.append("deliveries", rows("deliveries", [over]), {})
    routes = [{"source": TOPIC, "subscriptions": [{"name": name} for name in "abcde"]}]
    settings = Settings.model_validate({"warehouse": str(tmp_path), "routes": routes})
    return settings, settings.routes[0], soon


def test_a_message_stands_differently_for_each_subscription(at_times: tuple[Settings, Route, int]) -> None:
    settings, route, soon = at_times
    found = message_of(settings, TOPIC, MessageRef(1, 2))
    assert found is not None
    assert found["deliver_at"] == found["came_due"] == soon
    made = {
        (*one.names,): (one.due, one.is_cancelled, one.cancel_at)
        for one in standings(settings, route, MessageRef(1, 2), found)
    }
    assert made == {
        ("a",): (soon, False, soon),
        ("b",): (HELD_DELIVER_AT, False, soon),
        ("c",): (soon + HOUR, False, soon + HOUR),
        ("d",): (soon, True, soon),
        ("e",): (None, False, soon),
    }


@pytest.mark.parametrize(
    ("properties", "time"),
    [({"deliverAt": "5"}, 5), ({"deliverAfter": "5"}, NOW + 5), ({}, NOW), ({"deliverAt": "soon"}, NOW)],
)
def test_a_cancel_of_what_is_held_back_names_the_time_with_which_it_came(properties: dict[str, str], time: int) -> None:
    """Its own is beyond the year 9999, which a command must not name."""
    assert time_as_it_came(properties, NOW) == time


def test_the_history_tells_retries_and_dead_letters_and_occurrences_apart(tables: Tables, tmp_path: Path) -> None:
    def sent(i: int, destination: str, **given: Any) -> dict[str, Any]:
        at = {"ledger_id": 1, "entry_id": 2, "subscription": "a", "deliver_at": NOW, "sent_at": NOW + i}
        return {**at, "destination": destination, **given}

    own = f"{TOPIC}-b-dlq"
    deliveries = [
        sent(0, "t-a"),
        sent(1, "t-a", attempt=1),
        sent(2, "t-a-dlq", attempt=2),
        sent(3, "x-dlq", occurrence=7),
        sent(4, own, attempt=1, subscription="b"),
    ]
    tables.append("deliveries", rows("deliveries", deliveries), {})
    routes = [{"source": TOPIC, "subscriptions": [{"name": "b", "destination": own}]}]
    settings = Settings.model_validate({"warehouse": str(tmp_path), "routes": routes})
    events = history_of(settings, TOPIC, MessageRef(1, 2))
    assert [(e["what"], e["who"], e["detail"]) for e in events] == [
        ("delivered", "t-a", "0 ms after its time"),
        ("delivered", "t-a", "attempt 1, 1 ms after its time"),
        ("a dead letter", "t-a-dlq", "attempt 2, 2 ms after its time"),
        ("delivered", "x-dlq", "occurrence 7, 3 ms after its time"),
        ("delivered", own, "attempt 1, 4 ms after its time"),
    ]


def test_the_history_tells_of_what_took_a_message_s_place_and_of_what_was_done_to_its_schedule(
    tables: Tables, tmp_path: Path
) -> None:
    yields = {"operation": "CANCEL", "result": "SUPERSEDED", "reason": "yields to 1:9:-1:-1", "issued_by": "delaylake"}
    paused = {"operation": "PAUSE_SCHEDULE", "result": "APPLIED", "issued_by": "me"}
    done = [
        {"ledger_id": 1, "entry_id": 2, "subscription": "a", "applied_at": NOW + i, **one}
        for i, one in enumerate((paused, yields))
    ]
    tables.append("outcomes", rows("outcomes", done), {})
    events = history_of(Settings(warehouse=str(tmp_path)), TOPIC, MessageRef(1, 2))
    assert [(e["what"], e["who"], e["detail"]) for e in events] == [
        ("schedule paused", "me", ""),
        ("superseded", "delaylake", "yields to 1:9:-1:-1"),
    ]


def test_the_last_merge_of_a_table_is_when_its_files_were_merged(tables: Tables, tmp_path: Path) -> None:
    def merged_at() -> int | None:
        [found] = (table for table in storage(Settings(warehouse=str(tmp_path))) if table["name"] == "delayed_index")
        at: int | None = found["merged_at"]
        return at

    for i in range(2):
        tables.append("delayed_index", rows("delayed_index", [delay(NOW + i)]), {})
    assert merged_at() is None
    files = TableFiles(tables, "delayed_index")
    # Retention writes a file without the rows that nobody needs.
    files.replace(
        files.all()[:1],
        [files.folder.write(files.folder.read(files.all()[0].path), new_run(), changes_data=True)],
        True,
    )
    assert merged_at() is None
    files.update()
    began = time.time_ns() // 1_000_000
    assert merge(files, files.all())
    assert began <= (merged_at() or 0) <= time.time_ns() // 1_000_000


def test_what_one_call_did_alike_is_one_line_of_the_log_and_is_opened_to_its_messages(
    tables: Tables, tmp_path: Path
) -> None:
    settings = Settings(warehouse=str(tmp_path))
    same: dict[str, Any] = {"operation": "SKIP", "subscription": "a", "issued_by": "ops", "batch_index": -1}
    applied = [
        {**same, "request_id": f"bulk.{i // 3}", "result": "APPLIED", "entry_id": i, "sequence": i, "applied_at": 5 + i}
        for i in range(6)
    ]
    late = {**same, "request_id": "bulk.1", "result": "TOO_LATE", "reason": "released", "entry_id": 9, "sequence": 9}
    one = {**same, "request_id": "alone", "result": "APPLIED", "entry_id": 7, "sequence": 20, "applied_at": 20}
    tables.append("outcomes", rows("outcomes", [*applied, {**late, "applied_at": 10}, one]), {})

    def lines(**asked: str) -> list[tuple[str, str, int]]:
        return [(r["request"], r["result"], r["n"]) for r in changes_log(settings, [TOPIC], asked, 10, 100)]

    assert lines()[0] == ("alone", "APPLIED", 1), "the newest is the first"
    assert sorted(lines(request_id="bulk")) == sorted(lines()[1:]) == [("bulk", "APPLIED", 6), ("bulk", "TOO_LATE", 1)]
    assert lines(request_id="bulk.0") == [("bulk", "APPLIED", 3)]
    assert lines(result="TOO_LATE", request_id="alone") == []
    assert [r["entry_id"] for r in outcomes_of(settings, [TOPIC], "bulk", "APPLIED", "a", 10)] == [*range(6)]
    assert outcomes_of(settings, [TOPIC], "bulk", "APPLIED", "b", 10) == []
    assert changes_log(settings, ["persistent://public/default/other"], {}, 10, 100) == []
    cut = {(r["request"], r["n"], r["is_cut"]) for r in changes_log(settings, [TOPIC], {"result": "APPLIED"}, 10, 4)}
    assert cut == {("alone", 1, False), ("bulk", 3, True)}
    assert not any(r["is_cut"] for r in changes_log(settings, [TOPIC], {}, 10, 100))
    # Answers to messages may be many: who asks for them sees them.
    answer = {**one, "operation": "SCHEDULE", "subscription": None, "request_id": "scheduled-message-r@t"}
    tables.append("outcomes", rows("outcomes", [{**answer, "applied_at": 30}]), {})
    assert lines()[0] == ("alone", "APPLIED", 1)
    shown = [("scheduled-message-r@t", "APPLIED", 1)]
    assert lines(operation="SCHEDULE") == lines(request_id="scheduled-message-r@t") == shown


def test_who_may_see_no_topic_sees_none(tables: Tables) -> None:
    tables.create({REFUSED: REFUSALS})
    settings = Settings(warehouse=tables.warehouse)
    assert changes_log(settings, [], {}, 10, 10) == []
    assert outcomes_of(settings, [], "r", "APPLIED", "", 10) == []
    assert refusals(settings, [], False, 10) == []
