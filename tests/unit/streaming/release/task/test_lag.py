"""When a producer is slow: its oldest message waits for too long, and it has taken few others."""

from __future__ import annotations

import time

import pytest

from streaming.release.task.lag import Lag


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def given(limit_seconds: float, ids: list[int]) -> Lag:
    found = Lag(limit_seconds)
    for sequence_id in ids:
        found.note_given(sequence_id)
    return found


def test_one_that_answers_in_time_is_not_slow_and_one_that_takes_few_is(clock: list[float]) -> None:
    ids = list(range(1, 101))
    one = given(2, ids)
    clock[0] += 1.9
    assert not one.why_slow(10, ids, 0)
    clock[0] += 0.2
    assert one.why_slow(10, ids, 0) == "it took 10 messages in 2.1 s, and 90 wait"
    assert not one.why_slow(100, ids, 0)


def test_what_was_given_later_is_counted_from_then(clock: list[float]) -> None:
    ids = [1, 2]
    one = given(2, ids[:1])
    clock[0] += 1.5
    one.note_given(2)
    clock[0] += 1.5
    assert not one.why_slow(1, ids, 0)
    clock[0] += 0.6
    assert one.why_slow(1, ids, 0)


@pytest.mark.parametrize(("n", "n_bytes"), [(20_000, 0), (200, 40_000_000)], ids=["many", "large"])
def test_one_that_takes_much_is_given_more_time(clock: list[float], n: int, n_bytes: int) -> None:
    ids = list(range(1, n + 1))
    one = given(2, ids)
    clock[0] += 3
    assert not one.why_slow(n // 2, ids, n_bytes)
    assert one.why_slow(n // 100, ids, n_bytes)
    clock[0] += 7.5
    assert one.why_slow(n // 2, ids, n_bytes)


def test_without_a_limit_none_is_slow(clock: list[float]) -> None:
    one = given(0, [1])
    clock[0] += 100
    assert not one.why_slow(-1, [1], 0)
