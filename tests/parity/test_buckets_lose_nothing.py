"""What is sealed in buckets comes back once, in order: what is asked of Pulsar's bucket tracker, of ours.

Immutable buckets are tables that the caller keeps.
"""

from __future__ import annotations

import pytest

from tests.parity.conftest import Buckets
from tests.support.tracker.messages import messages, positions, times
from tracker.buckets.index_bits import MAX_ENTRY_ID
from tracker.packing import pack, unpack


def test_a_position_is_known_after_it_was_added(buckets: Buckets) -> None:
    """B1: contains is true after an addition, and stays right after messages came out and others came in."""
    buckets.add((1, 1, 10), (1, 2, 20))
    assert buckets.contains(1, 1)
    assert not buckets.contains(1, 3)
    assert not buckets.contains(2, 1)
    buckets.due(10)
    buckets.add((1, 3, 30))
    assert buckets.contains(1, 2)
    assert buckets.contains(1, 3)


def test_a_known_message_that_has_become_due_is_not_taken_in_again(buckets: Buckets) -> None:
    """B2: the time is looked at before the index bit."""
    buckets.add((1, 1, 10))
    assert buckets.add((1, 1, 10), cutoff=10) == [(1, 1)]
    assert buckets.tracker.number_of_delayed_messages == 1


def test_index_bits_come_back_with_the_state(buckets: Buckets) -> None:
    """B3, B5: known positions are known after a restart, until they are due."""
    buckets.add((1, 1, 100), (1, 70_000, 100), (2, MAX_ENTRY_ID, 100))
    buckets.restart()
    for ledger, entry in ((1, 1), (1, 70_000), (2, MAX_ENTRY_ID)):
        assert buckets.contains(ledger, entry)
    assert buckets.add((1, 1, 100), cutoff=100) == [(1, 1)]
    buckets.tracker.drop_expired(100)
    assert not buckets.contains(1, 1)


@pytest.mark.parametrize("restarts", range(3))
def test_recovery_of_buckets_loses_and_doubles_nothing(buckets: Buckets, restarts: int) -> None:
    """B4: 100 messages in buckets, some delivered; after restarts the rest comes in order, each once."""
    for start in range(1, 101, 5):
        buckets.add(*[(1, i, i * 10) for i in range(start, start + 5)])
        buckets.seal(load_horizon=100)
    assert buckets.due(99) == [(1, i) for i in range(1, 10)]
    assert buckets.add((1, 101, 1010)) == []
    for _ in range(restarts):
        buckets.restart()
    assert buckets.tracker.number_of_delayed_messages == 92
    buckets.seal(load_horizon=300)
    assert buckets.due(299) == [(1, i) for i in range(10, 30)]
    buckets.restart()
    buckets.seal(load_horizon=2_000)
    assert buckets.due(1_000) == [(1, i) for i in range(30, 101)]
    assert buckets.due(1_010) == [(1, 101)]
    assert buckets.tracker.number_of_delayed_messages == 0


def test_what_many_buckets_hold_comes_once_in_order(buckets: Buckets) -> None:
    """B6, B11: overlapping buckets, however many; positions added again are known; all exactly once, in order."""
    for start in range(10):
        buckets.add(*[(start, i, 1000 + i * 10 + start) for i in range(11)])
        buckets.seal(load_horizon=500)
    assert buckets.tracker.number_of_delayed_messages == 110
    for start in range(10):
        buckets.add(*[(start, i, 1000 + i * 10 + start) for i in range(11)])
    assert buckets.tracker.number_of_delayed_messages == 110
    buckets.seal(load_horizon=5_000)
    due = buckets.tracker.get_scheduled_messages(5_000)
    assert due.num_rows == 110
    assert times(due) == sorted(times(due))
    assert len(set(positions(due))) == 110


def test_a_segment_that_can_not_be_read_is_read_later(buckets: Buckets) -> None:
    """B7: errors of the storage change nothing in the tracker; the same segment loads when it can be read."""
    buckets.add(*[(1, i, 100 + i) for i in range(10)])
    buckets.seal(load_horizon=50)
    buckets.fails = 4
    for _ in range(4):
        with pytest.raises(OSError, match="injected"):
            buckets.segment(50, 200)
    assert buckets.due(200) == []
    assert buckets.tracker.number_of_delayed_messages == 10
    buckets.load(50, 200)
    assert buckets.due(200) == [(1, i) for i in range(10)]


def test_a_bucket_that_can_not_be_stored_is_sealed_again(buckets: Buckets) -> None:
    """B8: a seal whose batch fails is replayed from the state before it, and gives the same bucket."""
    buckets.add(*[(1, i, 100 + i) for i in range(6)])
    buckets.tracker.save()
    before = dict(buckets.store.values)
    lost = buckets.tracker.seal_bucket(50, 0)
    buckets.store.values.clear()
    buckets.store.values.update(before)
    buckets.tracker = type(buckets.tracker)(buckets.store)
    assert buckets.tracker.number_of_delayed_messages == 6
    assert buckets.seal(load_horizon=1000).equals(lost)
    assert buckets.due(105) == [(1, i) for i in range(6)]


def test_a_bucket_is_sorted_by_time_then_position(buckets: Buckets) -> None:
    """B9: segments are slices of the bucket by time, so its rows are in order."""
    buckets.add(*[(1, i, 5_000 - (i * 37) % 100) for i in range(101)])
    bucket = buckets.seal()
    assert times(bucket) == sorted(times(bucket))
    assert bucket.num_rows == 101
    assert unpack(pack(bucket)).equals(bucket)


def test_asking_with_nothing_in_state_gives_nothing(buckets: Buckets) -> None:
    """B21: all in buckets, none in state: no error, nothing handed out, the number stays."""
    buckets.add(*[(1, i, 10_000 + i) for i in range(5)])
    buckets.seal(load_horizon=100)
    assert buckets.tracker.number_of_loaded_messages == 0
    assert buckets.due(99) == []
    assert buckets.tracker.number_of_delayed_messages == 5


def test_what_is_beyond_the_load_horizon_is_not_in_the_store(buckets: Buckets) -> None:
    """B20, B23: a seal keeps the near part and nothing else, whatever other buckets hold."""
    buckets.add((1, 1, 50), (1, 2, 5_000))
    buckets.seal(load_horizon=100)
    assert buckets.tracker.number_of_loaded_messages == 1
    buckets.add((2, 1, 60), (2, 2, 6_000))
    buckets.seal(load_horizon=100)
    assert buckets.tracker.number_of_loaded_messages == 2
    assert buckets.due(100) == [(1, 1), (2, 1)]


def test_a_ledger_is_forgotten_only_when_all_of_it_is_past(buckets: Buckets) -> None:
    """B12, B16: trimming drops ledgers whose last message has been due, and none of which one still waits."""
    for ledger in range(31, 37):
        buckets.add((ledger, 1, ledger * 10), (ledger, 2, ledger * 10 + 5))
        buckets.seal(load_horizon=100)
    buckets.seal(load_horizon=1_000)
    assert buckets.due(330) == [(31, 1), (31, 2), (32, 1), (32, 2), (33, 1)]
    buckets.tracker.drop_expired(330)
    known = [ledger for ledger in range(31, 37) if buckets.contains(ledger, 1)]
    assert known == [33, 34, 35, 36]
    assert buckets.tracker.number_of_delayed_messages == 7
    assert buckets.add((33, 2, 335)) == []
    assert buckets.due(1_000) == [(33, 2), *[(ledger, i) for ledger in range(34, 37) for i in (1, 2)]]


def test_trimming_with_nothing_to_trim_changes_nothing(buckets: Buckets) -> None:
    """B19: no ledger is past: all positions stay known, and all messages wait."""
    buckets.add(*[(ledger, 1, 100) for ledger in range(10)])
    buckets.tracker.drop_expired(99)
    assert all(buckets.contains(ledger, 1) for ledger in range(10))
    assert buckets.tracker.number_of_delayed_messages == 10


def test_buckets_of_overlapping_ledgers_lose_and_double_nothing(buckets: Buckets) -> None:
    """B22: after a restart, too, ledgers may be in several buckets in any order."""
    rows = [(ledger, i, 1_000 + 7 * i % 40) for i in range(6) for ledger in (1, 3, 2)]
    for part in (rows[:7], rows[3:12], rows[10:]):
        buckets.add(*part)
        buckets.seal(load_horizon=500)
    buckets.restart()
    assert buckets.tracker.number_of_delayed_messages == len(rows)
    buckets.seal(load_horizon=2_000)
    assert sorted(buckets.due(2_000)) == sorted(row[:2] for row in rows)


def test_older_ledgers_may_come_later(buckets: Buckets) -> None:
    """T2: ledger ids need not rise."""
    buckets.add((9, 1, 100), (3, 1, 90), (9, 2, 80), (1, 1, 70))
    assert buckets.due(100) == [(1, 1), (9, 2), (3, 1), (9, 1)]


def test_entry_ids_that_pulsar_can_not_have_are_refused(buckets: Buckets) -> None:
    """B5: bitmaps hold entry ids of 32 bits."""
    for entry in (-1, MAX_ENTRY_ID + 1):
        with pytest.raises(ValueError, match="entry ids"):
            buckets.tracker.add_messages(messages([(1, entry, 10)]), 0)
