"""What is due is handed out, and nothing before: what every tracker of Pulsar's does."""

from __future__ import annotations

import pytest

from tests.parity.conftest import Buckets


def test_messages_come_out_when_due(buckets: Buckets) -> None:
    """A1: out-of-order additions; nothing at 0; one due at 15 is not taken in; in order of time; empty at the end."""
    assert buckets.add((1, 1, 20), (1, 2, 10), (1, 3, 50), (1, 4, 40), (1, 5, 30)) == []
    assert buckets.due(0) == []
    assert buckets.tracker.number_of_delayed_messages == 5
    assert buckets.add((1, 6, 10), cutoff=15) == [(1, 6)]
    assert buckets.due(15) == [(1, 2)]
    assert buckets.due(20) == [(1, 1)]
    assert buckets.tracker.number_of_delayed_messages == 3
    assert buckets.due(60) == [(1, 5), (1, 4), (1, 3)]
    assert buckets.tracker.number_of_delayed_messages == 0
    assert buckets.due(60) == []


def test_what_is_due_up_to_the_cutoff_is_not_taken_in(buckets: Buckets) -> None:
    """A3: with the cutoff at 100, a tick ahead as where Pulsar is not strict, 10, 99 and 100 are due at once."""
    due = buckets.add((1, 1, 10), (2, 2, 99), (3, 3, 100), (4, 4, 101), (5, 5, 200), cutoff=100)
    assert due == [(1, 1), (2, 2), (3, 3)]
    assert buckets.tracker.number_of_delayed_messages == 2


def test_strict_delay_is_never_cut_short(buckets: Buckets) -> None:
    """A4: with the cutoff at 10, as where Pulsar is strict, 9 and 10 are due at once; 11 is kept until then."""
    assert buckets.add((1, 1, 9), (1, 2, 10), (1, 3, 11), cutoff=10) == [(1, 1), (1, 2)]
    assert buckets.due(10) == []
    assert buckets.due(11) == [(1, 3)]


@pytest.mark.parametrize("cutoff", [999, 1000, 1999])
def test_a_message_does_not_wait_for_the_next_full_tick(buckets: Buckets, cutoff: int) -> None:
    """A5-A7: what decides is the cutoff alone, at any millisecond, whatever was asked before it."""
    buckets.add((1, 1, 1000), (1, 2, 2000))
    assert buckets.due(500) == []
    assert buckets.due(cutoff) == ([(1, 1)] if cutoff >= 1000 else [])
    assert buckets.due(2000)[-1] == (1, 2)
