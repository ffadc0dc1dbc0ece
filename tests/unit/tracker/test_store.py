"""What the tracker does when its store has lost something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.tracker.messages import messages
from tracker.buckets.mutable_bucket import MutableBucket
from tracker.buckets.time_slots import TimeSlots
from tracker.entry_log import EntryLog
from tracker.in_flight import InFlight, Release
from tracker.sharding import ShardId
from tracker.store import MemoryStore, StateLostError, get_present


def slots(store: MemoryStore) -> Callable[[], object]:
    kept = TimeSlots(store)
    kept.add_rows(messages([(1, 1, 10)]))
    return lambda: kept.take_due(1_000)


def mutable(store: MemoryStore) -> Callable[[], object]:
    kept = MutableBucket(store)
    kept.add_rows(messages([(1, 1, 10)]))
    return kept.take_all


def entries(store: MemoryStore) -> Callable[[], object]:
    kept = EntryLog(store, ShardId().is_home)
    kept.add_messages(messages([(1, 1, 10)]), 3)
    return kept.all_messages


def in_flight(store: MemoryStore) -> Callable[[], object]:
    kept = InFlight(store)
    kept.add_release(Release(7, True, messages([(1, 1, 10)])))
    return kept.all_releases


@pytest.mark.parametrize("keep", [slots, mutable, entries, in_flight])
def test_what_is_lost_is_named_and_never_passed_over(keep: Callable[[MemoryStore], Callable[[], object]]) -> None:
    store = MemoryStore()
    read = keep(store)
    store.values.clear()
    with pytest.raises(StateLostError, match=f"has lost the value .* of the table '{keep.__name__}'"):
        read()


def test_a_value_that_is_there_is_returned() -> None:
    store = MemoryStore()
    store.put("slots", (1, 2), b"x")
    assert get_present(store, "slots", (1, 2)) == b"x"
