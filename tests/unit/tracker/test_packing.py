"""Tables and columns as bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tracker.messages import messages, positions
from tracker.messages import MESSAGES, concat
from tracker.packing import pack, pack_columns, unpack, unpack_columns


@pytest.mark.parametrize("n", [0, 1, 3, 2_000])
def test_a_table_comes_back_as_it_was(n: int) -> None:
    rows = messages(
        [(2**40, i, 1_000 + i) for i in range(n)],
        key=None,
        ordering_key="o",
        properties=[("deliverAt", "1"), ("", "ü")],
        payload=bytes(range(256)),
        first_index=2**50,
    )
    assert unpack(pack(rows)).equals(rows)
    assert unpack(pack(rows)).schema.equals(MESSAGES)


def test_a_table_of_many_pieces_is_packed_as_one() -> None:
    pieces = [messages([(1, i, i)]) for i in range(50)]
    rows = unpack(pack(concat(pieces)))
    assert rows.equals(concat(pieces))
    assert rows["payload"].num_chunks == 1


def test_nulls_and_empty_values_stay_apart() -> None:
    rows = concat([messages([(1, 1, 1)], key=None, payload=b""), messages([(1, 2, 1)], key="", payload=None)])
    again = unpack(pack(rows))
    assert again["key"].to_pylist() == [None, ""]
    assert again["payload"].to_pylist() == [b"", None]


def test_a_slice_is_packed_without_the_rest() -> None:
    rows = messages([(1, i, i) for i in range(1_000)], payload=b"x" * 100)
    assert len(pack(rows.slice(500, 1))) < 5_000
    assert positions(unpack(pack(rows.slice(500, 1)))) == [(1, 500)]


def test_what_is_large_is_compressed() -> None:
    rows = messages([(1, i, i) for i in range(1_000)], payload=b"x" * 100)
    assert len(pack(rows)) < rows.nbytes / 3


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), min_size=1, max_size=20))
def test_columns_are_unpacked_as_they_were_packed(rows: list[tuple[int, ...]]) -> None:
    values = np.array(rows, np.int64)

    assert unpack_columns(pack_columns(values), 3).tolist() == values.tolist()


def test_bytes_that_are_no_table_are_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid):
        unpack(b"no table")
