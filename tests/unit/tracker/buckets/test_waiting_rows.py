"""Queues of rows that wait: against lists, taken up again from the store between any two steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tracker.messages import messages
from tracker.buckets import time_slots
from tracker.buckets.time_slots import Queue, WaitingRows
from tracker.store import MemoryStore

A, B = ("t", "a"), ("t", "b")
SLOT = 200


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 12)))))
def test_each_queue_gives_its_rows_in_the_order_in_which_they_came(steps: list[tuple[Queue, int, int | None]]) -> None:
    store, queues, n = MemoryStore(), None, 0
    naive: dict[Queue, list[int]] = {A: [], B: []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_slots, "PIECE_ROWS", 4)
        for queue, n_added, n_taken in steps:
            waiting = WaitingRows(store, queues)
            waiting.add_rows(queue, messages([(1, n + i, SLOT * (n + i)) for i in range(n_added)]))
            naive[queue] += range(n, n + n_added)
            n += n_added
            assert waiting.counts == {key: len(ids) for key, ids in naive.items() if ids}
            assert waiting.earliest == min((SLOT * i for ids in naive.values() for i in ids), default=None)
            expected = naive[queue][:n_taken]
            naive[queue] = naive[queue][len(expected) :]
            taken = waiting.take_rows(lambda other, only=queue, most=n_taken: most if other == only else 0)  # type: ignore[misc]
            assert taken["entry_id"].to_pylist() == expected
            for i in [i for ids in naive.values() for i in ids]:
                assert i in {i for rows in waiting.find_rows([SLOT * i + 1]) for i in rows["entry_id"].to_pylist()}
            assert not waiting.find_rows([SLOT * (n + 1)])
            queues = json.loads(json.dumps(waiting.meta)) if len(waiting) else None
            assert len(waiting) == sum(map(len, naive.values()))


@pytest.mark.slow
def test_what_is_not_taken_is_not_read_or_written_again() -> None:
    store = MemoryStore()
    waiting = WaitingRows(store)
    waiting.add_rows(A, messages([(1, i, 0) for i in range(5 * time_slots.PIECE_ROWS)]))
    packed = {number for number, *_ in waiting.meta["queues"][0][2]}
    assert waiting.take_rows(lambda _: time_slots.PIECE_ROWS + 1).num_rows == time_slots.PIECE_ROWS + 1
    assert len(packed & {number for number, *_ in waiting.meta["queues"][0][2]}) == 3


def test_rows_whose_end_has_come_are_taken_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slots, "PIECE_ROWS", 2)
    monkeypatch.setattr(time_slots, "MOST_ENDED", 3)
    waiting = WaitingRows(MemoryStore())
    for queue in (A, B):
        waiting.add_rows(queue, messages([(1, i, 0) for i in range(5)]), np.array([10, 10, 90, 10, 10]))
    assert [waiting.take_ended(10).num_rows for _ in range(4)] == [3, 3, 2, 0]
    assert waiting.counts == {A: 1, B: 1}
