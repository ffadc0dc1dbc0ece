"""Rows of which the payloads are in files: what counts for budgets, and what for the size of values."""

from __future__ import annotations

import pyarrow as pa

from tests.support.tracker.messages import messages
from tracker.buckets.large_rows import Budget, LargeRule
from tracker.buckets.time_slots import TimeSlots
from tracker.messages import MESSAGES, concat, int64, with_columns
from tracker.packing import PART_BYTES, in_parts, payload_sizes, row_sizes
from tracker.payload_refs import PayloadRef, files_of, refs_of
from tracker.store import MemoryStore

MB = 1_000_000
RULE = LargeRule(4_096, is_whole=True)


def in_files(n: int, file: str = "7-a", length: int = MB) -> pa.Table:
    refs = [str(PayloadRef(file, i * length, length, 1 << 31)) for i in range(n)]
    rows = messages([(1, i, 5_000) for i in range(n)], payload=None)
    return with_columns(rows, payload_at=pa.array(refs, pa.string()))


def test_a_reference_is_read_as_it_was_written() -> None:
    rows = in_files(3)
    assert refs_of(rows)[2] == PayloadRef("7-a", 2 * MB, MB, 1 << 31)
    assert files_of(rows) == {"7-a": 3 * MB}
    earlier = rows.drop_columns(["payload_at"])
    assert (refs_of(earlier), files_of(earlier), payload_sizes(earlier).sum()) == ({}, {}, 0)


def test_a_payload_in_a_file_counts_for_who_sends_it_and_not_for_who_passes_its_row_on() -> None:
    rows = in_files(100)
    assert payload_sizes(rows).tolist() == [MB] * 100
    assert 100 * MB < row_sizes(rows).sum() < 100 * MB + 100_000
    assert RULE.are_large(rows).all()
    assert Budget(5 * MB + 50_000, RULE.are_large).fitting(rows).sum() == 5
    assert Budget(1, RULE.are_large, 5 * MB + 50_000).fitting(rows).sum() == 5, "by a budget of their own"
    assert row_sizes(rows).sum() > PART_BYTES
    assert [part.num_rows for part in in_parts(rows)] == [100]


def test_a_budget_of_files_keeps_the_order_of_large_rows() -> None:
    """What is in the row itself has its budget, too; whichever is spent first, nothing later goes."""
    held = messages([(2, i, 5_000) for i in range(4)], payload=b"x" * 10_000)
    rows = concat([in_files(2), held.slice(0, 2), in_files(2, "8-b"), held.slice(2), messages([(3, 1, 5_000)])])
    for n_bytes, file_bytes, n in [(100_000, 9 * MB, 8), (15_000, 9 * MB, 3), (100_000, 3 * MB + 9_000, 5), (1, 1, 1)]:
        budget = Budget(n_bytes, RULE.are_large, file_bytes)
        fits = budget.fitting(rows)
        assert fits.tolist() == [True] * n + [False] * (8 - n) + [True]
        assert Budget(n_bytes, RULE.are_large).fitting(rows)[:8].sum() <= n, "without it they count as the others"
    assert budget.is_spent


def test_a_slot_refers_to_the_files_of_the_rows_that_are_left_in_it() -> None:
    store = MemoryStore()
    slots = TimeSlots(store)
    slots.begin_tick(RULE)
    slots.add_rows(in_files(3, "7-a"))
    slots.add_rows(with_columns(in_files(3, "8-b"), entry_id=pa.array(range(3, 6), MESSAGES.field("entry_id").type)))
    assert {name for files in store.files.values() for name in files} == {"7-a", "8-b"}
    first = slots.take_due(5_000, Budget(4 * MB + 50_000, RULE.are_large))
    assert int64(first, "entry_id").tolist() == [0, 1, 2, 3]
    assert {name for files in store.files.values() for name in files} == {"8-b"}
    assert int64(slots.take_due(5_000), "entry_id").tolist() == [4, 5]
    assert not store.files
