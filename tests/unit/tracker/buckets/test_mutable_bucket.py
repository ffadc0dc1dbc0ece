"""What came in since the last seal."""

from __future__ import annotations

from tests.support.tracker.messages import messages, positions
from tracker.buckets.mutable_bucket import MutableBucket
from tracker.messages import MESSAGES
from tracker.store import MemoryStore


def test_rows_come_back_in_the_order_they_came_once() -> None:
    store = MemoryStore()
    bucket = MutableBucket(store)
    bucket.add_rows(messages([(1, 2, 20), (1, 1, 50)]))
    bucket.add_rows(MESSAGES.empty_table())
    bucket.add_rows(messages([(1, 3, 10)]))
    assert len(bucket) == 3
    assert positions(bucket.take_all()) == [(1, 2), (1, 1), (1, 3)]
    assert bucket.take_all().equals(MESSAGES.empty_table())
    assert not store.values


def test_the_earliest_time_is_of_what_is_in_it() -> None:
    bucket = MutableBucket(MemoryStore())
    assert bucket.earliest is None
    for due, earliest in ((30, 30), (10, 10), (20, 10)):
        bucket.add_rows(messages([(1, due, due)]))
        assert bucket.earliest == earliest
    bucket.take_all()
    assert bucket.earliest is None
    bucket.add_rows(messages([(1, 1, 99)]))
    assert bucket.earliest == 99


def test_another_goes_on_with_the_store_and_what_is_kept_beside_it() -> None:
    store = MemoryStore()
    bucket = MutableBucket(store)
    bucket.add_rows(messages([(1, 1, 40)]))
    again = MutableBucket(store, bucket.meta)
    assert (len(again), again.earliest) == (1, 40)
    again.add_rows(messages([(1, 2, 30)]))
    assert positions(MutableBucket(store, again.meta).take_all()) == [(1, 1), (1, 2)]
