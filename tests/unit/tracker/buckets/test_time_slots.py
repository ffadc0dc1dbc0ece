"""What is due soon, by time."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, messages, positions
from tracker.buckets import time_slots
from tracker.buckets.large_rows import Budget, LargeRule
from tracker.buckets.time_slots import SLOT_MILLIS, TimeSlots
from tracker.messages import MESSAGES
from tracker.packing import LARGE_BYTES
from tracker.store import Key, MemoryStore


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


RULE = LargeRule(LARGE_BYTES, is_whole=True)
LARGE = b"x" * LARGE_BYTES


class Counting(MemoryStore):
    """A store that counts what is read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.n_read = self.n_written = 0

    def get(self, table: str, key: Key) -> bytes | None:
        found = super().get(table, key)
        self.n_read += len(found or b"")
        return found

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        self.n_written += len(value)
        super().put(table, key, value, files)


def large(entries: range, due: int, **columns: Any) -> pa.Table:
    """Messages whose payloads Arrow can't compress."""
    return pa.concat_tables(messages([(1, e, due)], payload=os.urandom(1 << 16), **columns) for e in entries)


def test_a_tick_reads_of_many_large_rows_about_those_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as many as fit: each is written once, and read once, whatever waits behind it."""
    monkeypatch.setattr(time_slots, "_PILE_BYTES", 3 << 16)
    store = Counting()
    slots = TimeSlots(store)
    slots.begin_tick(RULE)
    for i in range(10):
        slots.add_rows(large(range(10 * i, 10 * i + 10), 50))
    slots.add_rows(messages([(2, 0, 50)], payload=b"small"))
    total = slots.large_bytes
    assert total == 100 << 16
    taken: list[tuple[int, int]] = []
    for _ in range(10):
        some = positions(slots.take_due(1_000, Budget(10 * 66_000, RULE.are_large)))
        assert len(some) <= 12
        taken += some
        assert len(slots) == 101 - len(taken)
    assert sorted(taken) == [*((1, e) for e in range(100)), (2, 0)]
    assert [position for position in taken if position[0] == 1] == [(1, e) for e in range(100)], "in order"
    assert store.n_read < 1.5 * total
    assert store.n_written < 1.5 * total
    assert (slots.piles, slots.meta, store.values) == ({}, {}, {})


def test_rows_that_are_not_large_any_more_do_not_wait_for_room() -> None:
    """The settings have the topic's messages in order now: so all that is due goes out together."""
    slots = TimeSlots(MemoryStore())
    slots.begin_tick(RULE)
    slots.add_rows(large(range(10), 50))
    now = RULE._replace(in_order=(TOPIC,))
    again = TimeSlots(slots._store, slots.meta, slots.large, slots.piles, slots.pile_rule)
    again.begin_tick(now)
    assert len(positions(again.take_due(1_000, Budget(1, now.are_large)))) == 10


def test_a_cutoff_within_a_slot_leaves_its_later_large_rows() -> None:
    slots = TimeSlots(MemoryStore())
    slots.begin_tick(RULE)
    slots.add_rows(pa.concat_tables([large(range(i, i + 1), 10 * i) for i in range(10)]))
    assert positions(slots.take_due(45, Budget(3 * 66_000, RULE.are_large))) == [(1, 0), (1, 1), (1, 2)]
    assert positions(slots.take_due(45)) == [(1, 3), (1, 4)]
    assert len(slots) == 5
    assert sum(rows.num_rows for rows in slots.find_rows([50])) == 5
    assert positions(slots.take_due(SLOT_MILLIS)) == [(1, e) for e in range(5, 10)]


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 3 * SLOT_MILLIS), st.booleans()), max_size=6),
            st.tuples(st.integers(0, 4 * SLOT_MILLIS), st.integers(0, 4)),
        ),
        max_size=10,
    )
)
def test_large_and_small_rows_against_a_sorted_list(steps: list[Any]) -> None:
    """Each step adds messages or takes what is due and fits, with another object on the same store."""
    store = MemoryStore()
    saved: tuple[Any, ...] = ({}, {}, {}, None)
    model: dict[int, tuple[int, bool]] = {}
    entry = 0
    for step in steps:
        slots = TimeSlots(store, *saved)
        slots.begin_tick(RULE)
        if isinstance(step, tuple):
            cutoff, fit = step
            budget = Budget(fit * LARGE_BYTES, RULE.are_large)
            found = [e for _, e in positions(slots.take_due(cutoff, budget))]
            due = {e for e, (time, _) in model.items() if time <= cutoff}
            assert {e for e in due if not model[e][1]} <= set(found) <= due, "all small ones, and nothing early"
            n_large = sum(model[e][1] for e in found)
            assert n_large >= min(fit, sum(model[e][1] for e in due)) or not fit
            assert n_large <= fit + 1
            assert found == sorted(found, key=lambda e: (model[e][0], e))
            for e in found:
                del model[e]
        elif step:
            rows = [
                messages([(1, entry + i, time)], payload=LARGE if is_large else b"s")
                for i, (time, is_large) in enumerate(step)
            ]
            slots.add_rows(pa.concat_tables(rows))
            model |= {entry + i: one for i, one in enumerate(step)}
            entry += len(step)
        assert len(slots) == len(model)
        assert slots.large_bytes == LARGE_BYTES * sum(is_large for _, is_large in model.values())
        saved = (slots.meta, slots.large, slots.piles, slots.pile_rule)
