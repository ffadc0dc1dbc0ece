"""The last move of each message: kept in parts, of which only those are written that change."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracker.message_state import changes
from tracker.message_state.changes import HELD_DELIVER_AT, Moved
from tracker.messages import MessageIds
from tracker.store import Key, MemoryStore

_TIMES = st.integers(1, 40) | st.just(HELD_DELIVER_AT)
_MESSAGES = st.tuples(st.integers(0, 12), st.integers(-1, 2))
_MOVES = st.dictionaries(_MESSAGES, st.tuples(_TIMES, _TIMES, st.integers(0, 2)), min_size=1, max_size=12)
_STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(1, 2), _MOVES),
    st.tuples(st.just("drop"), st.integers(0, 45)),
    st.tuples(st.just("save")),
    st.tuples(st.just("find"), st.integers(0, 2), st.lists(_MESSAGES, max_size=3)),
)

_Message = tuple[int, int, int, int]  # subscription, ledger, entry, batch index


def _put(moved: Moved, subscription: int, ledger: int, sequence: int, rows: dict[tuple[int, int], list[int]]) -> None:
    entries, indexes = np.array([*rows], np.int64).T
    times, until, attempts = np.array([*rows.values()], np.int64).T
    n = len(rows)
    ledgers, sequences = np.full(n, ledger), np.full(n, sequence)
    moved.put(subscription, MessageIds(ledgers, entries, indexes), sequences, times, until, attempts)


def _found(moved: Moved, subscription: int, ledger: int, messages: list[tuple[int, int]]) -> list[tuple[object, ...]]:
    entries, indexes = np.array(messages, np.int64).reshape(-1, 2).T
    ids = MessageIds(np.full(len(messages), ledger), entries, indexes)
    retries = moved.are_retries(subscription, ids)
    return list(zip(*(c.tolist() for c in (*moved.find_moves(subscription, ids), retries)), strict=True))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(_STEPS, max_size=25), st.sampled_from([(1, 1), (3, 2), (2_048, 1_536)]))
def test_moves_are_found_as_in_a_dictionary(steps: list[tuple[Any, ...]], sizes: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_MOST_ROWS", sizes[0])
        patch.setattr(changes, "_SPLIT_ROWS", sizes[1])
        store = MemoryStore()
        moved = Moved(store)
        model: dict[_Message, tuple[int, int, int, bool]] = {}
        for sequence, (kind, *arguments) in enumerate(steps, 1):
            if kind == "put":
                subscription, ledger, rows = arguments
                rows = {(entry, max(index, 0)): [*row] for (entry, index), row in rows.items()}
                _put(moved, subscription, ledger, sequence, rows)
                for (entry, index), (time, until, attempt) in rows.items():
                    message = subscription, ledger, entry, index
                    _, *earlier, _ = model.get(message, (0, 0, 0, False))
                    past = max(0 if t == HELD_DELIVER_AT else t for t in (*earlier, until))
                    model[message] = sequence, time, past, attempt > 0
            elif kind == "drop":
                moved.drop_expired(arguments[0])
                kept = {ledger for (_, ledger, _, _), row in model.items() if max(row[1:3]) > arguments[0]}
                model = {message: row for message, row in model.items() if message[1] in kept}
            elif kind == "save":
                moved.save()
                moved = Moved(store)
            else:
                subscription, messages = arguments
                for ledger in (1, 2):
                    wanted = [(subscription, ledger, entry, max(index, 0)) for entry, index in messages]
                    assert _found(moved, subscription, ledger, messages) == [
                        model.get(message, (0, 0, 0, False)) for message in wanted
                    ]
        moved.save()
        moved = Moved(store)
        for subscription, ledger, entry, index in model:
            found = _found(moved, subscription, ledger, [(entry, index)])
            assert found == [model[subscription, ledger, entry, index]]
        moved.drop_expired(HELD_DELIVER_AT)
        moved.save()
        assert {table for table, _ in store.values} <= {"moved_ledgers"}
        assert not Moved(store)


def test_rows_of_an_earlier_version_are_read_and_written_in_parts() -> None:
    store = MemoryStore()
    rows = [[entry << 20, 7, 1_000 + entry, 500] for entry in range(3_000)]
    for subscription, n in ((0, 3_000), (1, 10)):
        store.put("moved", (4, subscription), np.array(rows[:n], np.int64).tobytes())
    store.put("moved_ledgers", (0, 0), np.array([4, 0b11, 3_999], np.int64).tobytes())

    for _ in range(2):
        moved = Moved(store)
        assert _found(moved, 0, 4, [(2_999, -1), (3_000, -1)]) == [(7, 3_999, 500, False), (0, 0, 0, False)]
        moved.save()
    assert ("moved", (4, 0)) not in store.values
    assert ("moved", (4, 1)) in store.values

    moved = Moved(store)
    moved.drop_expired(3_998)
    assert _found(moved, 1, 4, [(9, 0)]) == [(7, 1_009, 500, False)], "the other subscription's are still there"
    moved.drop_expired(3_999)
    moved.save()
    assert [*store.values] == [("moved_ledgers", (0, 0))]


class _CountingStore(MemoryStore):
    n_bytes = 0

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        self.n_bytes += len(value)
        super().put(table, key, value, files)


@pytest.mark.slow
def test_of_many_moves_those_that_change_are_written() -> None:
    store = _CountingStore()
    moved = Moved(store)
    _put(moved, 0, 1, 1, {(entry, 0): [1_790_000_000_000 + entry, 1_780_000_000_000, 0] for entry in range(100_000)})
    moved.save()
    written, store.n_bytes = store.n_bytes, 0

    moved = Moved(store)
    _put(moved, 0, 1, 2, {(entry, 0): [1_790_000_100_000, 0, 0] for entry in range(50_000, 50_100)})
    moved.save()

    assert store.n_bytes < written / 10


def test_every_time_leaves_the_bits_of_the_attempt_free() -> None:
    assert HELD_DELIVER_AT <= changes.TIME_MASK
