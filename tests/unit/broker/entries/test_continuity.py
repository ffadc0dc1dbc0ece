"""Gaps between the entries that came, and which topics stand still: pure, on columns."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from broker.entries.continuity import CameEntry, Continuity, Gap, missing_ranges, positions_in
from broker.position import START, Position
from streaming.source.watch.stalled_topics import STANDING_MILLIS, StalledTopics

ROWS = pa.schema(
    [("ledger_id", pa.int64()), ("entry_id", pa.int64()), ("batch_size", pa.int32()), ("first_index", pa.int64())]
)


def rows(*entries: tuple[int, int, int, int | None]) -> pa.Table:
    """Messages of entries: (ledger, entry, messages, index of the first one)."""
    made = [dict(zip(ROWS.names, entry, strict=True)) for entry in entries for _ in range(entry[2])]
    return pa.Table.from_pylist(made, schema=ROWS)


def test_entries_of_a_ledger_follow_each_other_by_their_ids() -> None:
    continuity = Continuity(START)
    assert continuity.gaps(rows((7, 4, 1, None), (7, 5, 3, None), (7, 6, 1, None))) == []
    assert continuity.gaps(rows((7, 7, 1, None))) == []
    assert continuity.gaps(rows((7, 8, 2, None), (7, 11, 1, None), (7, 12, 1, None))) == [
        Gap(Position(7, 8), Position(7, 11))
    ]


def test_indexes_that_follow_hide_no_gap_in_a_ledger() -> None:
    """As after a batch of two in a transaction, which the broker counts as one: 2516 to 2523 of a real topic."""
    found = Continuity(START).gaps(rows((13, 2516, 2, 3467), (13, 2521, 1, 3475), (13, 2523, 1, 3476)))
    assert found[-1] == Gap(Position(13, 2521), Position(13, 2523), 3475, 3476)


def test_a_gap_between_two_calls_and_after_a_restart_is_found() -> None:
    continuity = Continuity(Position(7, 3))
    assert continuity.gaps(rows((7, 6, 1, 90))) == [Gap(Position(7, 3), Position(7, 6), None, 90)]
    assert continuity.gaps(rows((7, 9, 2, 93))) == [Gap(Position(7, 6), Position(7, 9), 90, 93)]
    assert continuity.gaps(rows((7, 20, 1, 110))) == [Gap(Position(7, 9), Position(7, 20), 94, 110)]


def test_from_one_ledger_to_the_next_the_indexes_tell() -> None:
    continuity = Continuity(START)
    assert continuity.gaps(rows((7, 0, 4, 10), (9, 0, 1, 14), (12, 0, 1, 15))) == []
    assert continuity.gaps(rows((13, 0, 1, 17))) == [Gap(Position(12, 0), Position(13, 0), 15, 17)]
    assert continuity.gaps(rows((14, 0, 1, None))) == [Gap(Position(13, 0), Position(14, 0), 17, None)]


def test_what_comes_again_is_passed_over() -> None:
    continuity = Continuity(START)
    continuity.gaps(rows((7, 0, 1, 0), (7, 1, 1, 1)))
    assert continuity.gaps(rows((7, 0, 1, 0), (7, 1, 1, 1), (7, 2, 1, 2))) == []
    assert continuity.gaps(rows((7, 1, 1, 1))) == []
    assert continuity.gaps(rows()) == []
    assert continuity.gaps(rows((7, 3, 1, 3))) == []


def entries(*given: tuple[int, int, int, int | None]) -> list[CameEntry]:
    """As `rows`: the entries."""
    return [CameEntry(Position(ledger, entry), n, index) for ledger, entry, n, index in given]


def test_parts_of_messages_are_no_gaps_wherever_they_lie() -> None:
    continuity = Continuity(Position(7, 3))
    came = entries((7, 4, 1, 4), (7, 5, 2, 5), (7, 6, 1, 7), (8, 0, 1, 8), (8, 1, 1, 9))
    assert continuity.gaps_of(came) == []
    assert continuity.gaps_of(entries((8, 2, 1, 10))) == []
    assert continuity.last == Position(8, 2)
    assert continuity.gaps_of(entries((8, 2, 1, 10), (8, 4, 1, 12), (8, 5, 1, 13))) == [
        Gap(Position(8, 2), Position(8, 4), 10, 12)
    ]
    assert continuity.gaps_of(entries((9, 0, 1, None))) == [Gap(Position(8, 5), Position(9, 0), 13, None)]


def test_the_missing_entries_are_named_over_ledgers() -> None:
    ledgers = {7: 5, 8: 0, 9: 2, 12: 100, 13: 4}
    assert missing_ranges(Gap(Position(7, 1), Position(7, 4)), ledgers) == [(7, 2, 3)]
    over = Gap(Position(7, 3), Position(12, 2))
    assert missing_ranges(over, ledgers) == [(7, 4, 4), (9, 0, 1), (12, 0, 1)]
    assert list(positions_in(missing_ranges(over, ledgers))) == [(7, 4), (9, 0), (9, 1), (12, 0), (12, 1)]
    # How the trimmed ledger 7 ended nobody knows any more.
    assert missing_ranges(Gap(Position(7, 3), Position(12, 0)), {12: 5}) == []


@given(
    ledgers=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    is_lost=st.lists(st.booleans(), min_size=24, max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=3),
    has_index=st.booleans(),
)
def test_gaps_name_exactly_what_did_not_come(
    ledgers: list[int], is_lost: list[bool], cuts: list[int], has_index: bool
) -> None:
    """Whatever is lost between the first and the last entry that came, however what came is cut in pieces."""
    all_entries = [Position(10 * n, e) for n, size in enumerate(ledgers, 1) for e in range(size)]
    came = [(i, p) for i, p in enumerate(all_entries) if not is_lost[i]]
    sizes = {10 * n: size for n, size in enumerate(ledgers, 1)}
    ends = sorted({0, len(came), *(min(cut, len(came)) for cut in cuts)})
    continuity, one_by_one = Continuity(START), Continuity(START)
    gaps = []
    for start, end in itertools.pairwise(ends):
        some = [(*p, 1, i if has_index else None) for i, p in came[start:end]]
        found = continuity.gaps(rows(*some))
        assert one_by_one.gaps_of(entries(*some)) == found
        gaps += found
    named = [p for gap in gaps for p in positions_in(missing_ranges(gap, sizes))]
    first, last = (came[0][0], came[-1][0]) if came else (0, 0)
    assert named == [p for i, p in enumerate(all_entries) if first < i < last and is_lost[i]]
    if has_index:
        assert all(missing_ranges(gap, sizes) for gap in gaps)


def test_a_topic_stands_when_it_has_messages_and_takes_none_in_for_a_minute() -> None:
    standing = StalledTopics()
    at = Position(7, 3)
    assert standing.look("t", at, True, 1_000) is None
    assert standing.look("t", at, True, 1_000 + STANDING_MILLIS - 1) is None
    assert standing.look("other", at, True, 1_000 + STANDING_MILLIS) is None
    assert standing.look("t", at, True, 1_000 + STANDING_MILLIS) == 1_000
    assert standing.look("t", at, True, 900_000) == 1_000
    assert standing.look("t", Position(7, 4), True, 901_000) is None
    assert standing.look("t", Position(7, 4), True, 901_000 + STANDING_MILLIS) == 901_000


def test_a_topic_without_messages_does_not_stand() -> None:
    standing = StalledTopics()
    at = Position(7, 3)
    assert standing.look("t", at, True, 0) is None
    assert standing.look("t", at, False, 50_000) is None
    assert standing.look("t", at, True, 70_000) is None
    assert standing.look("t", at, True, 100_000) is None
    assert standing.look("t", at, True, 70_000 + STANDING_MILLIS) == 70_000
