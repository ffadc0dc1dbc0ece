"""A step of the machine's clock: what is one, and where it is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from status.metrics import JobCollector
from status.status_writer import ClockSteps, StatusWriter

HOUR = 3_600_000


class Machine:
    def __init__(self) -> None:
        self.millis, self.seconds = 1_700_000_000_000, 77.0
        self.reading = 0.0  # how long it takes to read a clock
        self.steps = ClockSteps(lambda: self.millis, self.monotonic)

    def monotonic(self) -> float:
        self.seconds += self.reading
        self.millis += round(self.reading * 1000)
        return self.seconds

    def later(self, seconds: float, step_millis: int = 0) -> int:
        self.seconds += seconds
        self.millis += round(seconds * 1000) + step_millis
        return self.steps.look()


def test_a_step_is_told_once_and_time_that_passes_is_none() -> None:
    machine = Machine()
    assert machine.later(0) == 0
    assert machine.later(1) == 0
    assert machine.later(1, HOUR) == HOUR
    assert machine.later(1) == 0
    assert machine.later(1, -HOUR) == -HOUR
    assert machine.later(3_600) == 0


def test_a_clock_that_is_slewed_or_a_process_that_was_held_up_in_between_is_no_step() -> None:
    machine = Machine()
    machine.later(0)
    assert [machine.later(1, -1) for _ in range(2_000)] == [0] * 2_000
    machine.reading = 2.0
    assert machine.later(1) == 0
    machine.reading = 0.0
    assert machine.later(1) == 0


def test_a_step_is_logged_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    writer = StatusWriter(f"file:{tmp_path}", 1, steps=machine.steps)
    machine.steps.look()
    for step in (HOUR, -HOUR, 0):
        machine.seconds += 1
        machine.millis += 1_000 + step
        with caplog.at_level(logging.WARNING):
            writer.look_at_clock()
    assert [record.getMessage() for record in caplog.records] == [
        "the machine's clock was set ahead by 3,600.0 s, or the machine slept",
        "the machine's clock was set back by 3,600.0 s",
    ]
    registry = CollectorRegistry()
    registry.register(JobCollector(writer.status))
    assert b"delaylake_clock_steps_total 2.0" in generate_latest(registry)
