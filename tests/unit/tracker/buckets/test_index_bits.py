"""Which positions are known, and until when."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tracker.buckets.index_bits import MAX_ENTRY_ID, IndexBits, by_ledger
from tracker.store import Key, MemoryStore

Positions = Iterable[tuple[int, int]]


def columns(positions: Positions) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(list(positions), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def add(bits: IndexBits, *rows: tuple[int, int, int]) -> None:
    """Rows of (ledger, entry, deliver_at)."""
    bits.add_entries(*columns([row[:2] for row in rows]), np.array([row[2] for row in rows], dtype=np.int64))


def known(bits: IndexBits, *positions: tuple[int, int]) -> list[bool]:
    found: list[bool] = bits.contains(*columns(positions)).tolist()
    return found


class NotingStore(MemoryStore):
    """Notes the ledgers whose bits are read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def get(self, table: str, key: Key) -> bytes | None:
        if table == "index_bits":
            self.calls.append(("get", key[0]))
        return super().get(table, key)

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        if table == "index_bits":
            self.calls.append(("put", key[0]))
        super().put(table, key, value, files)


def test_what_was_added_is_known_and_nothing_else() -> None:
    bits = IndexBits(MemoryStore())
    add(bits, (1, 0, 10), (1, MAX_ENTRY_ID, 10), (2, 5, 10))
    assert known(bits, (1, 0), (1, 5), (2, 5), (1, MAX_ENTRY_ID), (2, 0), (3, 0)) == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert known(bits) == []


def test_known_positions_are_in_the_store() -> None:
    store = MemoryStore()
    add(IndexBits(store), (1, 5, 10), (2, 6, 20))
    again = IndexBits(store)
    assert known(again, (1, 5), (2, 6), (2, 5)) == [True, True, False]
    again.drop_expired(10)
    assert known(IndexBits(store), (1, 5), (2, 6)) == [False, True]


def test_a_ledger_is_forgotten_when_the_last_of_it_has_been_due() -> None:
    """And not by what came last: an earlier time does not shorten it."""
    store = MemoryStore()
    bits = IndexBits(store)
    add(bits, (1, 1, 30), (1, 2, 10))
    add(bits, (1, 3, 20))
    bits.drop_expired(29)
    assert known(bits, (1, 1), (1, 2), (1, 3)) == [True] * 3
    bits.drop_expired(30)
    assert known(bits, (1, 1), (1, 2), (1, 3)) == [False] * 3
    assert not [key for key in store.values if key[0] == "index_bits"]
    add(bits, (1, 2, 50))
    assert known(bits, (1, 1), (1, 2)) == [False, True]


def test_only_the_ledgers_named_are_read_and_written() -> None:
    store = NotingStore()
    add(IndexBits(store), *[(ledger, 1, 99) for ledger in range(50)])
    store.calls.clear()
    bits = IndexBits(store)
    known(bits, (7, 1), (7, 2))
    add(bits, (7, 2, 99), (8, 2, 99))
    assert sorted(store.calls) == [("get", 7), ("get", 8), ("put", 7), ("put", 8)]


def test_a_run_of_positions_takes_next_to_no_bytes() -> None:
    store = MemoryStore()
    add(IndexBits(store), *[(1, entry, 99) for entry in range(20_000)])
    assert len(store.values["index_bits", (1, 0)]) < 100


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=6),
            st.integers(0, 30),  # a cutoff
        ),
        max_size=12,
    )
)
def test_bits_against_a_dictionary(steps: list[list[tuple[int, int, int]] | int]) -> None:
    store = MemoryStore()
    model: dict[int, tuple[set[int], int]] = {}
    every = [(ledger, entry) for ledger in range(4) for entry in range(7)]
    for step in steps:
        bits = IndexBits(store)
        if isinstance(step, int):
            bits.drop_expired(step)
            model = {ledger: (entries, due) for ledger, (entries, due) in model.items() if due > step}
        else:
            add(bits, *step)
            for ledger, entry, due in step:
                entries, latest = model.get(ledger, (set(), 0))
                model[ledger] = entries | {entry}, max(latest, due)
        expected = [entry in model.get(ledger, (set(), 0))[0] for ledger, entry in every]
        assert known(bits, *every) == known(IndexBits(store), *every) == expected


def test_rows_are_grouped_by_ledger_in_their_order() -> None:
    groups = by_ledger(np.array([5, 1, 5, 1, 9]))
    assert [(ledger, rows.tolist()) for ledger, rows in groups] == [(1, [1, 3]), (5, [0, 2]), (9, [4])]
    assert [(ledger, rows.tolist()) for ledger, rows in by_ledger(np.array([4, 4]))] == [(4, [0, 1])]
    assert by_ledger(np.zeros(0, np.int64)) == []
