"""The bucketed delayed delivery tracker, after Pulsar's BucketDelayedDeliveryTracker (PIP-195)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.index_bits import MAX_ENTRY_ID, IndexBits
from tracker.buckets.large_rows import Budget, LargeRows
from tracker.buckets.mutable_bucket import Chunks, MutableBucket
from tracker.buckets.time_slots import Pile, Queue, TimeSlots, WaitingRows
from tracker.messages import MESSAGES, BoolArray, Int64Array, concat, has_occurrences, in_order, int64, where
from tracker.store import Store

_TABLE = "tracker"
_FORMAT = 1


class DelayedDeliveryTracker:
    """Keeps messages until they are due: those due soon in time slots, the others in buckets.

    `add_messages` puts a new message into a time slot if it is due before `near_until`, else into the mutable bucket.
    `seal_bucket` makes an immutable bucket of the mutable one, and the caller stores it. Rows of the bucket that are
    due before the load horizon stay in time slots here, too; the others are only in the bucket, until the caller passes
    them to `load_segment`. `get_scheduled_messages` removes the messages that are due.

    A recurring message is needed as long as it recurs, and a message that may be retried after its delivery. So the row
    with which such a message came is sealed, however soon it is due.

    All state is in the store: after `save` another tracker on the same store continues from there. The same calls
    give the same results. Tables have the columns of `tracker.messages.MESSAGES`; times are ms since the epoch.

    Args:
        store: where the state is kept.
        retried_topics: the topics of which all messages are sealed, for a retry by id.

    Attributes:
        near_until: new messages due before it go to a time slot.
        load_horizon: all messages due before it are in state, except large ones that wait for room.
        was_complete_until: `complete_until` after the last tick.
    """

    def __init__(self, store: Store, retried_topics: Collection[str] = ()) -> None:
        self._store = store
        self._retried_topics = pa.array(sorted(retried_topics), pa.string())
        saved = store.get(_TABLE, (0, 0))
        meta = json.loads(saved) if saved else {}
        self._mutable = MutableBucket(store, meta.get("mutable"))
        piles = {slot: Pile(*pile) for slot, *pile in meta.get("piles", [])}
        rule = LargeRows.from_json(meta["pile_rule"]).rule if meta.get("pile_rule") else None
        slots = {slot: (n - (slot in piles), rows) for slot, n, rows in meta.get("slots", [])}
        slots = {slot: (n, rows) for slot, (n, rows) in slots.items() if n}
        self._slots = TimeSlots(store, slots, dict(meta.get("large", [])), piles, rule)
        self._large = LargeRows()
        self._waiting = WaitingRows(store, meta.get("waiting"))
        self._bits = IndexBits(store)
        self._sealed: int = meta.get("sealed", 0)
        self.near_until: int = meta.get("near_until", 0)
        # Rows that are to be sealed, and are in a time slot, too, or have come due already. The table's name in the
        # store is of an earlier program, which had rows of recurring messages alone there.
        self._to_seal = Chunks(store, "recurring", MESSAGES, *meta.get("recurring", [0, 0]))
        self.load_horizon: int = meta.get("load_horizon", 0)
        self.was_complete_until: int = meta.get("complete_until", self.load_horizon)
        self._saved = saved

    def begin_tick(self, large: LargeRows) -> None:
        """Begins a tick.

        Args:
            large: which large rows are in state from now on. The caller passes to `load_segment` those of earlier
                buckets that are from now on, and were not before.
        """
        self._large = large
        self._slots.begin_tick(large.rule)

    @property
    def large_bytes(self) -> int:
        """The bytes of large payloads in time slots."""
        return self._slots.large_bytes

    @property
    def complete_until(self) -> int:
        """All messages with schedule keys that are due before it are in state, ms since the epoch."""
        after = self._large.after if self._large.rule.is_whole else None
        return self.load_horizon if after is None else min(self.load_horizon, after[0])

    @property
    def has_large_unsealed(self) -> bool:
        """Whether the mutable bucket has messages that are due soon, and wait in the delayed index for room."""
        earliest = self._mutable.earliest
        return self._large.after is not None and earliest is not None and earliest < self.near_until

    @property
    def number_of_delayed_messages(self) -> int:
        """The number of messages that wait, in state or in immutable buckets."""
        return self.number_of_loaded_messages + self._sealed

    @property
    def number_of_loaded_messages(self) -> int:
        """The number of messages that wait in state."""
        return len(self._mutable) + len(self._slots) + len(self._waiting)

    @property
    def number_of_unsealed_messages(self) -> int:
        """The number of messages that are to be sealed."""
        return len(self._mutable) + self._to_seal.n_rows

    @property
    def unsealed_bytes(self) -> int:
        """The bytes of the payloads in the mutable bucket."""
        return self._mutable.n_bytes

    @property
    def next_due(self) -> int | None:
        """A lower bound of `deliver_at` of the messages in state, ms since the epoch; None: there are none.

        What is in the mutable bucket is not due before `near_until`, but for large messages that wait for room.
        """
        unsealed = self._mutable.earliest
        times = self._slots.earliest, self._waiting.earliest, unsealed and max(unsealed, self.near_until)
        return min((time for time in times if time is not None), default=None)

    def add_messages(self, rows: pa.Table, cutoff: int) -> pa.Table:
        """Adds new messages that are due after the cutoff, and ignores those whose position is known already.

        Args:
            rows: whole entries.
            cutoff: ms since the epoch.

        Returns:
            the messages that are due at the cutoff or before, known or not, except large ones that wait for room. They
            are not added.

        Raises:
            ValueError: an entry id is negative or beyond 2^32 - 1.
        """
        if not rows.num_rows:
            return rows
        entry_ids = int64(rows, "entry_id")
        if entry_ids.min() < 0 or entry_ids.max() > MAX_ENTRY_ID:
            raise ValueError(f"entry ids must be from 0 to {MAX_ENTRY_ID}")
        is_due = self._are_due(rows, cutoff)
        due, delayed = where(rows, is_due), where(rows, ~is_due)
        self.keep_to_seal(due)
        if not delayed.num_rows:
            return due
        ledger_ids, entry_ids = int64(delayed, "ledger_id"), int64(delayed, "entry_id")
        is_new = ~self._bits.contains(ledger_ids, entry_ids)
        if not is_new.all():
            delayed, ledger_ids, entry_ids = where(delayed, is_new), ledger_ids[is_new], entry_ids[is_new]
        self._bits.add_entries(ledger_ids, entry_ids, int64(delayed, "deliver_at"))
        self.keep_to_seal(where(delayed, self._go_to_slots(delayed)))
        self._add(delayed)
        return due

    def knows(self, rows: pa.Table) -> BoolArray:
        """Tells which messages are known, so that `add_messages` would ignore them: bool, (rows,)."""
        return self._bits.contains(int64(rows, "ledger_id"), int64(rows, "entry_id"))

    def add_moved(self, rows: pa.Table, cutoff: int) -> pa.Table:
        """Adds further rows of known messages; returns those due at the cutoff (ms) or before, which are not added.

        Large ones that wait for room are added, however soon they are due.
        """
        if not rows.num_rows:
            return rows
        is_due = self._are_due(rows, cutoff)
        self._add(where(rows, ~is_due))
        return where(rows, is_due)

    def put_back(self, queue: Queue, rows: pa.Table, ends: Int64Array | None = None) -> None:
        """Adds due rows to the end of a queue, where they wait until `take_waiting`, or their end: as of `add_rows`."""
        self._waiting.add_rows(queue, rows, ends)

    def take_ended(self, now: int) -> pa.Table:
        """Removes and returns the rows of queues whose end has come by now, ms since the epoch."""
        return self._waiting.take_ended(now)

    def take_waiting(self, limit: Callable[[Queue], int | None], cutoff: int) -> pa.Table:
        """Removes and returns the first rows of each queue: see `WaitingRows.take_rows`.

        Rows due after the cutoff (ms) go to their time slots instead: there are some if the clock has been set back.
        """
        rows = self._waiting.take_rows(limit)
        is_due = int64(rows, "deliver_at") <= cutoff
        self._slots.add_rows(where(rows, ~is_due))
        return where(rows, is_due)

    @property
    def queue_lengths(self) -> dict[Queue, int]:
        """How many rows wait in each queue; queues without rows are left out."""
        return self._waiting.counts

    @property
    def queues_with_ends(self) -> set[Queue]:
        """The queues of which rows may expire."""
        return self._waiting.with_ends

    def select_near(self, moved: pa.Table, cutoff: int) -> pa.Table:
        """Returns the rows of moved messages that `add_moved` does not put into the mutable bucket.

        The caller seals them in the same tick: the delayed index would not get them otherwise, and their entries may be
        durable before they are due.

        Args:
            moved: as MESSAGES.
            cutoff: of the tick, ms since the epoch.
        """
        if not moved.num_rows:
            return moved
        return where(moved, self._are_due(moved, cutoff) | self._go_to_slots(moved))

    def find_rows(self, times: Iterable[int]) -> pa.Table:
        """Returns all rows of the mutable bucket, and other rows in state that may be due at some times; keeps them.

        Args:
            times: ms since the epoch.
        """
        times = set(times)
        return concat([self._mutable.all_rows(), *self._slots.find_rows(times), *self._waiting.find_rows(times)])

    def find_to_seal(self) -> pa.Table:
        """Returns the rows of `keep_to_seal` that are not sealed yet, except recurring ones; keeps them."""
        rows = self._to_seal.all_rows()
        return rows.filter(pc.is_null(rows["occurrence"]))

    def find_due(self, start: int, end: int) -> pa.Table:
        """Returns the rows in state that are due from `start` to `end`, both included, ms; keeps them."""
        within = (*self._slots.within(start, end), *self._waiting.within(start, end))
        rows = concat([self._mutable.all_rows(), *within])
        due = int64(rows, "deliver_at")
        return where(rows, (due >= start) & (due <= end))

    def _add(self, delayed: pa.Table) -> None:
        if delayed.num_rows:
            is_near = self._go_to_slots(delayed)
            self._slots.add_rows(where(delayed, is_near))
            self._mutable.add_rows(where(delayed, ~is_near))

    def _are_due(self, rows: pa.Table, cutoff: int) -> BoolArray:
        """Tells which new rows come due at once, because they are due at the cutoff (ms) or before: bool, (rows,)."""
        are: BoolArray = int64(rows, "deliver_at") <= cutoff
        # The delayed index may get a large row, and it would be loaded from there, too: those beyond what is loaded.
        return are & ~self._large.wait(rows) if self._large.rule.is_whole else are

    def _go_to_slots(self, delayed: pa.Table) -> BoolArray:
        """Tells which new rows go to time slots, and are not sealed as the mutable bucket's are: bool, (rows,)."""
        return (int64(delayed, "deliver_at") < self.near_until) & ~self._large.wait(delayed)

    def keep_to_seal(self, rows: pa.Table) -> None:
        """Keeps those of some new rows that are sealed however soon they are due, for the next sealed bucket."""
        if not len(self._retried_topics) and not has_occurrences(rows):
            return
        is_kept = pc.or_(pc.is_in(rows["topic"], self._retried_topics), pc.is_valid(rows["occurrence"]))
        self._to_seal.add_rows(rows.filter(pc.and_(is_kept, pc.is_null(rows["sequence"]))))

    def seal_bucket(self, load_horizon: int, near_until: int) -> pa.Table:
        """Makes an immutable bucket of the mutable one, and advances the load horizon.

        The caller then passes to `load_segment` the rows of earlier buckets that are due from the old load horizon
        (included) to the new one (excluded).

        Args:
            load_horizon: from now on all messages due before it are in state; a lower one than before is ignored.
            near_until: from now on new messages due before it go to a time slot, and are not sealed, but for large ones
                that wait and those of `keep_to_seal`. It is lower than before if the clock has been set back.

        Returns:
            the immutable bucket, perhaps empty: rows by `deliver_at`, then position. Those due before the load horizon
            are in state, too. After them come the rows of `keep_to_seal`, which were not in the mutable bucket.
        """
        self.load_horizon = max(load_horizon, self.load_horizon)
        self.near_until = near_until
        bucket = in_order(self._mutable.take_all())
        is_near = (int64(bucket, "deliver_at") < self.load_horizon) & ~self._large.wait(bucket)
        self._slots.add_rows(where(bucket, is_near))
        self._sealed += int((~is_near).sum())
        return concat([bucket, self._to_seal.take_all()])

    def load_segment(self, rows: pa.Table) -> None:
        """Adds rows of immutable buckets that are due before the new load horizon."""
        self._slots.add_rows(rows)
        self._sealed -= rows.num_rows

    def rebuild(self, sealed: int) -> None:
        """Begins after a rebuild: `sealed` messages are in immutable buckets, all due at the load horizon or later."""
        self._sealed = sealed

    def get_scheduled_messages(self, cutoff: int, most: Budget | None = None) -> pa.Table:
        """Removes and returns the messages that are due at the cutoff (ms) or before, in the order of delivery.

        Args:
            cutoff: ms since the epoch.
            most: what they may have together; large ones beyond it stay, and come with a later call. None: all come.
        """
        self.near_until = max(self.near_until, cutoff + 1)
        earliest = self._mutable.earliest
        if earliest is not None and earliest <= cutoff:
            rows = self._mutable.take_all()
            is_near = int64(rows, "deliver_at") < self.near_until
            self.keep_to_seal(where(rows, is_near))
            self._slots.add_rows(where(rows, is_near))
            self._mutable.add_rows(where(rows, ~is_near))
        return self._slots.take_due(cutoff, most)

    def put_off(self, rows: pa.Table) -> None:
        """Adds due rows, which `get_scheduled_messages` returns with a later call."""
        self._slots.add_rows(rows)

    def drop_expired(self, cutoff: int) -> None:
        """Forgets the positions of ledgers whose last message was due at the cutoff (ms) or before.

        An entry whose position is forgotten would be added again if it came again. So call this only after all messages
        due at the cutoff have been removed.
        """
        self._bits.drop_expired(cutoff)

    def save(self) -> None:
        """Writes the changes to the store."""
        # An earlier program does not know piles: with a value too many it says that the state lacks one.
        piles = self._slots.piles
        slots = [[slot, n + (slot in piles), rows] for slot, (n, rows) in self._slots.meta.items()]
        slots += [[slot, 1, 0] for slot in piles.keys() - self._slots.meta.keys()]
        meta = {
            "format": _FORMAT,
            "mutable": self._mutable.meta,
            "slots": slots,
            "sealed": self._sealed,
            "near_until": self.near_until,
            "load_horizon": self.load_horizon,
        }
        if self.complete_until != self.load_horizon:
            meta["complete_until"] = self.complete_until
        if self._slots.large:
            meta["large"] = list(self._slots.large.items())
        if piles:
            meta["piles"] = [[slot, *pile] for slot, pile in piles.items()]
            if self._slots.pile_rule is not None:
                meta["pile_rule"] = LargeRows(self._slots.pile_rule).to_json()
        if len(self._waiting):
            meta["waiting"] = self._waiting.meta
        if self._to_seal.n_chunks:
            meta["recurring"] = [self._to_seal.n_chunks, self._to_seal.n_rows]
        data = json.dumps(meta, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_TABLE, (0, 0), data)
            self._saved = data
