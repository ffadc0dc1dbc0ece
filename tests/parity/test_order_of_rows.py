"""The order of what is handed out, and of what is in buckets."""

from __future__ import annotations

import itertools

from tests.parity.conftest import Buckets
from tests.support.tracker.messages import batches, messages, positions, times
from tracker.messages import MESSAGES, concat, in_order, int64


def test_rows_are_ordered_by_time_then_ledger_then_entry_then_batch_index() -> None:
    """Q1: whichever order they come in."""
    ordered = [(2, 9, -1, 1, 5), (1, 1, -1, 1, 10), (1, 2, 0, 2, 10), (1, 2, 1, 2, 10), (2, 1, -1, 1, 10)]
    for rows in itertools.permutations(ordered):
        assert in_order(batches(rows)).equals(batches(ordered))


def test_buckets_are_merged_in_order_and_empty_ones_passed_over(buckets: Buckets) -> None:
    """Q2: 58 rows of three buckets and an empty one come sorted."""
    for ledger, n in ((1, 10), (2, 0), (3, 20), (4, 28)):
        buckets.add(*[(ledger, i, 1_000 + (i * 7 + ledger) % 30) for i in range(n)])
        buckets.seal()
    buckets.seal(load_horizon=5_000)
    due = buckets.tracker.get_scheduled_messages(5_000)
    assert due.num_rows == 58
    assert list(zip(times(due), positions(due), strict=True)) == sorted(zip(times(due), positions(due), strict=True))


def test_any_number_of_rows_comes_out_sorted() -> None:
    """Q3: ten, none and one."""
    for n in (10, 0, 1):
        rows = in_order(concat([messages([(1, i, 99 - i * 3 % 7)]) for i in range(n)], MESSAGES))
        assert (int64(rows, "deliver_at")[1:] >= int64(rows, "deliver_at")[:-1]).all()
        assert rows.num_rows == n
