"""Occurrences that had been handed out, held back or cancelled, and have not arrived, when the checkpoint is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service.one_shard import NOW, SECOND, Service, recurring, run_audit_of_tables
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP_NEXT
from tracker.wire.delaylake_pb2 import Result

pytestmark = pytest.mark.slow

START = NOW + 6 * SECOND


def handed_out(service: Service) -> list[tuple[int, int]]:
    """What the last tick has handed out to `a`: numbers, and times by the rule, in seconds after START."""
    return [
        (row["occurrence"], ((row["occurrence_at"] or row["deliver_at"]) - START) // SECOND)
        for tick, name, row in service.in_flight
        if name == "a" and tick == service.tick
    ]


def run(
    service: Service, until: int, arrives: bool = True, seals: bool = True, is_written: bool = True
) -> list[tuple[int, int]]:
    """Runs until so many seconds after START; returns what is handed out to `a`."""
    out: list[tuple[int, int]] = []
    n = 0
    while service.now < START + until * SECOND:
        service.step(seals=seals and n % 4 == 0)
        n += 1
        out += handed_out(service)
        service.arrive([arrives], is_written)
    return out


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize(
    ("misfire", "down", "expected"),
    [
        ("once", 0, [(2, 20), (3, 40)]),
        ("once", 90, [(2, 20), (3, 120), (4, 140)]),
        ("all", 90, [(n, n * 20 - 20) for n in range(2, 9)]),
        ("skip", 0, [(2, 20), (3, 40)]),
        ("skip", 90, [(2, 120), (3, 140)]),
    ],
)
def test_what_was_in_flight_is_late_as_if_the_job_had_been_down(
    tmp_path: Path, misfire: str, down: int, expected: list[tuple[int, int]], is_durable: bool
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s", misfire=misfire))
    assert run(service, 5, is_written=is_durable) == [(1, 0)]
    assert run(service, 15, is_written=is_durable) == []
    assert run(service, 25, arrives=False, is_written=is_durable) == [(2, 20)]
    assert bool(service.source) is not is_durable
    service.now += down * SECOND
    service.lose_checkpoint()
    assert [*handed_out(service), *run(service, 50 + down)] == expected


def test_what_was_missed_before_one_came_late_is_not_made_up_for(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s"))
    assert run(service, 5) == [(1, 0)]
    service.now += 67 * SECOND
    service.step(seals=True)
    assert handed_out(service) == [(2, 20)]
    assert run(service, 75, seals=False) == []
    service.lose_checkpoint()
    assert run(service, 85) == [(3, 80)]


@pytest.mark.parametrize(("misfire", "expected"), [("once", [1, 2, 3]), ("all", [1, 2, 3, 4, 5]), ("skip", [1, 2, 3])])
def test_a_schedule_that_is_paused_after_one_came_late_goes_on_at_its_next_time(
    tmp_path: Path, misfire: str, expected: list[int]
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s", misfire=misfire))
    run(service, 5)
    service.now += 62 * SECOND
    service.step(seals=True)
    run(service, 70, seals=False)
    assert service.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    service.lose_checkpoint()
    assert service.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    run(service, 76)
    assert service.numbers("a", 0) == expected[:-1]
    run(service, 85)
    assert service.numbers("a", 0) == expected


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_schedule_whose_last_occurrences_were_handed_out_together_and_that_comes_again_is_not_over(
    tmp_path: Path, is_paused: bool, losses: int
) -> None:
    """It is not durable. For `a` its first occurrence may wait, for `b` nothing is pending."""
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 6s", misfire="all", repeatTimes="5"))
    if is_paused:
        service.pause(0b01, True)
    run(service, 2, seals=False)
    service.now += 60 * SECOND
    service.lose_checkpoint()
    service.step(seals=True)
    out = [row["occurrence"] for tick, name, row in service.in_flight if name == "b" and tick == service.tick - 1]
    assert out == [2, 3, 4, 5]
    assert service.source, "it is not durable"
    for _ in range(losses):
        service.lose_checkpoint()
    service.pause(0b01, False)
    run(service, 80)
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("misfire", ["once", "all", "skip"])
def test_what_was_in_flight_when_its_schedule_was_paused_waits_with_the_others_until_that_is_resumed(
    tmp_path: Path, misfire: str, is_durable: bool
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s", misfire=misfire, repeatTimes="4"))
    run(service, 15, is_written=is_durable)
    assert run(service, 25, arrives=False, is_written=is_durable) == [(2, 20)]
    assert service.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    assert bool(service.source) is not is_durable
    service.lose_checkpoint()
    run(service, 120)
    assert service.numbers("a", 0) == [1]
    assert service.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    run(service, 220)
    assert service.numbers("a", 0) == [1, 2, 3, 4]
    assert run_audit_of_tables(service) == {}


@pytest.mark.parametrize("bits", [(0,), (0, 1)])
def test_what_is_cancelled_is_restored_until_its_time_also_where_no_table_had_its_next_occurrence(
    tmp_path: Path, bits: tuple[int, ...]
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 60s"))
    run(service, 56)
    service.step(seals=True)
    run(service, 62, seals=False)
    assert service.numbers("a", 0) == [1, 2]
    assert not service.source
    assert service.tables.sql("SELECT 1 FROM delayed_index WHERE occurrence = 3").num_rows == 0
    assert service.order(CANCEL, 0, bits, START) == [Result.APPLIED] * len(bits)
    service.lose_checkpoint()
    service.lose_checkpoint()
    assert service.order(RESTORE, 0, (0,)) == [Result.APPLIED]
    run(service, 190)
    assert service.numbers("a", 0) == [1, 2, 3, 4]
    assert service.numbers("b", 0) == ([1, 2] if 1 in bits else [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("misfire", "expected"),
    [("once", [(1, 0), (2, 100)]), ("all", [(n, n * 20 - 20) for n in range(1, 7)]), ("skip", [(1, 100)])],
)
def test_what_was_held_back_and_had_gone_out_again_is_late_as_before(
    tmp_path: Path, misfire: str, expected: list[tuple[int, int]]
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s", misfire=misfire))
    service.pause(0b01, True)
    run(service, 85)
    service.pause(0b01, False)
    service.step(seals=True)
    service.in_flight = []
    service.lose_checkpoint()
    assert [*handed_out(service), *run(service, 105)] == expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_command_moves_its_own_subscription_s_occurrence_where_another_has_got_further(
    tmp_path: Path, ahead: int
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 20s"))
    run(service, 16)
    service.step(seals=True)
    run(service, 22, seals=False)
    for _ in range(2):
        assert service.order(SKIP_NEXT, 0, (ahead,)) == [Result.APPLIED]
    assert service.order(PAUSE_SCHEDULE, 0, (0, 1)) == [Result.APPLIED] * 2
    service.lose_checkpoint()
    for bit in (0, 1):
        assert service.order(RESUME_SCHEDULE, 0, (bit,)) == [Result.APPLIED]
    run(service, 90)
    assert service.numbers("ab"[ahead], 0) == [1, 2, 5]
    assert service.numbers("ab"[1 - ahead], 0) == [1, 2, 3, 4, 5]
