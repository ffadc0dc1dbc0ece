"""A shard of the tracker, which applies one tick after another to its state.

What is delivered when, and what a command does, is decided here and in the classes that a shard is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.buckets.waiting_rows import Queue
from tracker.commands.control import Control
from tracker.commands.holding.giving_up import GivingUp
from tracker.commands.holding.pace import PACE_MILLIS, PACE_ROWS
from tracker.commands.message_state.cancelled import Compression
from tracker.commands.message_state.moves import HELD_DELIVER_AT, held
from tracker.commands.message_state.rebuilt import Rebuilt
from tracker.commands.moment import Moment
from tracker.commands.retries import take_sent_back
from tracker.commands.schema import CANCEL_ROWS, COMMAND_ROWS, KNOWN, OUTCOME_ROWS, PAST
from tracker.entry_log import KEPT_SCHEMA, EntryLog
from tracker.in_flight import PLANNED, InFlight
from tracker.keys.superseding import Superseding
from tracker.messages import (
    MESSAGES,
    BoolArray,
    attempts_of,
    concat,
    empty_table,
    has_keys,
    in_order,
    int64,
    is_left_out,
    is_rejected,
    where,
    with_columns,
)
from tracker.shaping.shaper import Shaper
from tracker.shaping.spans import first_due
from tracker.sharding import Place
from tracker.stages.named_messages import Named, NamedMessages
from tracker.stages.releasing import Releasing
from tracker.stages.tick_in_progress import TickInProgress
from tracker.stages.unwritable import held_back, open_releases, sent_rejects
from tracker.store import Store
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput


class _Last(NamedTuple):
    """The tick before. Times are ms since the epoch."""

    seal_epoch: int
    cutoff: int
    run_id: str
    highest_cutoff: int  # of all ticks so far


class _Taken(NamedTuple):
    """The messages that came in in a tick, sorted by what becomes of them."""

    new: pa.Table  # as MESSAGES: what is added to the tracker
    noted: pa.Table  # as KEPT_SCHEMA: all of it, with the notes of what other shards have
    arrived: pa.Table  # as OUTCOME_ROWS: of the commands that waited for it


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
        key_idle_millis: schedule keys that nothing has named for so long may leave the state.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        min_index_count_per_bucket: int,
        tick_time_millis: int = 1000,
        compression: Compression | None = None,
        place: Place | None = None,
        key_idle_millis: int = 600_000,
    ) -> None:
        self._store = store
        self._place = place = place or Place()
        self._subscriptions = Subscriptions.of(subscriptions)
        self._names = self._subscriptions.names
        self._min_index_count = min_index_count_per_bucket
        self._tracker = DelayedDeliveryTracker(store)
        self._control = Control(store, subscriptions, tick_time_millis, compression, place)
        self._keys = Superseding(store, self._control, self._subscriptions, key_idle_millis)
        self._in_flight = InFlight(store, self._names)
        self._shaper = Shaper(store, self._subscriptions, self._control.operations, place)
        self._releasing = Releasing(self._subscriptions, self._tracker, self._control, self._shaper, self._in_flight)
        self._entries = EntryLog(store, place.is_home)
        self._named = NamedMessages(self._tracker, self._entries, self._control, place)

    def apply(self, tick: Tick, tick_input: TickInput) -> Effects:
        """Applies one tick: takes messages in, applies commands, seals and loads buckets, releases what is due.

        Args:
            tick: the clock's step, later than all that were applied before.
            tick_input: messages and commands of the tick.

        Returns:
            what is to be sent and written; the state is saved in the store.

        Raises:
            ValueError: an entry id is negative or beyond 2^32 - 1.
            StateLostError: the store lacks a value that an earlier tick put there.
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        last = self._last()
        step = self._begin(tick, tick_input, last)
        kept_open = self._confirm_releases(step)
        self._shaper.begin(step.moment, tick.confirmed)
        if tick.run_id != last.run_id:
            self._release_again(step)
        if tick_input.rebuilt is not None:
            self._rebuild(step, tick_input.rebuilt)
        if tick_input.reinstated:
            self._control.reinstate(tick_input.reinstated, self._named.held(tick_input), step.moment)

        # Messages first, then commands: a command that was sent after its message finds it.
        taken = self._take_messages(step)
        named = self._find_named(step, taken)
        short_notice = self._add_messages(step, taken)
        self._apply_commands(step, taken, named)
        moved = self._seal_and_load(step, kept_open)
        if step.ends_seal_epoch:
            step.outcomes.append(self._control.expire(step.moment))
            step.effects.entries = self._entries.take(tick.durable_through)

        self._release(step, short_notice, moved)
        self._seal_moved_on(step)
        if step.ends_seal_epoch:
            self._forget_past(step)
        effects = self._effects(step)
        self._save(tick)
        return effects

    def _begin(self, tick: Tick, tick_input: TickInput, last: _Last) -> TickInProgress:
        released = last.cutoff if tick_input.rebuilt is None else tick_input.rebuilt.released
        moment = Moment(tick.tick, tick.now, released, tick.ingested_through)
        if released < last.highest_cutoff and (tick_input.commands.num_rows or has_keys(tick_input.messages)):
            waiting = self._tracker.waiting(released + 1, last.highest_cutoff)
            moment = replace(moment, highest_cutoff=last.highest_cutoff, waiting=waiting)
        unwritable = held_back(tick.unwritable, self._names)
        self._control.begin(unwritable, tick_input.pace, tick.now, released, tick.cutoff)
        self._keys.begin(tick_input.find_keyed, self._tracker.load_horizon)
        return TickInProgress(
            tick=tick,
            input=tick_input,
            moment=moment,
            giving_up=GivingUp(tick.unwritable, self._names, tick.tick, tick.now),
            ends_seal_epoch=tick.seal_epoch != last.seal_epoch,
            commands=tick_input.commands,
        )

    def _confirm_releases(self, step: TickInProgress) -> pa.Table:
        """Forgets what has arrived, and gives up what is not to be sent any more.

        Returns:
            MESSAGES, rows to be sealed for the messages of a release that have not arrived.
        """
        releases = open_releases(step.tick.unwritable, self._names)
        opened = self._in_flight.confirm(step.tick.confirmed, releases)
        kept_open = concat([self._control.keep_open(release.rows, step.moment) for release in opened])
        rows = self._in_flight.take_open(step.giving_up.of(releases))
        # What is to come again as a retry is not rejected: that has not come due yet.
        masks = self._control.without_retried(rows, int64(rows, "subscription_mask"))
        next_sequence = partial(self._control.next_sequence, step.moment)
        step.given_up.append(step.giving_up.take(rows, masks, next_sequence)[0])
        return kept_open

    def _release_again(self, step: TickInProgress) -> None:
        """Hands out again, in the first tick of a run, all that is in flight."""
        step.effects.releases += self._in_flight.all()
        if self._shaper:
            self._shaper.begin_again(first_due(step.effects.releases), step.moment)

    def _rebuild(self, step: TickInProgress, rebuilt: Rebuilt) -> None:
        self._tracker.rebuild(rebuilt.sealed)
        self._control.rebuild(rebuilt, step.tick.now)
        self._keys.rebuild(rebuilt.keys)
        self._shaper.rebuild(rebuilt.shaped_until)
        self._control.release_held(held(step.input.payload_rows), step.moment)

    def _take_messages(self, step: TickInProgress) -> _Taken:
        """Decides which of the messages that came in are new, and applies the commands that waited for them."""
        sent_back = take_sent_back(step.input.messages, self._subscriptions, step.tick.now)
        messages = sent_back.messages
        if sent_back.commands.num_rows:
            # They come with their messages: what a later command says of these is later.
            step.commands = concat([sent_back.commands, step.commands], COMMAND_ROWS)
        rejected = is_rejected(messages)
        # After a rebuild, messages that are done with may come again.
        is_done = self._control.are_done(messages) if self._control.has_exceptions else np.zeros_like(rejected)
        is_new = ~rejected & ~is_done
        if sent_back.outcomes.num_rows:
            is_first = is_new & ~self._tracker.knows(messages)
            step.outcomes.append(where(sent_back.outcomes, is_first[sent_back.row]))
        if has_keys(messages):
            decided = self._keys.take(messages, is_new & ~self._tracker.knows(messages), step.moment)
            messages, is_new = decided.messages, is_new & ~decided.dropped
            step.outcomes.append(decided.outcomes)
        new = where(messages, is_new)
        self._control.take_in(new)
        done = where(messages, ~is_rejected(messages) & is_done)
        arrived = self._control.arrive(messages, step.moment, new, step.input.notes, done)
        step.outcomes.append(arrived)
        step.n_taken = messages.num_rows
        step.effects.rejects = where(messages, rejected)
        noted = _past_where(rejected, messages).select(KEPT_SCHEMA.names)
        return _Taken(new, concat([noted, step.input.notes], KEPT_SCHEMA), arrived)

    def _find_named(self, step: TickInProgress, taken: _Taken) -> Named:
        """Finds the messages that the commands name, by id or by schedule key."""
        by_key = empty_table(KNOWN)
        if has_keys(step.commands):
            step.commands, by_key = self._keys.resolve(step.commands, step.moment)
        named = self._named.find(step.commands, taken.noted, step.input.known_messages, by_key)
        if has_keys(named.known) and self._keys.n_cold:
            self._keys.name(where(named.known, self._place.has(named.known)), step.moment)
        return named

    def _add_messages(self, step: TickInProgress, taken: _Taken) -> pa.Table:
        """Adds what came in to state; returns, as MESSAGES, what is due already."""
        self._entries.add(taken.noted, step.tick.seal_epoch if step.ends_seal_epoch else step.tick.seal_epoch + 1)
        return self._tracker.add_messages(taken.new, step.tick.cutoff)

    def _apply_commands(self, step: TickInProgress, taken: _Taken, named: Named) -> None:
        given = step.input
        resumes = not all(change.is_paused for change in given.pause_changes)
        payload_rows, in_state = self._named.payload_rows(step.commands, taken.new, named.known, given.payload_rows)
        step.outcomes.append(
            self._control.apply(
                step.commands,
                given.request_ids,
                named.known,
                named.is_new,
                step.moment,
                payload_rows=payload_rows,
                in_state=in_state,
                pause_changes=given.pause_changes,
                held=self._named.held(given) if resumes else empty_table(MESSAGES),
                first_answers=given.first_answers,
                arrived=taken.arrived,
            )
        )

    def _seal_and_load(self, step: TickInProgress, kept_open: pa.Table) -> pa.Table:
        """Adds what has been moved, seals the mutable bucket when it is time to, and loads the segment.

        Args:
            kept_open: as MESSAGES, to be sealed now.

        Returns:
            what has been moved and is due already, as MESSAGES.
        """
        tick = step.tick
        moves = self._control.take_moves()
        near_moves = self._tracker.near(moves, tick.cutoff)
        moved = self._tracker.add_moved(moves, tick.cutoff)
        is_full = self._tracker.number_of_unsealed_messages >= self._min_index_count
        # No one comes again to tell of a retry: it is sealed with the answer.
        is_retried = bool((attempts_of(moves) > 0).any())
        if step.ends_seal_epoch or is_full or kept_open.num_rows or is_retried or near_moves.num_rows:
            bucket = self._tracker.seal(tick.load_horizon, tick.near_until)
            step.effects.bucket = concat([bucket, kept_open, near_moves])
            step.effects.cancels = self._control.take_cancels()
        self._tracker.load_segment(step.input.segment)
        if has_keys(step.input.segment):
            self._keys.load(step.input.segment, step.moment)
        return moved

    def _release(self, step: TickInProgress, short_notice: pa.Table, moved: pa.Table) -> None:
        """Releases what is due.

        Args:
            short_notice: as MESSAGES, what came in and was due already.
            moved: as MESSAGES, what was moved and is due already.
        """
        tick = step.tick
        planned = self._tracker.get_scheduled_messages(tick.cutoff)
        # Messages that are left out go nowhere, not to the rejects topic either.
        left_out = is_left_out(step.effects.rejects)
        step.n_left_out = int(left_out.sum())
        rejects = [where(step.effects.rejects, ~left_out), *(one.rejects for one in step.given_up)]
        again = self._rejects_sent_again(tick, step.input.rejected)
        rejects = concat([sent_rejects(tick.unwritable, concat(rejects)), again])
        at_once = in_order(pa.concat_tables([rejects, short_notice, moved]))
        if self._shaper:
            self._shaper.notice_late(concat([at_once, planned]), step.moment)
            self._shaper.give(tick.places, self._tracker.number_waiting)
        if self._tracker.number_waiting:
            is_set_back = tick.cutoff < step.moment.released
            waited = self._tracker.take_waiting(partial(self._most_of_waiting, is_set_back), tick.cutoff)
            planned = in_order(concat([waited, planned]))
        step.n_short_notice = self._releasing.release(step, 0, at_once) - rejects.num_rows
        step.n_planned = self._releasing.release(step, PLANNED, planned)
        self._releasing.release_in_order(step)

    def _most_of_waiting(self, is_set_back: bool, queue: Queue) -> int | None:
        """Returns how many rows of a queue come due again in this tick; None: all, also where they can't go now.

        What is held back is so as a whole: else what is first in the queue would come behind the rest. When the clock
        has been set back all is taken, too: what is due later now can be cancelled, and in the queue its turn would go
        to what comes due after the rest.
        """
        topic, name = queue
        names = self._names.get(topic, ())
        is_held = name in names and self._control.held_back(topic) >> names.index(name) & 1
        return None if is_held or is_set_back else self._shaper.most_of_waiting(queue)

    def _rejects_sent_again(self, tick: Tick, rejects: pa.Table) -> pa.Table:
        """Returns the rejects of earlier ticks that are sent to their topics now.

        Of many, PACE_ROWS are sent each PACE_MILLIS: the rest waits in the tracker.
        """
        if not rejects.num_rows:
            return rejects
        times = tick.now + np.arange(rejects.num_rows) // PACE_ROWS * PACE_MILLIS
        return self._tracker.add_moved(with_columns(rejects, deliver_at=pa.array(times)), tick.cutoff)

    def _seal_moved_on(self, step: TickInProgress) -> None:
        """Adds moved rows, and seals those that no later input would bring again."""
        tick, effects = step.tick, step.effects
        moved = self._control.take_moves()
        near = self._tracker.near(moved, tick.cutoff)
        self._tracker.add_moved(moved, tick.cutoff)
        if self._shaper.n_moved or self._control.n_put_behind:
            others = self._tracker.seal(tick.load_horizon, tick.near_until)
            effects.bucket = concat([effects.bucket, others, near])
            effects.cancels = concat([effects.cancels, self._control.take_cancels()], CANCEL_ROWS)

    def _forget_past(self, step: TickInProgress) -> None:
        """Drops, at the end of a seal epoch, what is kept only until a time that is past."""
        # Only after due messages have been handed out: when the job stood still, they may be long past. What waits
        # for the next tick's places has not been.
        cutoff, next_due = step.tick.cutoff, self._tracker.next_due
        past = cutoff if next_due is None else min(cutoff, next_due - 1)
        self._tracker.drop_expired(past)
        self._control.drop_expired(past)
        self._shaper.forget_past(step.tick.now)
        self._keys.sweep(step.moment, self._tracker.load_horizon)

    def _effects(self, step: TickInProgress) -> Effects:
        """Returns the tick's effects, when all else is done."""
        tick, given_up, effects = step.tick, step.given_up, step.effects
        effects.outcomes = concat([*step.outcomes, *(one.outcomes for one in given_up)], OUTCOME_ROWS)
        rejected_commands = step.input.rejected_commands
        effects.rejects = concat([effects.rejects, rejected_commands, *(one.rejects for one in given_up)])
        effects.shaped_until, effects.waiting = self._shaper.until, self._shaper.waiting(self._tracker.number_waiting)
        effects.paused = self._subscriptions.named(self._control.paused)
        effects.status = {
            "tick": tick.tick,
            "now": tick.now,
            "cutoff": tick.cutoff,
            "next_due": HELD_DELIVER_AT if self._tracker.next_due is None else self._tracker.next_due,
            "taken": step.n_taken,
            "rejected": effects.rejects.num_rows - step.n_left_out,
            "left_out": step.n_left_out,
            "short_notice": step.n_short_notice,
            "planned": step.n_planned,
            "sealed": effects.bucket.num_rows,
            "segment": step.input.segment.num_rows,
            "delayed": self._tracker.number_of_delayed_messages - self._control.unwanted + self._in_flight.open,
            "loaded": self._tracker.number_of_loaded_messages,
            "in_flight": len(self._in_flight),
            "commands": step.commands.num_rows,
            "waiting_commands": self._control.waiting,
            "taken_back": self._control.cancelled.count,
            "taken_back_bytes": self._control.cancelled.n_bytes,
            "shaped": self._shaper.n_moved,
            "schedule_keys": len(self._keys),
            "cold_schedule_keys": self._keys.n_cold,
            "misfires": self._control.occurrences.n_misfires,
        }
        return effects

    def _last(self) -> _Last:
        seal_epoch, cutoff, run_id, *highest = (self._store.get("shard", (0, 0)) or b"0 0 ").decode().split(" ")
        return _Last(int(seal_epoch), int(cutoff), run_id, int(highest[0] if highest else cutoff))

    def _save(self, tick: Tick) -> None:
        highest_cutoff = max(tick.cutoff, self._last().highest_cutoff)
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
