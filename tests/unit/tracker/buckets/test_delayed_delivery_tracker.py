"""The tracker against a naive model, duplicates and all, and what the model does not reach."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import batches, messages, positions
from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.buckets.index_bits import IndexBits
from tracker.buckets.large_rows import Budget, LargeRows, LargeRule
from tracker.buckets.time_slots import TimeSlots
from tracker.messages import MESSAGES, concat, int64
from tracker.packing import LARGE_BYTES, unpack
from tracker.store import MemoryStore, StateLostError

LEDGERS, ENTRIES = 3, 12

Message = tuple[int, int, int]  # ledger, entry, batch index


def of(rows: pa.Table) -> list[Message]:
    return list(zip(*(rows[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index")), strict=True))


class TrackerModel(RuleBasedStateMachine):
    """What a tracker holds, as dictionaries: what waits, what is known, and what of it is in the mutable bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.tracker = DelayedDeliveryTracker(self.store)
        self.cutoff, self.near, self.load = 0, 1, 1
        self.waiting: dict[Message, int] = {}
        self.mutable: set[Message] = set()
        self.known: dict[int, set[int]] = {}
        self.last_due: dict[int, int] = {}
        self.sealed: list[pa.Table] = []

    @initialize()
    def begin(self) -> None:
        self.seal_epoch(1_000, 3_000)

    @rule(data=st.data())
    def entries_come(self, data: st.DataObject) -> None:
        """Entries of one message or several, whether known or not."""
        rows = []
        for ledger, entry in data.draw(
            st.lists(st.tuples(st.integers(0, LEDGERS - 1), st.integers(0, ENTRIES - 1)), unique=True, max_size=5)
        ):
            size = data.draw(st.integers(1, 3))
            for i in range(size):
                due = self.cutoff + data.draw(st.integers(-500, 9_000))
                rows.append((ledger, entry, -1 if size == 1 else i, size, due))
        due_now = self.tracker.add_messages(batches(rows), self.cutoff)
        assert of(due_now) == [row[:3] for row in rows if row[4] <= self.cutoff]

        new = [row for row in rows if row[4] > self.cutoff and row[1] not in self.known.get(row[0], ())]
        for ledger, entry, index, _, due in new:
            self.waiting[ledger, entry, index] = due
            if due >= self.near:
                self.mutable.add((ledger, entry, index))
            self.known.setdefault(ledger, set()).add(entry)
            self.last_due[ledger] = max(due, self.last_due.get(ledger, 0))

    @rule(share=st.floats(0, 1))
    def what_is_due_is_taken(self, share: float) -> None:
        self.cutoff += int(share * (self.near - 1 - self.cutoff))
        due = sorted((t, message) for message, t in self.waiting.items() if t <= self.cutoff)
        assert of(self.tracker.get_scheduled_messages(self.cutoff)) == [message for _, message in due]
        for _, message in due:
            del self.waiting[message]

    @rule(near=st.integers(0, 3_000), ahead=st.integers(0, 4_000))
    def seal_epoch(self, near: int, ahead: int) -> None:
        """The mutable bucket is sealed, and what comes within the horizon is loaded; done again it gives the same."""
        self.tracker.save()
        before = MemoryStore()
        before.values = dict(self.store.values)
        old, self.near = self.load, max(self.near, self.cutoff + near)
        self.load = max(self.load, self.near, self.cutoff + near + ahead)

        bucket = self.seal(self.tracker)
        assert self.seal(DelayedDeliveryTracker(before)).equals(bucket)
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        self.tracker.load_segment(stored.filter(pa.array((due >= old) & (due < self.load))))
        self.is_sealed(bucket)

    @rule()
    def the_mutable_bucket_is_full(self) -> None:
        self.is_sealed(self.seal(self.tracker))

    def seal(self, tracker: DelayedDeliveryTracker) -> pa.Table:
        return tracker.seal_bucket(self.load, self.near)

    def is_sealed(self, bucket: pa.Table) -> None:
        assert of(bucket) == [m for _, m in sorted((self.waiting[m], m) for m in self.mutable)]
        self.mutable.clear()
        self.sealed.append(bucket)
        for (table, _), value in self.store.values.items():
            if table in ("slots", "mutable"):
                assert (int64(unpack(value), "deliver_at") < self.load).all()

    @precondition(lambda self: all(due > self.cutoff for due in self.waiting.values()))
    @rule()
    def what_is_past_is_forgotten(self) -> None:
        self.tracker.drop_expired(self.cutoff)
        for ledger in [ledger for ledger, due in self.last_due.items() if due <= self.cutoff]:
            del self.known[ledger], self.last_due[ledger]

    @rule()
    def another_tracker_goes_on(self) -> None:
        self.tracker.save()
        self.tracker = DelayedDeliveryTracker(self.store)
        assert self.tracker.load_horizon == self.load

    @invariant()
    def the_counts_are_right(self) -> None:
        assert self.tracker.number_of_delayed_messages == len(self.waiting)
        assert self.tracker.number_of_unsealed_messages == len(self.mutable)
        loaded = sum(m in self.mutable or due < self.load for m, due in self.waiting.items())
        assert self.tracker.number_of_loaded_messages == loaded

    @invariant()
    def what_is_known_is_right(self) -> None:
        ledgers, entries = np.divmod(np.arange(LEDGERS * ENTRIES), ENTRIES)
        known = [entry in self.known.get(ledger, ()) for ledger, entry in zip(ledgers, entries, strict=True)]
        assert IndexBits(self.store).contains(ledgers, entries).tolist() == known


TrackerModel.TestCase.settings = settings(
    max_examples=examples(50), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_tracker_against_the_model = TrackerModel.TestCase


def test_no_messages_change_nothing() -> None:
    store = MemoryStore()
    tracker = DelayedDeliveryTracker(store)
    assert tracker.add_messages(MESSAGES.empty_table(), 10).num_rows == 0
    assert tracker.seal_bucket(0, 0).equals(MESSAGES.empty_table())
    tracker.load_segment(MESSAGES.empty_table())
    assert tracker.get_scheduled_messages(10).equals(MESSAGES.empty_table())
    assert tracker.next_due is None
    assert not store.values


def test_the_next_time_that_something_is_due_is_that_of_the_first_slot_or_when_the_bucket_s_first_is_near() -> None:
    """A job that has nothing due rests: what is in the bucket alone has to be sealed, or loaded in time, before."""
    tracker = DelayedDeliveryTracker(MemoryStore())
    tracker.seal_bucket(1_000, 1_000)
    tracker.add_messages(messages([(1, 1, 5_400)]), 0)
    assert tracker.next_due == 5_400
    tracker.add_messages(messages([(1, 2, 450)]), 0)
    assert tracker.next_due == 400
    tracker.get_scheduled_messages(500)
    assert tracker.next_due == 5_400
    tracker.seal_bucket(1_000, 1_000)
    assert tracker.next_due is None


def test_the_load_horizon_never_goes_back_and_what_is_near_may() -> None:
    tracker = DelayedDeliveryTracker(MemoryStore())
    tracker.seal_bucket(5_000, 3_000)
    tracker.seal_bucket(4_000, 2_000)
    assert tracker.load_horizon == 5_000
    tracker.add_messages(messages([(1, 1, 2_999), (1, 2, 3_000), (1, 3, 4_999), (1, 4, 5_000)]), 0)
    assert tracker.number_of_unsealed_messages == 4
    assert positions(tracker.seal_bucket(0, 0)) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert tracker.number_of_loaded_messages == 3


def test_what_is_due_is_found_in_the_mutable_bucket_too() -> None:
    """A caller may ask for what is due beyond what it named as near; then what is near goes to slots."""
    tracker = DelayedDeliveryTracker(MemoryStore())
    tracker.add_messages(messages([(1, 1, 700), (1, 2, 300), (1, 3, 900)]), 0)
    assert positions(tracker.get_scheduled_messages(700)) == [(1, 2), (1, 1)]
    assert tracker.number_of_unsealed_messages == 1
    tracker.add_messages(messages([(1, 4, 701), (1, 5, 700)]), 600)
    assert tracker.number_of_unsealed_messages == 2
    assert positions(tracker.get_scheduled_messages(700)) == [(1, 5)]


def test_save_writes_only_what_has_changed() -> None:
    store = MemoryStore()
    tracker = DelayedDeliveryTracker(store)
    tracker.add_messages(messages([(1, 1, 700)]), 0)
    tracker.save()
    store.put = None  # type: ignore[method-assign, assignment]
    tracker.save()
    DelayedDeliveryTracker(store).save()


def test_large_rows_outlive_a_restart_and_a_program_that_does_not_know_them_says_so() -> None:
    store = MemoryStore()
    large_rule = LargeRule(LARGE_BYTES, is_whole=True)

    def reopened() -> DelayedDeliveryTracker:
        made = DelayedDeliveryTracker(store)
        made.begin_tick(LargeRows(large_rule))
        return made

    first = reopened()
    first.seal_bucket(10_000, 10_000)
    small = messages([(1, 0, 500), (1, 1, 900)])
    large = pa.concat_tables(messages([(1, e, 500)], payload=b"x" * LARGE_BYTES) for e in range(2, 5))
    first.add_messages(pa.concat_tables([small, large]), 0)
    first.save()
    again = reopened()
    assert (again.number_of_loaded_messages, again.large_bytes) == (5, 3 * LARGE_BYTES)
    assert positions(again.get_scheduled_messages(500, Budget(1, large_rule.are_large))) == [(1, 0), (1, 2)]
    again.save()
    assert positions(reopened().get_scheduled_messages(500)) == [(1, 3), (1, 4)]

    # An earlier program reads the slots alone.
    meta = json.loads(store.values["tracker", (0, 0)])
    slots = TimeSlots(store, {slot: (n, rows) for slot, n, rows in meta["slots"]})
    with pytest.raises(StateLostError):
        slots.take_due(500)
