"""What one shard does in one tick. All decisions of the service are made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tracker.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.entry_log import EMPTY_ENTRIES, EntryLog
from tracker.in_flight import SENDING, InFlight, Release
from tracker.messages import MESSAGES, in_order, is_rejected, where
from tracker.store import Store


@dataclass(frozen=True)
class Tick:
    """One step of the clock, the same for all shards, and the same when it is replayed.

    A turn is a tick at which buckets are sealed and segments are loaded. `booked` is the last turn before which all
    that came in is settled: in the delayed index, or delivered.
    """

    tick: int  # counts up from 1
    cutoff: int  # what is due at this time or before is handed out
    turn: int  # how many turns there have been, this tick's included
    load_horizon: int  # what is due before it is in state
    near_until: int  # what comes in due before it goes to a slot
    run: str  # the run of the job that made the tick
    confirmed: int  # the releases of this tick and earlier ones are finished
    booked: int
    sending: str = "{}"  # how releases of this tick are to be sent, also when they are handed out again


@dataclass
class Effects:
    """What a tick leads to outside the shard."""

    releases: list[Release] = field(default_factory=list)
    bucket: pa.Table = field(default_factory=MESSAGES.empty_table)  # a sealed bucket
    entries: pa.Table = field(default_factory=lambda: EMPTY_ENTRIES)  # entries that are booked now
    rejects: pa.Table = field(default_factory=MESSAGES.empty_table)  # messages that could not be taken
    status: dict[str, int] = field(default_factory=dict)


class Shard:
    """A shard's tracker, its releases in flight and its entries, on one store.

    Args:
        store: the shard's state.
        subscriptions: for each source topic, how many subscriptions its messages go to.
        min_index_count_per_bucket: the mutable bucket is sealed when it holds this many rows, else at each turn.
    """

    def __init__(self, store: Store, subscriptions: Mapping[str, int], min_index_count_per_bucket: int) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._min_index_count = min_index_count_per_bucket
        self._tracker = DelayedDeliveryTracker(store)
        self._in_flight = InFlight(store)
        self._entries = EntryLog(store)

    def apply(self, tick: Tick, messages: pa.Table, segment: pa.Table) -> Effects:
        """Takes in what came, and hands out what is due.

        Args:
            tick: the clock.
            messages: new messages, whole entries, in any order.
            segment: rows of immutable buckets due from the last load horizon to this one.
        """
        previous_turn, previous_run = self._last()
        effects = Effects()
        self._in_flight.confirm(tick.confirmed)
        if tick.run != previous_run:
            effects.releases += self._in_flight.all()

        is_turn = tick.turn != previous_turn
        self._entries.add(messages, tick.turn if is_turn else tick.turn + 1)
        rejected = is_rejected(messages)
        effects.rejects = where(messages, rejected)
        short_notice = self._tracker.add_messages(where(messages, ~rejected), tick.cutoff)

        if is_turn or self._tracker.number_of_unsealed_messages >= self._min_index_count:
            effects.bucket = self._tracker.seal(tick.load_horizon, tick.near_until)
        self._tracker.load_segment(segment)
        if is_turn:
            self._tracker.drop_expired(tick.cutoff)
            effects.entries = self._entries.take(tick.booked)

        planned = self._tracker.get_scheduled_messages(tick.cutoff)
        for rows, is_planned in ((in_order(pa.concat_tables([effects.rejects, short_notice])), False), (planned, True)):
            if rows.num_rows:
                rows = rows.append_column("wants", self._wants(rows)).replace_schema_metadata({SENDING: tick.sending})
                release = Release(tick.tick, is_planned, rows)
                self._in_flight.add(release)
                effects.releases.append(release)

        effects.status = {
            "tick": tick.tick,
            "cutoff": tick.cutoff,
            "taken": messages.num_rows,
            "rejected": effects.rejects.num_rows,
            "short_notice": short_notice.num_rows,
            "planned": planned.num_rows,
            "sealed": effects.bucket.num_rows,
            "segment": segment.num_rows,
            "delayed": self._tracker.number_of_delayed_messages,
            "loaded": self._tracker.number_of_loaded_messages,
            "in_flight": len(self._in_flight),
        }
        self._save(tick)
        return effects

    def _wants(self, rows: pa.Table) -> pa.Array:
        """For each row the set of its topic's subscriptions, as bits; none for a rejected row."""
        topics = rows["topic"].combine_chunks().dictionary_encode()
        masks = np.array(
            [(1 << self._subscriptions.get(t, 0)) - 1 for t in topics.dictionary.to_pylist()], dtype=np.int64
        )
        return pa.array(np.where(is_rejected(rows), 0, masks[topics.indices.to_numpy()]))

    def _last(self) -> tuple[int, str]:
        turn, _, run = (self._store.get("shard", (0, 0)) or b"0 ").decode().partition(" ")
        return int(turn), run

    def _save(self, tick: Tick) -> None:
        last = f"{tick.turn} {tick.run}".encode()
        if last != self._store.get("shard", (0, 0)):
            self._store.put("shard", (0, 0), last)
        self._tracker.save()
        self._in_flight.save()
        self._entries.save()
