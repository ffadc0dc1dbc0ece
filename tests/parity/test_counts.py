"""What a tick tells of its counts."""

from __future__ import annotations

from tests.parity.clock import Clock
from tests.support.tracker.messages import messages


def test_counts_are_of_the_moment() -> None:
    """X1: the counts that a tick tells are the state after it, not sums over ticks."""
    clock = Clock()
    assert clock.step(0, messages([(1, i, 50_000) for i in range(7)])).status["delayed"] == 7
    assert clock.step(10, messages([(1, 7 + i, 50_000) for i in range(2)])).status["delayed"] == 9
    status = clock.step(20, seals=True).status
    assert (status["delayed"], status["loaded"], status["taken"]) == (9, 0, 0)
