"""Each position is handed out once: what is asked of Pulsar's in-memory tracker, of ours."""

from __future__ import annotations

from tests.parity.conftest import Buckets


def test_equal_times_come_out_in_the_order_of_the_ledger(buckets: Buckets) -> None:
    """M5: five messages of one time come in the order 1 to 5."""
    buckets.add(*[(1, entry, 100) for entry in (3, 1, 5, 2, 4)])
    assert buckets.due(100) == [(1, entry) for entry in range(1, 6)]


def test_strict_mode_is_never_early_and_forgets_nothing(buckets: Buckets) -> None:
    """M6: 60400 and 61000: nothing at 60000, each at its time, also after rounds that gave nothing."""
    buckets.add((1, 1, 60_400), (1, 2, 61_000))
    assert [buckets.due(t) for t in (60_000, 60_399, 60_400, 60_401, 60_999, 61_000)] == [
        [],
        [],
        [(1, 1)],
        [],
        [],
        [(1, 2)],
    ]


def test_a_position_is_handed_out_once_however_often_it_is_asked_for(buckets: Buckets) -> None:
    """M7: ten questions give nothing before the time, then it comes exactly once, and is due when added again."""
    buckets.add((1, 1, 60_400))
    assert all(buckets.due(59_000) == [] for _ in range(10))
    assert buckets.due(60_400) == [(1, 1)]
    assert buckets.due(60_400) == []
    assert buckets.add((1, 1, 60_400), cutoff=60_400) == [(1, 1)]


def test_the_same_position_three_times_is_tracked_once(buckets: Buckets) -> None:
    """M9: adding a position again changes nothing."""
    for _ in range(3):
        buckets.add((1, 1, 100))
    assert buckets.tracker.number_of_delayed_messages == 1
    assert buckets.due(100) == [(1, 1)]


def test_part_of_a_slot_leaves_the_rest(buckets: Buckets) -> None:
    """M10: with the cutoff within a time slot what is due by then comes, the rest stay, none twice."""
    buckets.add(*[(1, entry, 100 + entry) for entry in range(10)])
    assert buckets.due(103) == [(1, entry) for entry in range(4)]
    assert buckets.tracker.number_of_delayed_messages == 6
    assert buckets.due(109) == [(1, entry) for entry in range(4, 10)]
