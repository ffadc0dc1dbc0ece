"""Tables of messages: their order, and what is asked of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import batches, messages, positions
from tracker.messages import MESSAGES, ORDER, concat, in_order, int64, is_rejected, where
from tracker.packing import pack, unpack

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(-1, 3), st.just(4), st.integers(0, 4)), max_size=12
)


@settings(max_examples=examples(100), deadline=None)
@given(ROWS, st.integers(0, 12))
def test_in_order_sorts_by_time_then_position(rows: list[tuple[int, int, int, int, int]], cut: int) -> None:
    table = concat([batches(rows[:cut]), batches(rows[cut:])])
    ordered = in_order(table)
    assert ordered.equals(table.sort_by(ORDER))
    assert in_order(ordered).equals(ordered)
    assert all(ordered[name].num_chunks <= 1 for name in ordered.column_names)


def test_concat_passes_over_what_is_empty() -> None:
    one = messages([(1, 1, 1)])
    assert concat([]).equals(MESSAGES.empty_table())
    assert concat([MESSAGES.empty_table()]).schema == MESSAGES
    assert concat([MESSAGES.empty_table(), one]) is one
    assert positions(concat(iter([one, one]))) == [(1, 1), (1, 1)]


def test_columns_that_an_earlier_release_did_not_pack_are_null() -> None:
    rows = messages([(1, 1, 10)], key="k", schema_version=b"\0" * 8)
    earlier = unpack(pack(rows.select(MESSAGES.names[:18])))
    assert concat([earlier]).schema == MESSAGES
    both = concat([earlier, rows])
    assert both["key"].to_pylist() == ["k", "k"]
    assert both["schema_version"].to_pylist() == [None, b"\0" * 8]


@pytest.mark.parametrize("mask", [[True, False, True], [True] * 3, [False] * 3])
def test_where_keeps_the_rows_of_the_mask(mask: list[bool]) -> None:
    rows = where(messages([(1, i, 10) for i in range(3)]), np.array(mask))
    assert positions(rows) == [(1, i) for i in range(3) if mask[i]]
    assert rows.schema == MESSAGES
    assert where(MESSAGES.empty_table(), np.zeros(0, np.bool_)).num_rows == 0


def test_int64_reads_any_integer_column_whatever_its_chunks() -> None:
    rows = concat([batches([(1, 1, 2, 3, 10)]), batches([(1, 2, -1, 1, 20)])])
    assert int64(rows, "batch_index").dtype == np.int64
    assert int64(rows, "batch_index").tolist() == [2, -1]
    assert int64(MESSAGES.empty_table(), "deliver_at").tolist() == []


def test_a_row_with_a_reason_is_rejected() -> None:
    rows = concat(messages([(1, 1, 1)], reason=reason) for reason in (None, "bad", ""))
    assert is_rejected(rows).tolist() == [False, True, True]


def test_a_filter_that_finds_no_row_keeps_no_memory_of_the_others() -> None:
    rows = pa.table({"ledger_id": np.arange(100_000), "topic": ["orders"] * 100_000})
    found = where(rows, np.zeros(100_000, np.bool_))
    assert found.schema == rows.schema
    assert found.num_rows == 0
    assert found.get_total_buffer_size() < 100
