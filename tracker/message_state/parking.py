"""Parks messages for subscriptions that are paused, unwritable or without a route, and dispatches them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.context import Context
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

# PACE_ROWS messages of a subscription, over all shards, are a step. A step goes out each PACE_MILLIS, so that releases
# stay moderate.
PACE_ROWS = 1_000

PACE_MILLIS = 100

# By source topic and subscription: for each step except the first, when its first message was due, ms since the epoch.
Pace = dict[str, dict[str, list[int]]]


def pace(rows: pa.Table) -> Pace:
    """Divides messages that are parked into steps of PACE_ROWS, by when they were due.

    Args:
        rows: as MESSAGES, of all shards; each row is for one subscription. Those with `was_due` null come first.

    Returns:
        the steps of the subscriptions that need more than one.
    """
    steps: Pace = {}
    grouped = rows.group_by(["topic", "subscription"]).aggregate([("was_due", "list")])
    for topic, subscription, times in zip(*(grouped[name] for name in grouped.column_names), strict=True):
        due = np.sort(times.values.fill_null(0).to_numpy())
        if len(due) > PACE_ROWS:
            steps.setdefault(topic.as_py(), {})[subscription.as_py()] = due[PACE_ROWS::PACE_ROWS].tolist()
    return steps


def step_of(due: Int64Array, steps: list[int]) -> Int64Array:
    """Returns the number of the step in which each of a shard's messages goes out.

    Args:
        due: int64, (n,), ascending: when the messages were due, ms since the epoch; 0: not known.
        steps: the steps of the messages' subscription, as in `Pace`.

    Returns:
        int64, (n,), ascending, from 0. Messages due at the same time are spread over all steps of that time.
    """
    marks = np.array(steps, np.int64)
    first, last = np.searchsorted(marks, due, "left"), np.searchsorted(marks, due, "right")
    _, group, sizes = np.unique(due, return_inverse=True, return_counts=True)
    place = np.arange(len(due)) - (np.cumsum(sizes) - sizes)[group]
    found: Int64Array = first + place * (last - first + 1) // np.maximum(sizes, 1)[group]
    return found


# The most messages moved together in one tick that get sequences of their own, which keep their order.
_MAX_IN_ORDER = 1 << 19

# The sequences of a tick that are left for commands and other moves.
_LEFT_FOR_OTHERS = 1 << 17


class Parking:
    """Parks messages for subscriptions that get none now, and dispatches them afterwards.

    Messages of a subscription are parked while it is paused, its destination is unwritable, or its topic's route is
    missing. A message that comes due meanwhile is moved to HELD_DELIVER_AT. When the state ends, it is moved to now.

    Args:
        state: knows to which subscriptions each message still goes, and records the moves.

    Attributes:
        unwritable: by topic: a mask of the subscriptions whose destinations are unwritable; `begin_tick` sets it.
        n_queued_behind: how many messages this tick has moved behind those that were parked.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state
        self.unwritable: Mapping[str, int] = {}
        self._pace: Pace = {}
        # Subscriptions with `order: key` whose parked messages go out in several steps, by topic and number: the time
        # by which all of these messages have gone out, ms since the epoch.
        self._until = {(topic, number): until for topic, number, until in state.draining}
        self._let_through: dict[tuple[str, int], int] = {}  # by topic and number: moves from this sequence on
        self.n_queued_behind = 0

    def begin_tick(self, unwritable: Mapping[str, int], pace: Pace) -> None:
        """Begins a tick, whose fields the context has.

        Args:
            unwritable: by topic: a mask of the subscriptions whose destinations are unwritable.
            pace: the pace of the messages that `resume_parked` moves.
        """
        self.unwritable, self._pace, self._let_through = unwritable, pace, {}
        for topic, names in pace.items():
            in_order = self._subscriptions.in_order.get(topic, 0)
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                if name in names and in_order >> number & 1:
                    end = self._context.now + len(names[name]) * PACE_MILLIS
                    self._until[topic, number] = max(end, self._until.get((topic, number), 0))
        self._until = {key: until for key, until in self._until.items() if until > self._context.released}
        self._state.draining = [[*key, until] for key, until in self._until.items()]

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
        """Decides to which subscriptions due rows go now, and parks them for subscriptions whose messages are parked.

        Args:
            rows: as MESSAGES, removed from the tracker.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i. A rejected message goes to none.
        """
        rejected = is_rejected(rows)
        left = self._state.masks_with_removed(rows)
        self._state.count_unwanted(where(rows, ~rejected & (left == 0)), -1)
        masks = np.where(rejected, 0, self._state.without_removed(rows, left))
        return self._park_due(rows, masks)

    def _park_due(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Moves due rows to HELD_DELIVER_AT for the subscriptions whose messages are parked now.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): the subscriptions that each row goes to, as bits.

        Returns:
            `masks` without the bits of the subscriptions for which rows are parked.
        """
        masks = self._queue_behind(rows, masks)
        if not (self._state.paused or self.unwritable or self._subscriptions.without_route) or not rows.num_rows:
            return masks
        parked = masks & by_topic(rows, self.parked_mask)
        # Dead letters go to another topic.
        dead = dead_letters_in(rows, self._subscriptions)
        parked &= ~(dead & by_topic(rows, self._only_unwritable))
        for (topic, number), first in self._let_through.items():
            is_moved = pc.fill_null(pc.greater_equal(rows["sequence"], first), False)
            is_let_through = pc.and_(pc.equal(rows["topic"], topic), is_moved).to_numpy(zero_copy_only=False)
            parked &= ~np.where(is_let_through, 1 << number, 0)
        self._park(rows, parked)
        return masks & ~parked

    def _park(self, rows: pa.Table, masks: Int64Array) -> None:
        """Moves rows, as MESSAGES, to HELD_DELIVER_AT for subscriptions, as bits: int64, (rows,)."""
        for subscription in numbers_in(masks):
            parked = rows.take(pa.array(np.flatnonzero(masks >> subscription & 1)))
            was_due = pc.coalesce(parked["was_due"], parked["shaped_from"], parked["deliver_at"]).to_numpy()
            times = np.full(parked.num_rows, HELD_DELIVER_AT)
            self._state.move_messages(parked, subscription, times, self._in_order(times), was_due)

    def recall_messages(self, rows: pa.Table) -> None:
        """Parks messages that were dispatched, and of which nothing was sent.

        Args:
            rows: as MESSAGES, and `subscription_mask`, int64: the subscriptions for which they are recalled, as bits.
        """
        if rows.num_rows:
            masks = self._state.without_retried(rows, int64(rows, "subscription_mask"))
            self._park(typed(rows, MESSAGES), masks)

    def _queue_behind(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Moves due rows with an order key behind messages that were parked, for subscriptions with `order: key`.

        Returns:
            `masks` without the bits of the subscriptions for which rows are moved.
        """
        for (topic, number), until in self._until.items():
            until = max(until, self._context.cutoff + 1)  # this tick dispatches all messages due by its cutoff
            is_before = pc.and_(pc.equal(rows["topic"], topic), pc.less(rows["deliver_at"], until))
            # The messages that were parked themselves keep their pace.
            is_before = pc.and_(is_before, pc.and_(pc.is_null(rows["was_due"]), pc.is_valid(order_keys(rows))))
            chosen = np.flatnonzero(is_before.to_numpy() & (masks >> number & 1 > 0))
            if len(chosen):
                moved = rows.take(pa.array(chosen))
                was_due = pc.coalesce(moved["shaped_from"], moved["deliver_at"]).to_numpy()
                times = np.full(len(chosen), until)
                self._state.move_messages(moved, number, times, self._in_order(times), was_due)
                self.n_queued_behind += len(chosen)
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

    def resume_parked(self, rows: pa.Table) -> None:
        """Moves messages that were parked to now, for the subscriptions whose messages are not parked any more.

        Many messages go out at the tick's pace, in the order in which they were due.

        Args:
            rows: as MESSAGES: this shard's rows at HELD_DELIVER_AT. Those that a later move replaced are ignored.
        """
        if not rows.num_rows:
            return
        masks = (
            self._state.addressed_to(rows)
            & by_topic(rows, self._subscriptions.active)
            & ~by_topic(rows, self.parked_mask)
        )
        sequences = int64(rows, "sequence")
        for subscription in numbers_in(masks):
            last, _, until = self._state.moved.find_moves(subscription, message_ids(rows))
            # Cancelled messages are moved, too: they may be restored.
            released = np.flatnonzero((masks >> subscription & 1 > 0) & (last == sequences))
            if len(released):
                _, first = np.unique(np.stack(message_ids(rows))[:, released], axis=1, return_index=True)
                released = released[np.sort(first)]
                chosen, known = rows.take(pa.array(released)), rows["was_due"].fill_null(0).to_numpy()[released]
                # A row of an earlier version does not say when it was due; it was by the last cutoff.
                latest = max(self._context.released, self._context.highest_cutoff)
                due = np.where(known > 0, known, np.minimum(until[released] - self._context.remembered_millis, latest))
                order = np.lexsort([*message_ids(chosen)[::-1], sequences[released], due, known])
                chosen, due = chosen.take(pa.array(order)), due[order]
                times = np.maximum(self._context.now + self._after(chosen, subscription, known[order]), due)
                self._state.move_messages(chosen, subscription, times, self._in_order(due), due)
                self._state.unwanted_moves += len(due)  # the rows that were parked

    def drain_parked(self, rows: pa.Table, topic: str, name: str) -> int:
        """Moves messages that are parked for an unwritable subscription to now, or to when they are due, if later.

        This tick dispatches them.

        Args:
            rows: as MESSAGES: rows at HELD_DELIVER_AT. Those that a later move replaced are ignored.
            topic: the source topic.
            name: of the subscription.

        Returns:
            how many messages go out; 0 also where messages are parked for another reason, too.
        """
        names = self._subscriptions.names.get(topic, ())
        number = names.index(name) if name in names else -1
        if number < 0 or not rows.num_rows or not self._only_unwritable(topic) >> number & 1:
            return 0
        last, _, _ = self._state.moved.find_moves(number, message_ids(rows))
        is_wanted = self._state.addressed_to(rows) & self._subscriptions.active(topic)
        sequences = int64(rows, "sequence")
        chosen = np.flatnonzero((is_wanted >> number & 1 > 0) & (last == sequences))
        if not len(chosen):
            return 0
        rows, due = rows.take(pa.array(chosen)), rows["was_due"].fill_null(0).to_numpy()[chosen]
        order = np.lexsort([*message_ids(rows)[::-1], sequences[chosen], due])
        rows, due = rows.take(pa.array(order)), due[order]
        times = np.maximum(due, min(self._context.now, self._context.cutoff))  # some are due within the lookahead
        moved = self._in_order(due)
        self._let_through.setdefault((topic, number), int(moved[0]))
        self._state.move_messages(rows, number, times, moved, due)
        self._state.unwanted_moves += len(order)  # the rows that were parked
        return len(order)

    def _after(self, rows: pa.Table, subscription: int, due: Int64Array) -> Int64Array:
        """Returns the delay of each row from now: the number of its step times PACE_MILLIS.

        Args:
            rows: as MESSAGES.
            subscription: its number.
            due: int64, (rows,), ascending: when they were due, ms since the epoch; 0: not known.

        Returns:
            int64, (rows,), ms.
        """
        after = np.zeros(len(due), np.int64)
        for topic in pc.unique(rows["topic"]).to_pylist() if self._pace else ():
            if steps := self._pace.get(topic, {}).get(self._subscriptions.names[topic][subscription]):
                chosen = np.flatnonzero(pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False))
                after[chosen] = step_of(due[chosen], steps) * PACE_MILLIS
        return after

    def _in_order(self, rows: Int64Array) -> Int64Array:
        """Returns rising sequences, int64, (rows,), for rows that are moved together, so that they keep their order.

        Of very many rows the last ones share a sequence, so that the tick has sequences left.
        """
        most = min(_MAX_IN_ORDER, max(0, self._context.n_sequences_left - _LEFT_FOR_OTHERS))
        return self._context.next_sequences(np.minimum(np.arange(len(rows)), most))
