"""Group A: what every tracker of Pulsar's does."""

from __future__ import annotations

import pytest

from tests.parity.conftest import Buckets
from tracker.schedule import cutoff_millis


def test_messages_come_out_when_due_up_to_a_limit(buckets: Buckets) -> None:
    """A1: out-of-order additions; nothing at 0; one due at 15 is not taken in; limits 1, then 3; empty at the end."""
    assert buckets.add((1, 1, 20), (1, 2, 10), (1, 3, 50), (1, 4, 40), (1, 5, 30)) == []
    assert not buckets.tracker.has_message_available(0)
    assert buckets.tracker.number_of_delayed_messages == 5
    assert buckets.add((1, 6, 10), cutoff=15) == [(1, 6)]
    assert buckets.due(15) == [(1, 2)]
    assert buckets.due(60, 1) == [(1, 1)]
    assert buckets.tracker.number_of_delayed_messages == 3
    assert buckets.due(60, 3) == [(1, 5), (1, 4), (1, 3)]
    assert buckets.tracker.number_of_delayed_messages == 0
    assert buckets.due(60) == []
    assert not buckets.tracker.has_message_available(60)


def test_within_a_tick_counts_as_due_where_not_strict(buckets: Buckets) -> None:
    """A3: with a tick of 100 at 0, 10, 99 and 100 are due at once; 101 and 200 are kept."""
    cutoff = cutoff_millis(0, 100, strict=False)
    due = buckets.add((1, 1, 10), (2, 2, 99), (3, 3, 100), (4, 4, 101), (5, 5, 200), cutoff=cutoff)
    assert due == [(1, 1), (2, 2), (3, 3)]
    assert buckets.tracker.number_of_delayed_messages == 2


def test_strict_delay_is_never_cut_short(buckets: Buckets) -> None:
    """A4: strict at 10, 9 and 10 are due at once; 11 is kept and not available yet."""
    cutoff = cutoff_millis(10, 1000, strict=True)
    assert buckets.add((1, 1, 9), (1, 2, 10), (1, 3, 11), cutoff=cutoff) == [(1, 1), (1, 2)]
    assert not buckets.tracker.has_message_available(cutoff)
    assert buckets.due(cutoff) == []
    assert buckets.due(11) == [(1, 3)]


@pytest.mark.parametrize("cutoff", [999, 1000, 1999])
def test_a_message_does_not_wait_for_the_next_full_tick(buckets: Buckets, cutoff: int) -> None:
    """A5-A7: what decides is the cutoff alone, at any millisecond, whatever was asked before it."""
    buckets.add((1, 1, 1000), (1, 2, 2000))
    assert buckets.due(500) == []
    assert buckets.due(cutoff) == ([(1, 1)] if cutoff >= 1000 else [])
    assert buckets.due(2000)[-1] == (1, 2)
