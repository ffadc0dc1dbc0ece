"""Schedules that were cancelled, and are restored when maintenance has run, and then the checkpoint is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service.one_shard import NOW, SECOND, Service, recurring
from tests.support.tracker.messages import batches
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESTORE, RESUME_SCHEDULE
from tracker.wire.delaylake_pb2 import Result
from warehouse.maintenance.maintain import maintain

pytestmark = pytest.mark.slow

DAY = 86_400_000
START = NOW + 3 * SECOND


def run(service: Service) -> None:
    for _ in range(8):
        service.step(seals=True)
        service.arrive([True], True)


@pytest.mark.parametrize(
    ("is_paused", "days", "result"),
    [
        (False, 10, Result.APPLIED),
        pytest.param(True, 2, Result.APPLIED, marks=pytest.mark.long),
        pytest.param(True, 10, Result.TOO_LATE, marks=pytest.mark.long),
    ],
)
def test_it_goes_on_after_maintenance_and_is_paused_still_while_it_is_retained(
    tmp_path: Path, is_paused: bool, days: int, result: int
) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, START, "@every 30d"))
    run(service)
    if is_paused:
        assert service.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    assert service.order(CANCEL, 0, (0, 1), START) == [Result.APPLIED] * 2
    run(service)
    service.now += days * DAY
    service.step(batches([(1, 9, -1, 1, service.now + 5 * SECOND)]))  # the last durable entry is kept anyway
    run(service)
    for _ in range(4):
        maintain(service.settings, now=service.now)
    assert service.order(RESTORE, 0, (0,)) == [result]
    run(service)
    maintain(service.settings, now=service.now)
    service.lose_checkpoint()
    run(service)
    if is_paused and result == Result.APPLIED:
        service.now = START + 30 * DAY
        run(service)
        assert service.numbers("a", 0) == [1], "it is paused still"
        assert service.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
        run(service)
    for n in (1, 2):
        service.now = START + n * 30 * DAY - 5 * SECOND
        run(service)
    assert service.numbers("a", 0) == ([1, 2, 3] if result == Result.APPLIED else [1])
    assert service.numbers("b", 0) == [1]
