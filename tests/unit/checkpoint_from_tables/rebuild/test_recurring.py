"""Recurring messages and lost checkpoints: what is in flight is neither lost nor doubled, and numbers go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_from_tables.rebuild.done_occurrences import Done
from checkpoint_from_tables.rebuild.recurring.schedules import next_number
from tests.support.service.one_shard import (
    NOW,
    SECOND,
    Service,
    audit_of_tables,
    recurring,
    run_audit_of_tables,
)
from tests.support.tracker.messages import batches
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESUME_SCHEDULE, SKIP, SKIP_NEXT
from tracker.messages import concat
from tracker.wire.delaylake_pb2 import Result
from warehouse.maintenance.retention import LAST_OCCURRENCES_MILLIS
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("done", "first_due", "number"),
    [
        ({}, 0, 1),
        ({1: 5}, 0, 2),
        ({1: 5, 3: 7}, 0, 2),
        ({2: 5}, 0, 1),
        ({1: 0, 5: 1, 6: LAST_OCCURRENCES_MILLIS + 1, 7: LAST_OCCURRENCES_MILLIS + 2}, 0, 8),
        ({6: LAST_OCCURRENCES_MILLIS + 10, 8: LAST_OCCURRENCES_MILLIS + 20}, 0, 7),
    ],
)
def test_the_first_number_that_is_missing_counts_and_not_what_retention_has_removed(
    done: dict[int, int], first_due: int, number: int
) -> None:
    assert next_number({n: Done(at, at) for n, at in done.items()}, first_due) == number


def test_what_was_skipped_rescheduled_and_has_ended_stays_so_after_a_lost_checkpoint(tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(0, start, "@every 60s"), recurring(1, start, "@every 60s", repeatTimes="1")]))
    service.step(recurring(2, start, "@every 60s"))
    for _ in range(4):
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(SKIP_NEXT, 0, (0, 1)) == [Result.APPLIED] * 2
    assert service.order(RESCHEDULE, 2, (0,), NOW + 20 * SECOND) == [Result.APPLIED]
    assert service.order(CANCEL, 2, (1,), start) == [Result.APPLIED]
    for _ in range(3):
        service.lose_checkpoint()
    for n in range(140):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1, 3]
    assert service.numbers("a", 1) == service.numbers("b", 1) == [1]
    assert service.numbers("b", 2) == [1]
    assert service.numbers("a", 2) == [1, 2, 3]


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("is_sealed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_is_paused_stays_so_after_a_lost_checkpoint_until_it_is_resumed(
    tmp_path: Path, is_durable: bool, is_sealed: bool
) -> None:
    """Paused before the first occurrence, after it, and skipped or cancelled while paused; durable or not."""
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(n, start, "@every 20s", misfire="all") for n in range(3)]))
    service.step(concat([recurring(n, NOW + 40 * SECOND, "@every 20s", misfire="all") for n in (3, 4)]))
    for _ in range(6):
        service.step(seals=is_durable)
        service.arrive([True], True)
    for entry in range(4):
        assert service.order(PAUSE_SCHEDULE, entry, (0,)) == [Result.APPLIED]
    assert service.order(SKIP_NEXT, 1, (0,)) == [Result.APPLIED]
    assert service.order(CANCEL, 2, (0,), start) == [Result.APPLIED]
    service.step(seals=is_sealed)
    assert bool(service.source) is not is_durable
    for _ in range(2):
        service.lose_checkpoint()
    for n in range(60):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    service.lose_checkpoint()
    assert [service.numbers("a", entry) for entry in range(4)] == [[1], [1], [1], []]
    assert service.numbers("a", 4) == service.numbers("b", 4) == service.numbers("b", 3) == [1, 2]
    results = [service.order(RESUME_SCHEDULE, entry, (0,)) for entry in range(4)]
    assert results == [[Result.APPLIED], [Result.APPLIED], [Result.INVALID], [Result.APPLIED]]
    service.lose_checkpoint()
    for n in range(30):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    for entry in range(5):
        b = service.numbers("b", entry)
        assert service.numbers("a", entry) == {1: [b[0], *b[2:]], 2: [1]}.get(entry, b)
    findings = run_audit_of_tables(service)
    assert findings == {}, findings


@pytest.mark.parametrize("misfire", ["once", *(pytest.param(one, marks=pytest.mark.long) for one in ("all", "skip"))])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_resume_and_a_lost_checkpoint_are_as_a_resume(tmp_path: Path, misfire: str, is_lost: bool) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, NOW + 3 * SECOND, "@every 100s", misfire=misfire))
    for _ in range(8):
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    while service.now < NOW + 380 * SECOND:
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    if is_lost:
        service.in_flight = [one for one in service.in_flight if one[1] == "b"]
        service.lose_checkpoint()
    for n in range(10):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    assert service.numbers("a", 0) == {"once": [1, 2], "all": [1, 2, 3, 4], "skip": [1]}[misfire]
    while service.now < NOW + 410 * SECOND:
        service.step(seals=True)
        service.arrive([True], True)
    assert service.numbers("a", 0) == {"once": [1, 2, 3], "all": [1, 2, 3, 4, 5], "skip": [1, 2]}[misfire]


@pytest.mark.parametrize("misfire", ["all", "once"])
def test_nothing_was_missed_before_a_message_was_published_also_for_a_rebuild(tmp_path: Path, misfire: str) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, NOW // SECOND, "@every 20s", misfire=misfire))  # seconds for ms: in 1970
    for n in range(30):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
        if n in (2, 8, 15):
            service.lose_checkpoint()
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1, 2]


def test_a_later_occurrence_stays_rescheduled_or_skipped_although_its_message_comes_in_again(tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(n, start, "@every 20s") for n in range(4)]))
    for _ in range(5):
        service.step()
        service.arrive([True], True)
    assert service.order(RESCHEDULE, 0, (0,), NOW + 35 * SECOND) == [Result.APPLIED]  # due at 23
    assert service.order(RESCHEDULE, 1, (0,), NOW + 15 * SECOND) == [Result.APPLIED]
    assert service.order(SKIP_NEXT, 2, (0,)) == [Result.APPLIED]
    assert service.order(RESCHEDULE, 3, (0,), NOW + 16 * SECOND) == [Result.APPLIED]
    assert service.order(RESCHEDULE, 3, (0,), NOW + 90 * SECOND) == [Result.APPLIED]
    assert service.source
    for _ in range(2):
        service.lose_checkpoint()
    due: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for n in range(80):
        service.step(seals=n % 4 == 0)
        for _, name, row in service.in_flight:
            of = due.setdefault((name, row["entry_id"]), [])
            if (one := (row["occurrence"], (row["deliver_at"] - NOW) // SECOND)) not in of:
                of.append(one)
        service.arrive([True], True)
    assert due["a", 0][:3] == [(2, 35), (3, 43), (4, 63)]
    assert due["a", 1][:3] == [(2, 15), (3, 43), (4, 63)]
    assert due["a", 2][:2] == [(3, 43), (4, 63)]
    assert due["a", 3] == [(2, 90)]
    for entry in range(4):
        assert due["b", entry][:2] == [(2, 23), (3, 43)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_due_while_a_subscription_was_not_there_ends_its_schedule(tmp_path: Path, is_lost: bool) -> None:
    """With the job's own state as after a lost checkpoint."""
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(0, start, "@every 20s"), recurring(1, start, "@every 90s")]))

    def go_on(steps: int) -> None:
        for n in range(steps):
            service.step(seals=n % 4 == 0)
            service.arrive([True], True)

    go_on(8)
    service.remove(1)
    go_on(30)
    service.remove(0)
    go_on(4)
    if is_lost:
        service.lose_checkpoint()
    go_on(60)
    assert service.numbers("a", 0) == [1]
    assert service.numbers("b", 0)[:5] == [1, 2, 3, 4, 5]
    assert service.numbers("a", 1) == service.numbers("b", 1) == [1, 2]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_moved_and_came_due_while_a_subscription_was_not_there_does_not_come(
    tmp_path: Path, is_lost: bool
) -> None:
    """Of messages that do not recur, and of first occurrences."""
    service = Service(tmp_path)
    once = [(1, entry, -1, 1, NOW + 3_600 * SECOND) for entry in (0, 1)]
    service.step(concat([batches(once, publish_time=NOW), recurring(2, NOW + 30 * SECOND, "@every 300s")]))

    def go_on(steps: int) -> None:
        for n in range(steps):
            service.step(seals=n % 4 == 0)
            service.arrive([True], True)

    go_on(8)
    for entry, seconds in ((0, 25), (1, 60), (2, 26)):
        assert service.order(RESCHEDULE, entry, (0, 1), NOW + seconds * SECOND) == [Result.APPLIED] * 2
    go_on(2)
    service.remove(1)
    go_on(20)
    service.remove(0)
    if is_lost:
        service.lose_checkpoint()
    go_on(50)
    assert [entry for entry, _ in service.arrived["a"]] == [1]
    assert [entry for entry, _ in service.arrived["b"]] == [0, 2, 1]
    waiting = Warehouse(service.settings).sql("SELECT subscription, entry_id FROM pending")
    assert waiting.to_pylist() == [{"subscription": "b", "entry_id": 2}]
    findings = run_audit_of_tables(service)
    assert findings == {}, findings


def test_what_was_skipped_and_is_read_again_after_a_lost_checkpoint_is_counted_when_it_is_durable(
    tmp_path: Path,
) -> None:
    """A rebuild removes its rows, and what is past gets none; so until it is durable no table has it."""
    service = Service(tmp_path)
    service.step(batches([(1, 0, -1, 1, NOW + 36 * SECOND)], publish_time=NOW))
    assert service.order(SKIP, 0, (0, 1)) == [Result.APPLIED] * 2
    service.now += 60 * SECOND
    service.lose_checkpoint()
    assert service.source
    counts: list[list[int]] = []
    while service.source and len(counts) < 20:
        audit = audit_of_tables(service)
        assert audit.findings == {}
        counts.append([row["taken_back"] for row in audit.counts])
        service.step(seals=len(counts) % 4 == 0)
        service.arrive([True], True)
    assert counts == [[]] * len(counts)
    assert [row["taken_back"] for row in audit_of_tables(service).counts] == [1, 1]
    assert service.arrived == {"a": [], "b": []}
