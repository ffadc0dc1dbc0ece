"""A shard of the tracker: it applies one tick after another to its state.

A shard and the classes that it is made of decide when each message is delivered, and what a command does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.buckets.large_rows import Budget, LargeRows
from tracker.buckets.time_slots import Queue
from tracker.commands.apply import Control
from tracker.commands.match import Named
from tracker.commands.occurrences import Occurrences
from tracker.context import Context
from tracker.dispatching import Dispatcher, split_failed
from tracker.entry_log import EntryLog
from tracker.expiry import Expiring
from tracker.giving_up import (
    GivenUp,
    GivingUp,
    find_open_releases,
    find_recalled_releases,
    parked_subscriptions,
    select_sent_rejects,
    slow_subscriptions,
)
from tracker.in_flight import PLANNED, InFlight
from tracker.ingest import Accepted, NamedMessages, NewMessages
from tracker.keys.superseding import Superseding
from tracker.message_state.changes import HELD_DELIVER_AT, Compression
from tracker.message_state.parking import Parking
from tracker.message_state.state import MessageState
from tracker.messages import (
    MESSAGES,
    attempts_of,
    concat,
    empty_table,
    has_keys,
    in_order,
    int64,
    is_left_out,
    is_rejected,
    typed,
    where,
    with_columns,
)
from tracker.rebuilt import Rebuilt
from tracker.requests import MessageRequests
from tracker.schemas import CANCEL_ROWS, KNOWN, OUTCOME_ROWS
from tracker.shaping.shaper import Shaper
from tracker.shaping.token_bucket import first_due
from tracker.sharding import ShardId
from tracker.store import Store
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInProgress, TickInput

_TABLE = "shard"


@dataclass(frozen=True)
class StateOptions:
    """How a shard's state is kept small.

    Attributes:
        compression: how the bitmaps of cancelled and skipped messages are compressed.
        key_idle_millis: a schedule key that no message or command has named for this time, ms, may leave the state.
    """

    compression: Compression = field(default_factory=Compression)
    key_idle_millis: int = 600_000


class _LastTick(NamedTuple):
    """The previous tick. Times are ms since the epoch."""

    seal_epoch: int
    cutoff: int
    run_id: str
    highest_cutoff: int  # of all ticks so far


class Shard:
    """One shard of the tracker: delayed messages, commands, releases in flight and entries not yet durable, on a store.

    All state is in the store: after each `apply` another shard on the same store continues from there. The same ticks
    and inputs give the same effects.

    Args:
        store: the shard's state.
        subscriptions: the subscriptions of each source topic. A mapping of topic to names means that the settings have
            all of them.
        min_index_count_per_bucket: number of rows at which the mutable bucket is sealed before the seal epoch ends.
        tick_time_millis: Pulsar's tick time, ms. A cancelled message is remembered until two of them after its time.
        options: how the state is kept small.
        shard_id: which shard this is; None: the only one.

    Attributes:
        due: as MESSAGES: the rows that are due in the tick, as soon as they are known.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        min_index_count_per_bucket: int,
        tick_time_millis: int = 1000,
        options: StateOptions | None = None,
        shard_id: ShardId | None = None,
    ) -> None:
        options, subscriptions = options or StateOptions(), Subscriptions.from_names(subscriptions)
        self.due = empty_table(MESSAGES)
        self._min_index_count = min_index_count_per_bucket
        self._context = context = Context(store, subscriptions, shard_id or ShardId(), tick_time_millis)
        self._tracker = DelayedDeliveryTracker(store, subscriptions.retried_topics)
        self._entries = EntryLog(store, context.shard_id.is_home)
        self._in_flight = InFlight(store, subscriptions.names)
        self._state = MessageState(context, options.compression)
        self._parking = Parking(context, self._state)
        self._occurrences = Occurrences(context, self._state)
        self._control = Control(context, self._state, self._occurrences)
        self._keys = Superseding(context, self._state, self._parking, options.key_idle_millis)
        self._shaper = Shaper(context, self._state)
        self._requests = MessageRequests(context)
        self._new = NewMessages(context, self._tracker, self._state, self._control, self._keys, self._requests)
        self._named = NamedMessages(context, self._tracker, self._entries, self._state)
        self._dispatcher = Dispatcher(
            context, self._tracker, self._parking, self._occurrences, self._shaper, self._in_flight
        )

    def apply(self, tick: Tick, tick_input: TickInput) -> Effects:
        """Applies one tick: adds messages, applies commands, seals and loads buckets, releases due messages.

        Args:
            tick: the clock's step, later than all steps that were applied before.
            tick_input: messages and commands of the tick.

        Returns:
            the releases to send and the rows to write. The new state is in the store.

        Raises:
            ValueError: an entry id is negative or beyond 2^32 - 1.
            StateLostError: the store lacks a value that an earlier tick put there.
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        last = self._last_tick()
        step = self._begin_tick(tick, tick_input, last)
        open_rows = self._confirm_releases(step)
        self._shaper.begin_tick(tick.confirmed)
        if tick.run_id != last.run_id:
            self._dispatch_again(step)
        if tick_input.rebuilt is not None:
            self._rebuild(step, tick_input.rebuilt)
        self._control.add_waiting(tick_input.handed_over)
        if tick_input.reinstated:
            self._control.wait_again(tick_input.reinstated)

        # Messages first, then commands: a command that was sent after its message finds it.
        accepted = self._new.accept_messages(step)
        named = self._find_named(step, accepted)
        short_notice = self._add_messages(step, accepted)
        self._apply_commands(step, accepted, named)
        step.effects.drained = self._dispatcher.drain_parked(step)
        if step.ends_seal_epoch:
            # Before moved rows are added: the next occurrence of what expires may be due in this tick.
            ended = self._parking.ends.take_ended(tick.now)
            self.due = typed(ended, MESSAGES)
            self._dispatcher.expire_parked(step, ended)
        moved = self._seal_and_load(step, open_rows)
        if step.ends_seal_epoch:
            step.outcomes.append(self._control.expire_waiting())
            step.effects.entries = self._entries.take_durable(tick.durable_through)

        self._dispatch_due(step, short_notice, moved)
        self._add_moves_of_dispatch(step)
        if step.ends_seal_epoch:
            self._forget_past(step)
        effects = self._complete_effects(step)
        self._save(tick)
        return effects

    def _begin_tick(self, tick: Tick, tick_input: TickInput, last: _LastTick) -> TickInProgress:
        context = self._context
        released = last.cutoff if tick_input.rebuilt is None else tick_input.rebuilt.released
        context.begin_tick(tick.tick, tick.now, tick.cutoff, released, tick.ingested_through)
        if released < last.highest_cutoff and (tick_input.commands.num_rows or has_keys(tick_input.messages)):
            context.waiting = self._tracker.find_due(released + 1, last.highest_cutoff)
            context.highest_cutoff = last.highest_cutoff
        large = LargeRows.from_json(tick.large)
        self._tracker.begin_tick(large)
        # Large messages that were parked do not wait for room once more: a round is within what there is.
        in_turn = tick.cutoff if large.after is None else large.after[0] - 1
        unwritable = parked_subscriptions(tick.unwritable, context.subscriptions.names)
        slow = slow_subscriptions(tick.unwritable, context.subscriptions.names)
        self._parking.begin_tick(unwritable, slow, min(tick.now, tick.cutoff, in_turn))
        self._keys.begin_tick(tick_input.find_keyed, self._tracker.was_complete_until)
        return TickInProgress(
            tick=tick,
            input=tick_input,
            giving_up=GivingUp(context, tick.unwritable),
            expiring=Expiring(context, self._state),
            ends_seal_epoch=tick.seal_epoch != last.seal_epoch,
            commands=tick_input.commands,
        )

    def _confirm_releases(self, step: TickInProgress) -> pa.Table:
        """Forgets releases that have arrived, and parks or rejects messages in flight that are not sent.

        Returns:
            as MESSAGES: rows to be sealed, for messages of confirmed releases that have not arrived.
        """
        unwritable, names = step.tick.unwritable, self._context.subscriptions.names
        self._parking.recall_messages(self._in_flight.take_given_up(find_recalled_releases(unwritable, names)))
        releases = find_open_releases(unwritable, names)
        opened = self._in_flight.confirm_releases(step.tick.confirmed, releases)
        open_rows = concat([self._parking.make_open_rows(release.rows) for release in opened])
        rows = self._in_flight.take_given_up(step.giving_up.select_given_up(releases))
        # A message that has a retry to come is not rejected: the retry has not come due yet.
        masks = self._state.without_retried(rows, int64(rows, "subscription_mask"))
        step.given_up.append(step.giving_up.reject_rows(rows, masks)[0])
        return open_rows

    def _dispatch_again(self, step: TickInProgress) -> None:
        """Dispatches again, in the first tick of a run, all releases in flight."""
        step.effects.releases += self._in_flight.all_releases()
        if self._shaper:
            self._shaper.postpone_in_flight(first_due(step.effects.releases))

    def _rebuild(self, step: TickInProgress, rebuilt: Rebuilt) -> None:
        self._tracker.rebuild(rebuilt.sealed)
        self._state.rebuild(rebuilt)
        self._occurrences.rebuild(rebuilt.occurrences)
        self._control.rebuild(rebuilt.waiting, rebuilt.request_ids)
        self._requests.rebuild(rebuilt.message_requests)
        self._keys.rebuild(rebuilt.keys)
        self._shaper.rebuild(rebuilt.shaped_until)
        self._parking.ends.rebuild(rebuilt.ends)

    def _find_named(self, step: TickInProgress, accepted: Accepted) -> Named:
        """Finds the messages that the commands name, by id or by schedule key."""
        by_key = empty_table(KNOWN)
        if has_keys(step.commands):
            step.commands, by_key = self._keys.resolve_commands(step.commands)
        named = self._named.find_named(step.commands, accepted.logged, step.input.known_messages, by_key)
        if has_keys(named.known) and self._keys.n_cold:
            self._keys.warm_named(where(named.known, self._context.shard_id.has(named.known)))
        return named

    def _add_messages(self, step: TickInProgress, accepted: Accepted) -> pa.Table:
        """Adds new messages to entry log and tracker; returns those that are due already, as MESSAGES."""
        self._entries.add_messages(
            accepted.logged, step.tick.seal_epoch if step.ends_seal_epoch else step.tick.seal_epoch + 1
        )
        return self._tracker.add_messages(accepted.new, step.tick.cutoff)

    def _apply_commands(self, step: TickInProgress, accepted: Accepted, named: Named) -> None:
        tick_input = step.input
        named = self._named.add_payload(named, step.commands, accepted.new, tick_input.payload_rows)
        repeats = self._control.find_repeats(step.commands, tick_input.request_ids, tick_input.first_answers)
        if repeats is not None:
            changes = [change for change in tick_input.pause_changes if change.request_id not in repeats.known]
            self._parking.change_pauses(changes)
            step.outcomes.append(self._control.apply_commands(step.commands, named, repeats, accepted.outcomes))
        step.given_up.append(GivenUp(self._occurrences.failed.take_rejects()))

    def _seal_and_load(self, step: TickInProgress, open_rows: pa.Table) -> pa.Table:
        """Adds the rows of moved messages, seals the mutable bucket when it is time to, and loads the segment.

        Args:
            open_rows: as MESSAGES: further rows to seal now.

        Returns:
            as MESSAGES: the rows of moved messages that are due already.
        """
        tick = step.tick
        moves = self._state.take_moves()
        near_moves = self._tracker.select_near(moves, tick.cutoff)
        moved = self._tracker.add_moved(moves, tick.cutoff)
        is_full = self._tracker.number_of_unsealed_messages >= self._min_index_count
        is_full |= self._tracker.has_large_unsealed
        is_full |= 0 < tick.max_bytes <= self._tracker.unsealed_bytes
        # The answer says that a retry is applied, and no message comes in again for it: so its row is sealed at once.
        is_retried = bool((attempts_of(moves) > 0).any())
        if step.ends_seal_epoch or is_full or open_rows.num_rows or is_retried or near_moves.num_rows:
            bucket = self._tracker.seal_bucket(tick.load_horizon, tick.near_until)
            step.effects.bucket = concat([bucket, open_rows, near_moves])
            step.effects.cancels = self._state.take_cancels()
        self._tracker.load_segment(step.input.segment)
        if step.input.failed.num_rows:
            step.given_up.append(self._dispatcher.give_up_failed(step, step.input.failed))
        if has_keys(step.input.segment):
            self._keys.warm_loaded(step.input.segment)
        return moved

    def _dispatch_due(self, step: TickInProgress, short_notice: pa.Table, moved: pa.Table) -> None:
        """Dispatches due messages, and sends rejects to their topics.

        Args:
            short_notice: as MESSAGES: new messages that are due already.
            moved: as MESSAGES: rows of moved messages that are due already.
        """
        tick = step.tick
        most = self._budget(tick)
        planned = self._tracker.get_scheduled_messages(tick.cutoff, most)
        # Messages that are left out are sent nowhere, not even to the rejects topic.
        left_out = is_left_out(step.effects.rejects)
        step.n_left_out = int(left_out.sum())
        rejects = [where(step.effects.rejects, ~left_out), *(one.rejects for one in step.given_up)]
        due_at = pa.array(np.full(step.input.rejected.num_rows, min(tick.now, tick.cutoff)))
        again = with_columns(step.input.rejected, deliver_at=due_at)  # which their topics lack
        rejects = concat([select_sent_rejects(tick.unwritable, tick.parked_rejects, concat(rejects)), again])
        at_once = in_order(pa.concat_tables([rejects, short_notice, moved]))
        if (most := self._budget(tick)) is not None and at_once.num_rows:
            fits = most.fitting(at_once)
            self._tracker.put_off(where(at_once, ~fits))
            at_once = where(at_once, fits)
        self.due = concat([self.due, at_once, planned])
        at_once, planned = self._without_failed(step, at_once, planned)
        if self._shaper:
            self._shaper.postpone_late(concat([at_once, planned]))
            self._shaper.assign_places(tick.places, self._tracker.queue_lengths)
        if self._tracker.queue_lengths:
            is_set_back = tick.cutoff < self._context.released
            ended = self._tracker.take_ended(tick.now)
            waited = self._tracker.take_waiting(partial(self._max_from_queue, is_set_back), tick.cutoff)
            waited = concat([ended, waited])
            self.due = concat([self.due, waited])
            at_once, waited = self._without_failed(step, at_once, waited)
            planned = in_order(concat([waited, planned]))
        step.n_short_notice = self._dispatcher.dispatch_due(step, 0, at_once) - int(is_rejected(at_once).sum())
        step.n_planned = self._dispatcher.dispatch_due(step, PLANNED, planned)
        if self._parking.n_joined:
            step.n_short_notice += self._dispatcher.dispatch_due(step, 0, in_order(self._add_moves_of_dispatch(step)))
        self._dispatcher.dispatch_in_order(step)

    @staticmethod
    def _budget(tick: Tick) -> Budget | None:
        """Returns what a release of a tick may have; None: any number of bytes."""
        if not tick.max_bytes:
            return None
        return Budget(tick.max_bytes, LargeRows.from_json(tick.large).rule.are_large, tick.max_file_bytes)

    def _without_failed(self, step: TickInProgress, at_once: pa.Table, planned: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Rejects the due rows for which the tick has failed; returns the others, as MESSAGES, with the rejects."""
        if not step.input.why_failed:
            return at_once, planned
        at_once, first = split_failed(step, at_once)
        planned, second = split_failed(step, planned)
        given_up = self._dispatcher.give_up_failed(step, concat([first, second]))
        step.given_up.append(given_up)
        rejects = select_sent_rejects(step.tick.unwritable, step.tick.parked_rejects, given_up.rejects)
        return in_order(concat([at_once, rejects])), planned

    def _max_from_queue(self, is_set_back: bool, queue: Queue) -> int | None:
        """Returns how many rows of a queue come due again in this tick; None: all.

        The whole queue of a subscription whose messages are parked comes due, to be parked: else the first rows of the
        queue would come after the rest of it. When the clock has been set back all is taken, too: what is due later now
        can be cancelled, and in the queue its turn would go to what comes due after the rest.
        """
        topic, name = queue
        names = self._context.subscriptions.names.get(topic, ())
        is_parked = name in names and self._parking.parked_mask(topic) >> names.index(name) & 1
        return None if is_parked or is_set_back else self._shaper.max_from_queue(queue)

    def _add_moves_of_dispatch(self, step: TickInProgress) -> pa.Table:
        """Adds the rows of messages that dispatching moved, and seals those that could not be found again otherwise.

        Returns:
            as MESSAGES: the rows that are due in this tick, which are not added.
        """
        tick, effects = step.tick, step.effects
        moved = self._state.take_moves()
        near = self._tracker.select_near(moved, tick.cutoff)
        due = self._tracker.add_moved(moved, tick.cutoff)
        if self._shaper.n_moved or self._parking.n_joined:
            others = self._tracker.seal_bucket(tick.load_horizon, tick.near_until)
            effects.bucket = concat([effects.bucket, others, near])
            effects.cancels = concat([effects.cancels, self._state.take_cancels()], CANCEL_ROWS)
        return due

    def _forget_past(self, step: TickInProgress) -> None:
        """Drops state that is kept until a time which is past. Called at the end of a seal epoch."""
        # Not before due messages have been dispatched: after a standstill they may be long past. Rows that wait for the
        # next tick's places are due and not dispatched.
        cutoff, next_due = step.tick.cutoff, self._tracker.next_due
        past = cutoff if next_due is None else min(cutoff, next_due - 1)
        if (after := LargeRows.from_json(step.tick.large).after) is not None:
            past = min(past, after[0] - 1)  # large messages due from then on wait in the delayed index
        self._tracker.drop_expired(past)
        self._state.drop_expired(past)
        self._shaper.forget_past(step.tick.now)
        self._keys.sweep_keys(self._tracker.load_horizon, self._tracker.complete_until)

    def _complete_effects(self, step: TickInProgress) -> Effects:
        """Returns the tick's effects, after all its stages."""
        tick, given_up, effects = step.tick, step.given_up, step.effects
        outcomes = [*step.outcomes, *(one.outcomes for one in given_up), step.expiring.all_outcomes()]
        effects.outcomes = concat(outcomes, OUTCOME_ROWS)
        rejected_commands = step.input.rejected_commands
        effects.rejects = concat([effects.rejects, rejected_commands, *(one.rejects for one in given_up)])
        effects.failures += self._occurrences.failed.noted
        effects.shaped_until = self._shaper.last_places
        effects.waiting = self._shaper.count_waiting(self._tracker.queue_lengths, self._tracker.queues_with_ends)
        effects.resuming = self._parking.resuming
        effects.paused = self._context.subscriptions.names_by_topic(self._state.paused)
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
            "delayed": self._tracker.number_of_delayed_messages - self._state.unwanted + self._in_flight.open,
            "loaded": self._tracker.number_of_loaded_messages,
            "large_bytes": self._tracker.large_bytes,
            "in_flight": len(self._in_flight),
            "commands": step.commands.num_rows,
            "waiting_commands": self._control.n_waiting,
            "taken_back": self._state.cancelled.count,
            "taken_back_bytes": self._state.cancelled.n_bytes,
            "shaped": self._shaper.n_moved,
            "schedule_keys": len(self._keys),
            "cold_schedule_keys": self._keys.n_cold,
            "misfires": self._occurrences.n_misfires,
            "expired": step.expiring.n,
        }
        return effects

    def _last_tick(self) -> _LastTick:
        seal_epoch, cutoff, run_id, *highest = (self._context.store.get(_TABLE, (0, 0)) or b"0 0 ").decode().split(" ")
        return _LastTick(int(seal_epoch), int(cutoff), run_id, int(highest[0] if highest else cutoff))

    def _save(self, tick: Tick) -> None:
        highest_cutoff = max(tick.cutoff, self._last_tick().highest_cutoff)
        last = f"{tick.seal_epoch} {tick.cutoff} {tick.run_id} {highest_cutoff}".encode()
        if last != self._context.store.get(_TABLE, (0, 0)):
            self._context.store.put(_TABLE, (0, 0), last)
        self._tracker.save()
        self._parking.save()
        self._state.save()
        self._occurrences.save()
        self._control.save()
        self._shaper.save()
        self._in_flight.save()
        self._entries.save()
        self._keys.save()
