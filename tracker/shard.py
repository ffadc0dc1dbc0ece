"""A shard of the tracker, which applies one tick after another to its state.

What is delivered when, and what a command does, is decided here and in the classes that a shard is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.cancelled import Compression
from tracker.commands.control import Control
from tracker.commands.giving_up import GivenUp, GivingUp
from tracker.commands.match import with_released
from tracker.commands.moment import Moment
from tracker.commands.moves import HELD_DELIVER_AT, held
from tracker.commands.pace import PACE_MILLIS, PACE_ROWS, Pace
from tracker.commands.rebuilt import Rebuilt
from tracker.commands.repeats import FirstAnswers, no_answers
from tracker.commands.retries import take_sent_back
from tracker.commands.schema import (
    CANCEL_ROWS,
    COMMAND_ROWS,
    KNOWN,
    OUTCOME_ROWS,
    PAST,
    RESCHEDULE,
    RESTORE,
    RETRY,
    SKIP_NEXT,
    PauseChange,
)
from tracker.dead_letters import dead_letters_of, without_dead_letters
from tracker.entry_log import EMPTY_ENTRIES, KEPT_SCHEMA, EntryLog
from tracker.in_flight import PLANNED, REJECTED, SENDING, InFlight, OpenReleases, Release
from tracker.key_order import KeyOrder
from tracker.keys.superseding import Superseding
from tracker.messages import (
    MESSAGES,
    BoolArray,
    are_recurring,
    attempts_of,
    concat,
    empty_table,
    has_keys,
    has_occurrences,
    in_order,
    int64,
    is_among,
    is_left_out,
    is_rejected,
    of_entries,
    where,
    with_columns,
)
from tracker.shaping.shaper import Places, Shaper
from tracker.shaping.spans import first_due
from tracker.sharding import Place
from tracker.store import Store
from tracker.subscriptions import Subscriptions


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One step of the job's clock, the same for all shards, and the same when it is replayed.

    Times are ms since the Unix epoch. A seal epoch ends with a tick at which the mutable bucket is sealed and the next
    segment of the sealed ones is loaded. It is durable when all messages that came in up to its end are in the delayed
    index or delivered; only then its entries are written to `entries` and acknowledged.
    """

    tick: int  # the tick's number, from 1
    cutoff: int  # time: messages due then or before are released
    seal_epoch: int  # how many seal epochs have ended by this tick (included)
    load_horizon: int  # time: all messages due before it are in state
    near_until: int  # time: new messages due before it go to a time slot, later ones to the mutable bucket
    run_id: str  # of the run of the job that made the tick
    confirmed: int  # a tick's number: its and earlier releases have arrived and are written down, or are open
    durable_through: int  # a seal epoch's number: it and all before are durable
    now: int = 0  # time: the job's clock
    ingested_through: int = 0  # a tick's number: all messages published before the commands up to it have come in
    sending: str = "{}"  # JSON: how this tick's releases are sent, also when they are handed out again
    # Unwritable destinations, by source topic and subscription ("" is the topic for rejects). `open`: the releases
    # [tick, kind] that have not arrived there. `rejects`: the reason why messages that come due for it are
    # rejected; where it is missing, they are held back.
    unwritable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)  # for what waited for this tick in all shards, beyond the rate of one


@dataclass(frozen=True, kw_only=True)
class TickInput:
    """The input of a shard for one tick. Each table has the columns of the schema that its default has."""

    # New messages in any order: whole entries, but for messages with a schedule key, which may be in other shards.
    messages: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # New ones of this shard's entries, in other shards.
    notes: pa.Table = field(default_factory=partial(empty_table, KEPT_SCHEMA))
    # Sealed rows due from the last tick's load horizon (included) to this tick's (excluded).
    segment: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # This shard's, in the control topic's order.
    commands: pa.Table = field(default_factory=partial(empty_table, COMMAND_ROWS))
    # By request id, of all shards' commands, the hash of the body of the first command that has it.
    request_ids: Mapping[str, int] = field(default_factory=dict)
    known_messages: pa.Table = field(default_factory=partial(empty_table, KNOWN))  # durable ones that the commands name
    # Sealed rows to reschedule, restore, retry, resume or move on.
    payload_rows: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    pause_changes: Sequence[PauseChange] = ()  # pauses and resumes of all shards
    rebuilt: Rebuilt | None = None  # only in the first tick after a rebuild
    # Of the control topic, with a reason.
    rejected_commands: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    first_answers: FirstAnswers = no_answers  # reads the same version of the tables that `known_messages` are from
    # Messages rejected in earlier ticks that have not been sent to the topic for rejects, because it was unwritable.
    rejected: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # Topics with a route again, or with a subscription that is new: `payload_rows` has the rows held back for them.
    reinstated: Collection[str] = ()
    pace: Pace = field(default_factory=dict)  # at which rows that were held back go out, of all shards' rows


@dataclass
class Effects:
    """The output of a shard for one tick: what is to be sent and written to the tables."""

    releases: list[Release] = field(default_factory=list)  # to send
    bucket: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # the sealed bucket, for the delayed index
    # CANCEL, RESTORE and MOVE rows sealed with it.
    cancels: pa.Table = field(default_factory=partial(empty_table, CANCEL_ROWS))
    entries: pa.Table = field(default_factory=lambda: EMPTY_ENTRIES)  # entries that are durable now, a row each
    rejects: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # rejected messages, with a reason
    outcomes: pa.Table = field(default_factory=partial(empty_table, OUTCOME_ROWS))  # answers to commands
    status: dict[str, int] = field(default_factory=dict)  # counts of this tick and of the state after it
    # By source topic and subscription's name the last time that shaping has given a message, ms since the epoch.
    shaped_until: dict[str, dict[str, int]] = field(default_factory=dict)
    # By source topic and subscription's name how many rows wait for the next tick's places, and the last place given.
    waiting: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class Shard:
    """One shard of the tracker: delayed messages, commands, releases in flight and entries not yet durable, on a store.

    All state is in the store: after each `apply` another shard on the same store goes on from there. The same ticks
    and inputs give the same effects.

    Args:
        store: the shard's state.
        subscriptions: those of each source topic; a mapping of topic to names where all of them are in the settings.
        min_index_count_per_bucket: number of rows at which the mutable bucket is sealed before the seal epoch ends.
        tick_time_millis: Pulsar's tick, ms; cancelled messages are remembered for two of them beyond their time.
        compression: of the bitmaps of cancelled and skipped messages.
        place: which of the shards this is; None: the only one.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        min_index_count_per_bucket: int,
        tick_time_millis: int = 1000,
        compression: Compression | None = None,
        place: Place | None = None,
    ) -> None:
        self._store = store
        place = place or Place()
        self._subscriptions = Subscriptions.of(subscriptions)
        self._names = self._subscriptions.names
        self._min_index_count = min_index_count_per_bucket
        self._tracker = DelayedDeliveryTracker(store)
        self._control = Control(store, subscriptions, tick_time_millis, compression, place)
        self._keys = Superseding(store, self._control)
        self._in_flight = InFlight(store)
        self._shaper = Shaper(store, self._subscriptions, self._control.operations, place)
        self._key_order = KeyOrder(self._subscriptions)
        self._entries = EntryLog(store, place.is_home)
        self._place = place

    def apply(self, tick: Tick, tick_input: TickInput) -> Effects:
        """Applies one tick: takes messages in, applies commands, seals and loads buckets, releases what is due.

        Args:
            tick: the clock's step, later than all that were applied before.
            tick_input: messages and commands of the tick.

        Returns:
            what is to be sent and written; the state is saved in the store.

        Raises:
            ValueError: an entry id is negative or beyond 2^32 - 1.
            StateLost: the store lacks a value that an earlier tick put there.
            SequencesExhausted: the tick has more commands and moves than there are sequences.
        """
        last_seal_epoch, released, last_run_id, highest_cutoff = self._last()
        ends_seal_epoch = tick.seal_epoch != last_seal_epoch
        if tick_input.rebuilt is not None:
            released = tick_input.rebuilt.released
        moment = Moment(tick.tick, tick.now, released, tick.ingested_through)
        if released < highest_cutoff and (tick_input.commands.num_rows or has_keys(tick_input.messages)):
            moment = replace(
                moment, highest_cutoff=highest_cutoff, waiting=self._tracker.waiting(released + 1, highest_cutoff)
            )
        effects = Effects()
        self._control.begin(self._unwritable(tick), tick_input.pace, tick.now, released, tick.cutoff)
        open_releases = self._open_releases(tick)
        opened = self._in_flight.confirm(tick.confirmed, open_releases)
        kept_open = concat([self._control.keep_open(release.rows, moment) for release in opened])
        giving_up = GivingUp(tick.unwritable, self._names, tick.tick, tick.now)
        rows = self._in_flight.take_open(giving_up.of(open_releases))
        next_sequence = partial(self._control.next_sequence, moment)
        given_up = [giving_up.take(rows, int64(rows, "subscription_mask"), next_sequence)[0]]
        if tick.run_id != last_run_id:
            effects.releases += self._in_flight.all()
            if self._shaper:
                self._shaper.begin_again(first_due(effects.releases), moment)

        if tick_input.rebuilt is not None:
            self._tracker.rebuild(tick_input.rebuilt.sealed)
            self._control.rebuild(tick_input.rebuilt, tick.now)
            self._keys.rebuild(tick_input.rebuilt.keys)
            self._shaper.rebuild(tick_input.rebuilt.shaped_until)
            self._control.release_held(held(tick_input.payload_rows), moment)

        if tick_input.reinstated:
            rows = concat([held(tick_input.payload_rows), held(self._tracker.find(()))])
            self._control.reinstate(tick_input.reinstated, rows, moment)

        # Messages first, then commands: a command that was sent after its message finds it.
        sent_back = take_sent_back(tick_input.messages, self._subscriptions, tick.now)
        messages = sent_back.messages
        if sent_back.commands.num_rows:
            # They come with their messages: what a later command says of these is later.
            all_commands = concat([sent_back.commands, tick_input.commands], COMMAND_ROWS)
            tick_input = replace(tick_input, messages=messages, commands=all_commands)
        rejected = is_rejected(messages)
        # After a rebuild, messages that are done with may come again.
        is_done = self._control.are_done(messages) if self._control.has_exceptions else np.zeros_like(rejected)
        is_new = ~rejected & ~is_done
        outcomes: list[pa.Table] = []
        if sent_back.outcomes.num_rows:
            is_first = is_new & ~self._tracker.knows(messages)
            outcomes.append(where(sent_back.outcomes, is_first[sent_back.row]))
        if has_keys(messages):
            decided = self._keys.take(messages, is_new & ~self._tracker.knows(messages), moment)
            messages, is_new = decided.messages, is_new & ~decided.dropped
            outcomes.append(decided.outcomes)
        new = where(messages, is_new)
        self._control.take_in(new)
        done = where(messages, ~is_rejected(messages) & is_done)
        arrived = self._control.arrive(messages, moment, new, tick_input.notes, done)
        outcomes.append(arrived)
        taken = _past_where(rejected, messages)
        if has_keys(tick_input.commands):
            by_key, known_by_key = self._keys.resolve(tick_input.commands, moment)
            tick_input = replace(tick_input, commands=by_key)
        else:
            known_by_key = empty_table(KNOWN)
        taken = concat([taken.select(KEPT_SCHEMA.names), tick_input.notes], KEPT_SCHEMA)
        known, is_new = self._known(tick_input, taken, known_by_key)
        self._entries.add(taken, tick.seal_epoch if ends_seal_epoch else tick.seal_epoch + 1)
        effects.rejects = where(messages, rejected)
        short_notice = self._tracker.add_messages(new, tick.cutoff)
        payload_rows = self._payload_rows(tick_input, new, known)
        outcomes.append(
            self._control.apply(
                tick_input.commands,
                tick_input.request_ids,
                known,
                is_new,
                moment,
                payload_rows,
                tick_input.pause_changes,
                self._held(tick_input),
                tick_input.first_answers,
                arrived,
            )
        )
        moves = self._control.take_moves()
        near_moves = self._tracker.near(moves, tick.cutoff)
        moved = self._tracker.add_moved(moves, tick.cutoff)

        is_full = self._tracker.number_of_unsealed_messages >= self._min_index_count
        # No one comes again to tell of a retry: it is sealed with the answer.
        is_retried = bool((attempts_of(moves) > 0).any())
        if ends_seal_epoch or is_full or kept_open.num_rows or is_retried or near_moves.num_rows:
            bucket = self._tracker.seal(tick.load_horizon, tick.near_until)
            effects.bucket = concat([bucket, kept_open, near_moves])
            effects.cancels = self._control.take_cancels()
        self._tracker.load_segment(tick_input.segment)
        if ends_seal_epoch:
            outcomes.append(self._control.expire(moment))
            effects.entries = self._entries.take(tick.durable_through)

        planned = self._tracker.get_scheduled_messages(tick.cutoff)
        # Messages that are left out go nowhere, not to the rejects topic either.
        left_out = is_left_out(effects.rejects)
        rejects = self._sent_rejects(tick, concat([where(effects.rejects, ~left_out), given_up[0].rejects]))
        rejects = concat([rejects, self._rejects_sent_again(tick, tick_input.rejected)])
        at_once = in_order(pa.concat_tables([rejects, short_notice, moved]))
        if self._shaper:
            self._shaper.notice_late(concat([at_once, planned]), moment)
            self._shaper.give(tick.places)
        n_short, short_given_up = self._release(tick, effects, 0, at_once, moment, giving_up)
        n_planned, planned_given_up = self._release(tick, effects, PLANNED, planned, moment, giving_up)
        for kind, rows in self._key_order.releases(released):
            self._hand_over(tick, effects, kind, rows)
        given_up += [short_given_up, planned_given_up]
        effects.outcomes = concat([*outcomes, *(one.outcomes for one in given_up)], OUTCOME_ROWS)
        moved = self._control.take_moves()
        near = self._tracker.near(moved, tick.cutoff)
        self._tracker.add_moved(moved, tick.cutoff)
        if self._shaper.n_moved or self._control.n_put_behind:
            others = self._tracker.seal(tick.load_horizon, tick.near_until)
            effects.bucket = concat([effects.bucket, others, near])
            effects.cancels = concat([effects.cancels, self._control.take_cancels()], CANCEL_ROWS)
        effects.rejects = concat([effects.rejects, tick_input.rejected_commands, *(one.rejects for one in given_up)])
        if ends_seal_epoch:
            # Only after due messages have been handed out: when the job stood still, they may be long past. What waits
            # for the next tick's places has not been.
            next_due = tick.cutoff + 1 if self._tracker.next_due is None else self._tracker.next_due
            past = min(tick.cutoff, next_due - 1)
            self._tracker.drop_expired(past)
            self._control.drop_expired(past)
            self._shaper.forget_past(tick.now)
            self._keys.sweep(moment)
        effects.status = {
            "tick": tick.tick,
            "now": tick.now,
            "cutoff": tick.cutoff,
            "next_due": HELD_DELIVER_AT if self._tracker.next_due is None else self._tracker.next_due,
            "taken": messages.num_rows,
            "rejected": effects.rejects.num_rows - int(left_out.sum()),
            "left_out": int(left_out.sum()),
            "short_notice": n_short - rejects.num_rows,
            "planned": n_planned,
            "sealed": effects.bucket.num_rows,
            "segment": tick_input.segment.num_rows,
            "delayed": self._tracker.number_of_delayed_messages - self._control.unwanted + self._in_flight.open,
            "loaded": self._tracker.number_of_loaded_messages,
            "in_flight": len(self._in_flight),
            "commands": tick_input.commands.num_rows,
            "waiting_commands": self._control.waiting,
            "taken_back": self._control.cancelled.count,
            "taken_back_bytes": self._control.cancelled.n_bytes,
            "shaped": self._shaper.n_moved,
            "misfires": self._control.occurrences.n_misfires,
        }
        effects.shaped_until, effects.waiting = self._shaper.until, self._shaper.waiting
        self._save(tick)
        return effects

    def _known(self, tick_input: TickInput, messages: pa.Table, by_key: pa.Table) -> tuple[pa.Table, BoolArray]:
        """Returns the messages of the entries that commands name, as KNOWN, and which of them are new: bool, (rows,).

        New are those that came in only in this tick and are not rejected.

        Args:
            messages: those that came in, as KEPT_SCHEMA, and notes of them.
            by_key: as KNOWN, of earlier ticks, those that commands name by their schedule key.
        """
        if not tick_input.commands.num_rows:
            return empty_table(KNOWN), np.zeros(0, np.bool_)
        wanted = tick_input.commands.select(["ledger_id", "entry_id"]).group_by(["ledger_id", "entry_id"]).aggregate([])
        new, recent, durable = (
            rows.select(KNOWN.names)
            .join(wanted, ["ledger_id", "entry_id"], join_type="inner", use_threads=False)
            .select(KNOWN.names)
            for rows in (messages, self._entries.all(), self._with_released(tick_input.known_messages))
        )
        # An entry that is not durable yet is known here as a whole, in the delayed index perhaps in part.
        durable = durable.join(recent, ["ledger_id", "entry_id"], join_type="left anti", use_threads=False)
        known = pa.concat_tables([new, recent, durable.select(KNOWN.names)]).cast(KNOWN)
        if by_key.num_rows:
            is_there = is_among(by_key, known, ["ledger_id", "entry_id", "batch_index"])
            known = pa.concat_tables([known, where(by_key, ~is_there)])
        is_new = np.zeros(known.num_rows, np.bool_)
        is_new[: new.num_rows] = int64(new, "deliver_at") > PAST
        return known, is_new

    def _with_released(self, durable: pa.Table) -> pa.Table:
        """Completes the entries that are at home here: see `with_released`."""
        if not has_keys(durable):
            return with_released(durable)
        is_home = self._place.is_home(durable)
        return pa.concat_tables([with_released(where(durable, is_home)), where(durable, ~is_home)])

    def _payload_rows(self, tick_input: TickInput, messages: pa.Table, known: pa.Table) -> pa.Table:
        """Returns rows, as MESSAGES, of the known messages that commands move or restore, wherever they are."""
        if not tick_input.commands.num_rows:
            return empty_table(MESSAGES)
        kinds = pc.is_in(tick_input.commands["kind"], pa.array([RESCHEDULE, RESTORE, RETRY, SKIP_NEXT]))
        if not pc.any(kinds).as_py():
            return empty_table(MESSAGES)
        wanted = tick_input.commands.filter(kinds).select(["ledger_id", "entry_id"])
        wanted = wanted.group_by(["ledger_id", "entry_id"]).aggregate([])
        known = known.join(wanted, ["ledger_id", "entry_id"], join_type="inner", use_threads=False)
        times = {*known["deliver_at"].to_pylist(), *self._control.moved_to(known)}
        return concat(
            of_entries(rows, wanted) for rows in (messages, self._tracker.find(times), tick_input.payload_rows)
        )

    def _held(self, tick_input: TickInput) -> pa.Table:
        """Returns all rows that are held back, as MESSAGES, if a command resumes a subscription; else none."""
        if all(change.is_paused for change in tick_input.pause_changes):
            return empty_table(MESSAGES)
        return concat([held(tick_input.payload_rows), held(self._tracker.find(()))])

    def _release(
        self, tick: Tick, effects: Effects, kind: int, rows: pa.Table, moment: Moment, giving_up: GivingUp
    ) -> tuple[int, GivenUp]:
        """Hands due rows out to the subscriptions that they go to; returns how many rows, and those given up."""
        if not rows.num_rows:
            return 0, GivenUp()
        masks = self._control.hand_out(rows, moment)
        next_sequence = partial(self._control.next_sequence, moment)
        recurs = are_recurring(rows)
        given_up, others = giving_up.take(rows, np.where(recurs, 0, masks), next_sequence)
        masks = np.where(recurs, masks, others)
        placed = None
        if self._shaper:
            masks, placed, waiting = self._shaper.shape(rows, masks, moment, tick.cutoff)
            self._tracker.put_back(waiting)
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        if placed is not None and placed.num_rows:
            rows = in_order(concat([rows, placed], rows.schema))
        if has_occurrences(rows):
            rows, given_up = self._move_on(rows, given_up, tick, moment, giving_up)
        n = rows.num_rows
        if given_up.rejects.num_rows:
            rejects = self._sent_rejects(tick, given_up.rejects)
            rejects = rejects.append_column("subscription_mask", pa.array(np.zeros(rejects.num_rows, np.int64)))
            rows = in_order(concat([rows, rejects], rows.schema))
        self._hand_over(tick, effects, kind, self._key_order.take(rows))
        return n, given_up

    def _hand_over(self, tick: Tick, effects: Effects, kind: int, rows: pa.Table) -> None:
        """Makes a release of rows, if there are any, and keeps it until it is confirmed."""
        if rows.num_rows:
            release = Release(tick.tick, kind, rows.replace_schema_metadata({SENDING: tick.sending}))
            self._in_flight.add(release)
            effects.releases.append(release)

    def _move_on(
        self, rows: pa.Table, given_up: GivenUp, tick: Tick, moment: Moment, giving_up: GivingUp
    ) -> tuple[pa.Table, GivenUp]:
        """Moves the recurring messages of a release on, and gives up their occurrences where that has to be.

        Args:
            rows: as MESSAGES and `subscription_mask`.
            given_up: what is given up of the others.
        """
        masks = int64(rows, "subscription_mask")
        rows, one_by_one = rows.drop_columns(["subscription_mask"]), self._shaper.shapes(rows)
        rows, masks = self._control.occurrences.hand_out(rows, masks, moment, tick.cutoff, one_by_one)
        more, masks = giving_up.take(rows, masks, partial(self._control.next_sequence, moment))
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        outcomes = concat([given_up.outcomes, more.outcomes], OUTCOME_ROWS)
        return rows, GivenUp(concat([given_up.rejects, more.rejects]), outcomes)

    def _sent_rejects(self, tick: Tick, rejects: pa.Table) -> pa.Table:
        """Returns the new rejects whose rejects topic can be written; the others are only in the table `rejects`."""
        held = [topic for topic, names in tick.unwritable.items() if "" in names]
        return rejects.filter(pc.invert(pc.is_in(rejects["topic"], pa.array(held, pa.string())))) if held else rejects

    def _rejects_sent_again(self, tick: Tick, rejects: pa.Table) -> pa.Table:
        """Returns the rejects of earlier ticks that are sent to their topics now.

        Of many, PACE_ROWS are sent each PACE_MILLIS: the rest waits in the tracker.
        """
        if not rejects.num_rows:
            return rejects
        times = tick.now + np.arange(rejects.num_rows) // PACE_ROWS * PACE_MILLIS
        return self._tracker.add_moved(with_columns(rejects, deliver_at=pa.array(times)), tick.cutoff)

    def _unwritable(self, tick: Tick) -> dict[str, int]:
        """Returns by topic the unwritable subscriptions whose due messages are held back, not rejected, as bits."""
        return {
            topic: sum(self._bit(topic, name) for name, one in names.items() if name and "rejects" not in one)
            for topic, names in tick.unwritable.items()
        }

    def _open_releases(self, tick: Tick) -> OpenReleases:
        """Returns the releases that have not arrived at some destination, with the subscriptions as bits."""
        found: dict[tuple[int, int], dict[str, int]] = {}
        for topic, names in tick.unwritable.items():
            for name, unwritable in names.items():
                subscription, is_dead = without_dead_letters(name)
                bit = self._bit(topic, subscription) if name else REJECTED
                of = dead_letters_of(topic) if is_dead else topic
                for of_tick, kind in unwritable["open"]:
                    release = found.setdefault((of_tick, kind), {})
                    release[of] = release.get(of, 0) | bit
        return found

    def _bit(self, topic: str, name: str) -> int:
        names = list(self._names.get(topic, ()))
        return 1 << names.index(name) if name in names else 0

    def _last(self) -> tuple[int, int, str, int]:
        """Returns the last tick's seal epoch, cutoff and run id, and the highest cutoff so far."""
        seal_epoch, cutoff, run_id, *highest = (self._store.get("shard", (0, 0)) or b"0 0 ").decode().split(" ")
        return int(seal_epoch), int(cutoff), run_id, int(highest[0] if highest else cutoff)

    def _save(self, tick: Tick) -> None:
        highest_cutoff = max(tick.cutoff, self._last()[3])
        last = f"{tick.seal_epoch} {tick.cutoff} {tick.run_id} {highest_cutoff}".encode()
        if last != self._store.get("shard", (0, 0)):
            self._store.put("shard", (0, 0), last)
        self._tracker.save()
        self._control.save()
        self._shaper.save()
        self._in_flight.save()
        self._entries.save()
        self._keys.save()


def _past_where(rejected: BoolArray, messages: pa.Table) -> pa.Table:
    """Returns the messages, with the rejected ones due at PAST: as if handed out, so that no command applies."""
    if not rejected.any():
        return messages
    return with_columns(messages, deliver_at=pa.array(np.where(rejected, PAST, int64(messages, "deliver_at"))))
