"""Parks messages for subscriptions that are paused, unwritable or without a route, and dispatches them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.context import Context
from tracker.ends import ParkedEnds, ends_of, may_expire
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import (
    MESSAGES,
    Int64Array,
    concat,
    has_occurrences,
    int64,
    is_rejected,
    message_ids,
    order_keys,
    typed,
    where,
)
from tracker.schemas import PauseChange
from tracker.subscriptions import by_topic, dead_letters_in, numbers_in


class Round(NamedTuple):
    """What a tick dispatches of the messages that are parked for a subscription: those that were due first.

    The same for all shards. The next rounds get the others.

    Attributes:
        until: when the last sealed message of the round was due, ms since the epoch; what is parked in state and was
            due before it is in the round, too. None: the round has all that is parked.
        left: about how many sealed messages stay parked after the round.
        left_bytes: about the bytes of their payloads.
    """

    until: int | None = None
    left: int = 0
    left_bytes: int = 0


Rounds = Mapping[str, Mapping[str, Round]]  # by source topic and subscription


class Resuming(NamedTuple):
    """What is still parked for a subscription that gets its messages again.

    Attributes:
        until: messages that were parked have times up to this one, ms since the epoch: so an earlier program resumed.
        left: as of the last round.
        left_bytes: as of the last round.
        since: nothing that is parked was due before, ms since the epoch.
    """

    until: int = 0
    left: int = 0
    left_bytes: int = 0
    since: int = 0


# The most messages moved together in one tick that get sequences of their own, which keep their order.
_MAX_IN_ORDER = 1 << 19

# The sequences of a tick that are left for commands and other moves.
_LEFT_FOR_OTHERS = 1 << 17


class Parking:
    """Parks messages for subscriptions that get none now, and dispatches them afterwards.

    Messages of a subscription are parked while it is paused, its destination is unwritable, or its topic's route is
    missing. A message that comes due meanwhile is moved to HELD_DELIVER_AT. When the state ends, the subscription is
    resuming: in rounds its messages are moved to now, those that were due first in the first round. Until the last
    round messages with an order key that come due are parked behind them, for subscriptions with `order: key`.

    Args:
        state: knows to which subscriptions each message still goes, and records the moves.

    Attributes:
        unwritable: by topic: a mask of the subscriptions whose destinations are unwritable; `begin_tick` sets it.
        n_joined: how many messages this tick has moved to the time of those that were parked.
        ends: when messages expire that are parked.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state
        self.unwritable: Mapping[str, int] = {}
        self._slow: Mapping[str, int] = {}
        self._resuming = {(topic, number): Resuming(*one) for topic, number, *one in state.draining}
        self._ended: set[tuple[str, int]] = set()  # by topic and number: this tick has the last round
        self._dispatch_at = 0
        self._let_through: dict[tuple[str, int], int] = {}  # by topic and number: moves from this sequence on
        self.n_joined = 0
        self.ends = ParkedEnds(context.store, state.parked_ends)

    def begin_tick(self, unwritable: Mapping[str, int], slow: Mapping[str, int], dispatch_at: int) -> None:
        """Begins a tick, whose fields the context has.

        Args:
            unwritable: by topic: a mask of the subscriptions whose destinations are unwritable.
            slow: likewise, of those of them that get in rounds what is parked for them.
            dispatch_at: the time to which the messages of rounds are moved, ms since the epoch; it is due in the tick.
        """
        self.unwritable, self._slow, self._dispatch_at, self._let_through = unwritable, slow, dispatch_at, {}
        for topic, number in list(self._resuming):
            if not self._subscriptions.active(topic) & ~self.parked_mask(topic) & 1 << number:
                del self._resuming[topic, number]  # what is left is parked until the subscription is resumed again

    @property
    def resuming(self) -> dict[str, dict[str, list[int]]]:
        """By source topic and subscription: what is left, its bytes, and since when it was due, as of `Resuming`."""
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, number), one in self._resuming.items():
            name = self._subscriptions.names[topic][number]
            found.setdefault(topic, {})[name] = [one.left, one.left_bytes, one.since]
        return found

    def save(self) -> None:
        """Adds what is resuming, and when what is parked expires, to the state, which the caller saves."""
        self._state.parked_ends = self.ends.meta
        self._state.draining = [[*key, *one] for key, one in sorted(self._resuming.items())]

    def change_pauses(self, changes: Iterable[PauseChange]) -> None:
        """Pauses and resumes subscriptions."""
        paused = self._state.paused
        for change in changes:
            before, bits = paused.get(change.topic, 0), change.subscriptions
            paused[change.topic] = before | bits if change.is_paused else before & ~bits
        self._state.paused = {topic: bits for topic, bits in paused.items() if bits}

    def parked_mask(self, topic: str) -> int:
        """Returns a mask of a topic's subscriptions whose messages are parked now; -1: all of them."""
        if topic in self._subscriptions.without_route:
            return -1
        return self._state.paused.get(topic, 0) | self.unwritable.get(topic, 0)

    def _only_unwritable(self, topic: str) -> int:
        """Returns a mask of a topic's subscriptions whose messages are parked only because they are unwritable."""
        is_missing = topic in self._subscriptions.without_route
        return 0 if is_missing else self.unwritable.get(topic, 0) & ~self._state.paused.get(topic, 0)

    def choose_subscriptions(self, rows: pa.Table) -> Int64Array:
        """Decides to which subscriptions due rows go, unless they are parked there (`park_due`).

        Args:
            rows: as MESSAGES, removed from the tracker.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i. A rejected message goes to none.
        """
        rejected = is_rejected(rows)
        left = self._state.masks_with_removed(rows)
        self._state.count_unwanted(where(rows, ~rejected & (left == 0)), -1)
        return np.where(rejected, 0, self._state.without_removed(rows, left))

    def park_due(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Moves due rows to HELD_DELIVER_AT for the subscriptions whose messages are parked now.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): the subscriptions that each row goes to, as bits.

        Returns:
            `masks` without the bits of the subscriptions for which rows are parked.
        """
        masks = self._join_last_round(rows, masks)
        any_parked = self._state.paused or self.unwritable or self._subscriptions.without_route or self._resuming
        if not any_parked or not rows.num_rows:
            return masks
        parked = masks & by_topic(rows, self.parked_mask)
        # Dead letters go to another topic.
        dead = dead_letters_in(rows, self._subscriptions)
        parked &= ~(dead & by_topic(rows, self._only_unwritable))
        # What a round has let go, and shaping has given a later place, would be parked and let go over and over.
        let_go = np.where(pc.is_valid(rows["was_due"]), by_topic(rows, lambda topic: self._slow.get(topic, 0)), 0)
        parked &= ~(let_go & by_topic(rows, self._only_unwritable))
        for (topic, number), first in self._let_through.items():
            is_moved = pc.fill_null(pc.greater_equal(rows["sequence"], first), False)
            is_let_through = pc.and_(pc.equal(rows["topic"], topic), is_moved).to_numpy(zero_copy_only=False)
            parked &= ~np.where(is_let_through, 1 << number, 0)
        for key in self._resuming:
            parked |= masks & self._waits_behind(rows, *key)
        self._park(rows, parked)
        return masks & ~parked

    def _park(self, rows: pa.Table, masks: Int64Array) -> None:
        """Moves rows, as MESSAGES, to HELD_DELIVER_AT for subscriptions, as bits: int64, (rows,)."""
        for subscription in numbers_in(masks):
            parked = rows.take(pa.array(np.flatnonzero(masks >> subscription & 1)))
            was_due = pc.coalesce(parked["was_due"], parked["shaped_from"], parked["deliver_at"]).to_numpy()
            times = np.full(parked.num_rows, HELD_DELIVER_AT)
            sequences = self._in_order(times)
            self._state.move_messages(parked, subscription, times, sequences, was_due)
            self._note_parked(parked, subscription, was_due)
            if may_expire(parked, self._subscriptions):
                ends = ends_of(parked, subscription, self._subscriptions)
                self.ends.add_rows(self._state.moves[-1], ends)

    def _note_parked(self, rows: pa.Table, subscription: int, was_due: Int64Array) -> None:
        """Notes rows, as MESSAGES, that are parked for a subscription that is resuming, and when they were due."""
        for (topic, number), one in self._resuming.items():
            if number == subscription:
                due = was_due[pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False)]
                since = int(due.min(initial=one.since))
                self._resuming[topic, number] = one._replace(since=since)

    def recall_messages(self, rows: pa.Table) -> None:
        """Parks messages that were dispatched, and of which nothing was sent.

        Args:
            rows: as MESSAGES, and `subscription_mask`, int64: the subscriptions for which they are recalled, as bits.
        """
        if rows.num_rows:
            masks = self._state.without_retried(rows, int64(rows, "subscription_mask"))
            self._park(typed(rows, MESSAGES), masks)

    def _waits_behind(self, rows: pa.Table, topic: str, number: int) -> Int64Array:
        """Tells which due rows come after messages that are parked, for a subscription that is resuming.

        Messages of rounds have been parked themselves. Those that are shaped have their places, before all later ones.

        Returns:
            the subscription's bit for these rows, else 0: int64, (rows,).
        """
        if not self._subscriptions.in_order.get(topic, 0) >> number & 1:
            return np.zeros(rows.num_rows, np.int64)
        is_new = pc.and_(pc.is_null(rows["was_due"]), pc.is_null(rows["shaped_from"]))
        does_wait = pc.and_(pc.and_(pc.equal(rows["topic"], topic), is_new), pc.is_valid(order_keys(rows)))
        return np.where(does_wait.to_numpy(zero_copy_only=False), 1 << number, 0)

    def _join_last_round(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Moves due rows with an order key to the time of the last round's messages, where this tick has it.

        They come due once more in this tick: in a later one, what is due after them would have gone out before.

        Returns:
            `masks` without the bits of the subscriptions for which rows are moved.
        """
        late = np.where(int64(rows, "deliver_at") <= self._dispatch_at, masks, 0) if self._ended else masks
        for topic, number in self._ended:
            chosen = np.flatnonzero(late & self._waits_behind(rows, topic, number))
            if len(chosen):
                moved = rows.take(pa.array(chosen))
                times = np.full(len(chosen), self._dispatch_at)
                self._state.move_messages(moved, number, times, self._in_order(times), int64(moved, "deliver_at"))
                self.n_joined += len(chosen)
                masks = masks.copy()
                masks[chosen] &= ~(1 << number)
        return masks

    def make_open_rows(self, rows: pa.Table) -> pa.Table:
        """Makes a new row for each message of a release that has not arrived, with the same time, to be sealed.

        A message that came in shortly before its time is in no bucket, and its entry may be durable now. By these rows
        in the delayed index a rebuild knows which messages are missing.

        Args:
            rows: as MESSAGES, and `subscription_mask`, int64: the subscriptions at which it has not arrived, as bits.

        Returns:
            the new rows, as MESSAGES, one for each message and subscription.
        """
        if has_occurrences(rows):
            # A rebuild knows by their numbers which occurrences have not arrived.
            rows = rows.filter(pc.is_null(rows["occurrence"]))
        # If a retry has been asked for meanwhile, its row has to remain the last one of its message.
        masks = self._state.without_retried(rows, int64(rows, "subscription_mask"))
        moved: list[pa.Table] = []
        for subscription in numbers_in(masks):
            chosen = typed(rows.take(pa.array(np.flatnonzero(masks >> subscription & 1))), MESSAGES)
            if chosen.num_rows:
                times, sequence = int64(chosen, "deliver_at"), self._context.next_sequence()
                moved.append(self._state.make_moved_rows(chosen, subscription, times, sequence))
        return concat(moved)

    def is_resumed(self, topic: str, name: str) -> bool:
        """Whether a subscription gets what is parked for it, and also what comes due."""
        number = self._number(topic, name)
        return number >= 0 and bool(self._subscriptions.active(topic) & ~self.parked_mask(topic) & 1 << number)

    def note_round(self, topic: str, name: str, one: Round) -> None:
        """Notes that this tick dispatches a round of a subscription for which `is_resumed`.

        What comes due in the tick takes its turn among the messages of the last round.
        """
        key = topic, self._number(topic, name)
        until = self._resuming[key].until if key in self._resuming else 0
        if one.until is not None or until > self._context.released:
            since = self._context.released if one.until is None else one.until
            self._resuming[key] = Resuming(until, one.left, one.left_bytes, since)
            return
        self._resuming.pop(key, None)
        # Only another shard may have messages in the round: parked ones that are not sealed.
        self._ended.add(key)

    def drain_parked(self, rows: pa.Table, topic: str, name: str) -> int:
        """Moves messages that are parked for a subscription to now, or to when they are due, if later.

        This tick dispatches them, but for large ones for which there is no room.

        Args:
            rows: as MESSAGES: rows at HELD_DELIVER_AT. Those that a later move replaced are ignored.
            topic: the source topic.
            name: of the subscription.

        Returns:
            how many messages go out; 0 also where messages are parked, and not only because the destination is slow.
        """
        number = self._number(topic, name)
        is_open = number >= 0 and (self.is_resumed(topic, name) or self._only_unwritable(topic) >> number & 1)
        if not is_open or not rows.num_rows:
            return 0
        last, _, until = self._state.moved.find_moves(number, message_ids(rows))
        is_wanted = self._state.addressed_to(rows) & self._subscriptions.active(topic)
        sequences = int64(rows, "sequence")
        # Cancelled messages are moved, too: they may be restored.
        chosen = np.flatnonzero((is_wanted >> number & 1 > 0) & (last == sequences))
        if not len(chosen):
            return 0
        _, first = np.unique(np.stack(message_ids(rows))[:, chosen], axis=1, return_index=True)
        chosen = chosen[np.sort(first)]
        rows, known = rows.take(pa.array(chosen)), rows["was_due"].fill_null(0).to_numpy()[chosen]
        # A row of an earlier version does not say when it was due; it was by the last cutoff.
        latest = max(self._context.released, self._context.highest_cutoff)
        due = np.where(known > 0, known, np.minimum(until[chosen] - self._context.remembered_millis, latest))
        order = np.lexsort([*message_ids(rows)[::-1], sequences[chosen], due, known])
        rows, due = rows.take(pa.array(order)), due[order]
        times = np.maximum(due, self._dispatch_at)  # some are due within the lookahead
        moved = self._in_order(due)
        self._let_through.setdefault((topic, number), int(moved[0]))
        self._state.move_messages(rows, number, times, moved, due)
        self._state.unwanted_moves += len(order)  # the rows that were parked
        return len(order)

    def _number(self, topic: str, name: str) -> int:
        """Returns the number of a topic's subscription; -1: there is none."""
        names = self._subscriptions.names.get(topic, ())
        return names.index(name) if name in names else -1

    def _in_order(self, rows: Int64Array) -> Int64Array:
        """Returns rising sequences, int64, (rows,), for rows that are moved together, so that they keep their order.

        Of very many rows the last ones share a sequence, so that the tick has sequences left.
        """
        most = min(_MAX_IN_ORDER, max(0, self._context.n_sequences_left - _LEFT_FOR_OTHERS))
        return self._context.next_sequences(np.minimum(np.arange(len(rows)), most))
