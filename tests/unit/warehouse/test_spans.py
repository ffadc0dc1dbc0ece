"""How what lies in spans of time is spread over it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from warehouse.spans import times_of


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=30),
    st.lists(st.floats(0, 300), max_size=5).map(sorted),
)
def test_before_each_time_there_is_as_much_as_is_wanted(spans: list[tuple[int, int, int]], wanted: list[float]) -> None:
    first, length, size = (np.array(column) for column in zip(*spans, strict=True))
    last = first + length
    found = times_of(1_800_000_000_000 + first, 1_800_000_000_000 + last, size.astype(float), np.array(wanted))
    for time, much in zip(found - 1_800_000_000_000, wanted, strict=True):

        def before(time: int) -> float:
            return float((size * ((time - first) / (length + 1)).clip(0, 1)).sum())

        assert before(time) >= min(much, size.sum()) - 1e-6
        assert before(time - 1) <= much + 1e-6
