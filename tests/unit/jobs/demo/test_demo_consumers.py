"""The clock by which the demo's consumers tell when a message came."""

from __future__ import annotations

import pytest

from jobs.demo.consumers import SteadyClock


def test_a_clock_that_is_set_back_goes_on_and_one_that_is_set_forward_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, monotonic = 1_000, 50
    monkeypatch.setattr("time.time_ns", lambda: wall * 1_000_000)
    monkeypatch.setattr("time.monotonic_ns", lambda: monotonic * 1_000_000)
    clock = SteadyClock()
    shown = []
    for change, passed in ((0, 0), (0, 10), (-17, 5), (0, 5), (100, 5)):
        wall, monotonic = wall + change + passed, monotonic + passed
        shown.append(clock.now())
    assert shown == [1_000, 1_010, 1_015, 1_020, 1_108]
