"""Cuts of tables by bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.messages import messages
from tracker.buckets import large_rows
from tracker.buckets.large_rows import Budget
from tracker.messages import concat, int64
from tracker.packing import fitting, in_parts, payload_sizes, row_sizes

LARGE = concat([messages([(1, i, 0)], payload=b"x" * size) for i, size in enumerate([500, 9_000, 10, 40_000, 10, 20])])


def test_payloads_have_their_bytes_and_a_row_has_some_more() -> None:
    assert payload_sizes(LARGE).tolist() == [500, 9_000, 10, 40_000, 10, 20]
    assert (row_sizes(LARGE) > payload_sizes(LARGE)).all()
    assert payload_sizes(pa.table({"payload": pa.array([None, b"ab"])})).tolist() == [0, 2]
    assert row_sizes(pa.table({"n": pa.array([1, 2])})).tolist() == [8, 8]


def test_a_table_is_cut_by_bytes_and_by_rows_and_no_row_is_lost() -> None:
    parts = [int64(part, "entry_id").tolist() for part in in_parts(LARGE, 2, 11_000)]
    assert parts == [[0, 1], [2], [3], [4, 5]]
    assert list(in_parts(LARGE.slice(0, 0))) == []


@pytest.mark.parametrize(("most", "n"), [(0, 1), (5, 1), (10, 2), (14, 2), (100, 4)])
def test_as_many_rows_fit_as_have_the_bytes_but_at_least_one(most: int, n: int) -> None:
    assert fitting(np.array([5, 5, 5, 5]), most) == n
    assert fitting(np.array([], np.int64), most) == 0


def test_a_budget_leaves_the_large_rows_that_do_not_fit() -> None:
    budget = Budget(9_000, lambda rows: payload_sizes(rows) >= 100)
    assert budget.fitting(LARGE).tolist() == [True, False, True, False, True, True]
    assert budget.fitting(LARGE).tolist()[0], "one fits while anything is left"
    spent = Budget(0, lambda rows: payload_sizes(rows) >= 100)
    assert spent.fitting(LARGE).tolist() == [False, False, True, False, True, True]


def test_a_release_has_no_more_rows_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_rows, "_RELEASE_ROWS", 8)
    budget = Budget(1 << 30, lambda rows: np.zeros(rows.num_rows, np.bool_))
    assert [int(budget.fitting(LARGE).sum()) for _ in range(3)] == [6, 2, 0]
