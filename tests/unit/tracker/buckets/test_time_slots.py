"""What is due soon, by time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import messages, positions
from tracker.buckets.time_slots import SLOT_MILLIS, TimeSlots
from tracker.messages import MESSAGES
from tracker.store import MemoryStore


def test_what_is_due_comes_in_order_whatever_the_order_it_came_in() -> None:
    slots = TimeSlots(MemoryStore())
    slots.add_rows(messages([(1, 1, 950), (1, 2, 10), (1, 3, 450), (1, 4, 15)]))
    slots.add_rows(messages([(1, 5, 12), (1, 6, 449), (0, 7, 10)]))
    assert len(slots) == 7
    assert positions(slots.take_due(449)) == [(0, 7), (1, 2), (1, 5), (1, 4), (1, 6)]
    assert positions(slots.take_due(10_000)) == [(1, 3), (1, 1)]
    assert len(slots) == 0


@pytest.mark.parametrize("cutoff", [2 * SLOT_MILLIS - 1, 2 * SLOT_MILLIS, 2 * SLOT_MILLIS + 1, 3 * SLOT_MILLIS - 1])
def test_the_cutoff_is_exact_at_the_edges_of_a_slot(cutoff: int) -> None:
    times = [2 * SLOT_MILLIS + d for d in (-1, 0, 1, SLOT_MILLIS - 1, SLOT_MILLIS)]
    slots = TimeSlots(MemoryStore())
    slots.add_rows(messages([(1, i, t) for i, t in enumerate(times)]))
    assert positions(slots.take_due(cutoff)) == [(1, i) for i, t in enumerate(times) if t <= cutoff]
    assert len(slots) == sum(t > cutoff for t in times)


def test_the_earliest_time_is_the_start_of_the_first_slot() -> None:
    slots = TimeSlots(MemoryStore())
    assert slots.earliest is None
    slots.add_rows(messages([(1, 1, 3 * SLOT_MILLIS + 7), (1, 2, 9 * SLOT_MILLIS)]))
    assert slots.earliest == 3 * SLOT_MILLIS


def test_a_whole_slot_is_read_and_removed_and_nothing_is_written() -> None:
    store = MemoryStore()
    slots = TimeSlots(store)
    slots.add_rows(messages([(1, 1, 10), (1, 2, SLOT_MILLIS - 1), (1, 3, SLOT_MILLIS)]))
    store.put = None  # type: ignore[method-assign, assignment]
    assert slots.take_due(SLOT_MILLIS - 1).num_rows == 2
    assert list(store.values) == [("slots", (1, 0))]


def test_nothing_is_kept_for_nothing() -> None:
    store = MemoryStore()
    slots = TimeSlots(store)
    slots.add_rows(MESSAGES.empty_table())
    assert slots.take_due(10**9).schema == MESSAGES
    slots.add_rows(messages([(1, 1, 10), (1, 2, 900)]))
    assert positions(slots.take_due(10**9)) == [(1, 1), (1, 2)]
    assert (len(slots), slots.earliest, slots.meta, store.values) == (0, None, {}, {})


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.one_of(st.lists(st.integers(0, 5 * SLOT_MILLIS), max_size=6), st.integers(0, 6 * SLOT_MILLIS)), max_size=12
    )
)
def test_slots_against_a_sorted_list(steps: list[list[int] | int]) -> None:
    """Each step adds messages or takes what is due, with another object on the same store."""
    store = MemoryStore()
    meta: dict[int, tuple[int, int]] = {}
    model: list[tuple[int, int]] = []
    entry = 0
    for step in steps:
        slots = TimeSlots(store, dict(meta))
        if isinstance(step, int):
            due = sorted(row for row in model if row[0] <= step)
            assert positions(slots.take_due(step)) == [(1, e) for _, e in due]
            model = [row for row in model if row[0] > step]
        else:
            rows = [(t, entry + i) for i, t in enumerate(step)]
            slots.add_rows(messages([(1, e, t) for t, e in rows]))
            model += rows
            entry += len(rows)
        meta = slots.meta
        assert len(slots) == len(model)
        assert slots.earliest == (min(model)[0] // SLOT_MILLIS * SLOT_MILLIS if model else None)
        assert len(store.values) == sum(chunks for chunks, _ in meta.values())
