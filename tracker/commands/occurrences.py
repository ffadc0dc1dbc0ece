"""Moves recurring messages on to their next occurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.outcomes import NOT_DELIVERED
from tracker.context import Context
from tracker.message_state.changes import PAUSED_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    are_recurring,
    concat,
    has_occurrences,
    in_order,
    int64,
    message_ids,
    position_texts,
    typed,
    where,
    with_columns,
)
from tracker.packing import pack, unpack
from tracker.rebuilt import OCCURRENCES_DONE
from tracker.recurrence.columns import NEVER, Occurrence, PendingOccurrences, Recurrences, counts_from
from tracker.recurrence.recurrence import REPEAT, Misfire, Recurrence
from tracker.store import Store
from tracker.subscriptions import Subscriptions, numbers_in

_TABLE = "occurrences_done"

# A message of a subscription: subscription number, ledger id, entry id, batch index (0: the entry is one message).
Message = tuple[int, int, int, int]

_T = TypeVar("_T")


class Done(NamedTuple):
    """An occurrence that was done before a rebuild. Times are ms since the epoch."""

    at: int  # the next occurrence is later than this
    sent_at: int | None  # when it was sent; None: not known

    def since(self, now: int) -> tuple[int, int]:
        """Returns the two times by which the following occurrence is computed, ms since the epoch.

        Args:
            now: used instead of `sent_at` if that is not known, ms since the epoch.

        Returns:
            the following occurrence is later than the first time; `misfire` applies to occurrences due by the second.
        """
        return self.at, now if self.sent_at is None else self.sent_at


class EarlierOccurrences:
    """Keeps the occurrences that were done, or rescheduled, before a rebuild, until their messages are past them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: dict[Message, dict[int, Done]] = {}
        self._rescheduled: dict[Message, dict[int, int]] = {}
        self._is_changed = False
        if data := store.get(_TABLE, (0, 0)):
            self._read(unpack(data))

    def __bool__(self) -> bool:
        return bool(self._done or self._rescheduled)

    def __contains__(self, message: Message) -> bool:
        return message in self._done or message in self._rescheduled

    def done(self, message: Message) -> Mapping[int, Done]:
        """Returns by number the occurrences of a message that were done."""
        return self._done.get(message, {})

    def rescheduled(self, message: Message) -> Mapping[int, int]:
        """Returns by number when the rescheduled occurrences of a message are due, ms since the epoch."""
        return self._rescheduled.get(message, {})

    def forget(self, message: Message, last: int) -> None:
        """Forgets the occurrences of a message up to the number `last`."""
        _forget(self._done, message, last)
        _forget(self._rescheduled, message, last)
        self._is_changed = True

    def rebuild(self, rows: pa.Table) -> None:
        """Restores the state after a rebuild, from OCCURRENCES_DONE."""
        self._read(rows)
        self._is_changed = bool(rows.num_rows)

    def save(self) -> None:
        """Writes the changes to the store."""
        if not self._is_changed:
            return
        rows: list[tuple[int | None, ...]]
        rows = [(*message, n, at, None, sent) for message, of in self._done.items() for n, (at, sent) in of.items()]
        rows += [(*message, n, 0, due, None) for message, of in self._rescheduled.items() for n, due in of.items()]
        if rows:
            columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
            self._store.put(_TABLE, (0, 0), pack(pa.table(columns, names=OCCURRENCES_DONE.names)))
        else:
            self._store.remove(_TABLE, (0, 0))
        self._is_changed = False

    def _read(self, rows: pa.Table) -> None:
        """Reads rows of OCCURRENCES_DONE. Earlier versions did not have all columns."""
        columns = (concat([rows], OCCURRENCES_DONE)[name].to_pylist() for name in OCCURRENCES_DONE.names)
        for subscription, ledger, entry, index, number, at, due, sent_at in zip(*columns, strict=True):
            message = subscription, ledger, entry, max(index, 0)
            if due is None:
                self._done.setdefault(message, {})[number] = Done(at, sent_at)
            else:
                self._rescheduled.setdefault(message, {})[number] = due


def _forget(kept: dict[Message, dict[int, _T]], message: Message, last: int) -> None:
    """Forgets the occurrences of a message up to the number `last`."""
    left = {number: one for number, one in kept.pop(message, {}).items() if number > last}
    if left:
        kept[message] = left


class CurrentOccurrence(NamedTuple):
    """The current occurrence of a recurring message. Times are ms since the epoch."""

    message: Message
    rule: Recurrence
    start: int  # when the first occurrence is
    number: int
    since: int  # the next occurrence is later than this
    published: int


class CurrentOccurrences:
    """The current occurrences of recurring messages, in columns. Times are ms since the epoch.

    Args:
        rows: as MESSAGES, of recurring messages.
        masks: int64, (rows,): the subscriptions to which they go, as bits.

    Attributes:
        recurrences: the rules of the messages.
        numbers: int64, (rows,): numbers of the occurrences.
        since: int64, (rows,): the next occurrences are later than this.
        was_due: int64, (rows,): when the occurrences were due before they were parked or shaped.
        by_rule: int64, (rows,): when the occurrences are due by the rule.
        is_paused: bool, (rows,): the message is paused.
    """

    def __init__(self, rows: pa.Table, masks: Int64Array) -> None:
        self.recurrences = Recurrences(rows)
        self.numbers = int64(rows, "occurrence")
        self.is_paused: BoolArray = int64(rows, "deliver_at") == PAUSED_DELIVER_AT
        at = pc.if_else(pa.array(self.is_paused), rows["occurrence_at"], rows["deliver_at"])
        due = pc.coalesce(rows["was_due"], at)
        # An occurrence that shaping moved was not missed, and delays no other one.
        named = pc.coalesce(rows["shaped_from"], due)
        self.since: Int64Array = pc.max_element_wise(pc.coalesce(rows["occurrence_at"], named), named).to_numpy()
        self.was_due: Int64Array = due.to_numpy()
        self.by_rule: Int64Array = pc.coalesce(rows["occurrence_at"], named).to_numpy()
        self._masks = masks
        self._position = message_ids(rows)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.numbers)

    def message(self, i: int) -> Message:
        """Returns the message of a row, which goes to one subscription."""
        ledger, entry, index = (int(column[i]) for column in self._position)
        return int(self._masks[i]).bit_length() - 1, ledger, entry, max(index, 0)

    def one(self, i: int) -> CurrentOccurrence:
        """Returns the occurrence of a row, which goes to one subscription."""
        rule, start = self.recurrences.one(i)
        published = int(self.recurrences.published[i])
        return CurrentOccurrence(self.message(i), rule, start, int(self.numbers[i]), int(self.since[i]), published)


class FailedSchedules:
    """Collects a tick's recurring messages that have no further occurrence because their rule fails.

    Attributes:
        noted: (source topic, position, why) of each of them.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._rejects: list[pa.Table] = []
        self.noted: list[tuple[str, str, str]] = []

    def find_failed(
        self,
        rows: pa.Table,
        masks: Int64Array,
        current: CurrentOccurrences,
        ended: Int64Array,
        last: Mapping[int, tuple[int, int]],
        now: int,
    ) -> None:
        """Finds out which schedules have ended because their rule fails.

        Args:
            rows: as MESSAGES, (rows,), of recurring messages.
            masks: int64, (rows,): their subscriptions, as bits.
            ended: int64, (n,): the indexes of those that have no further occurrence.
            last: by index (number, time in ms since the epoch) of the last occurrence, if it is not the current one.
            now: ms since the epoch.
        """
        for i in ended.tolist():
            number, since = last.get(i, (int(current.numbers[i]), int(current.since[i])))
            rule = current.recurrences.rule(i)
            if rule.why_unreadable is not None:
                self._reject(rows.slice(i, 1), int(masks[i]), f"the occurrences after {number}: {rule.why_unreadable}")
                continue
            if rule.every_millis is not None or (rule.times is not None and number >= rule.times):
                continue
            one = current.one(i)
            after = counts_from(since, one.published, now) if rule.misfire is Misfire.ALL else max(since, now)
            if (why := rule.why_failed(after, one.start)) is not None:
                self._reject(rows.slice(i, 1), int(masks[i]), f"the occurrences after {number}: {REPEAT} {why}")

    def _reject(self, row: pa.Table, mask: int, why: str) -> None:
        names = self._subscriptions.names[row["topic"][0].as_py()]
        found = typed(row, MESSAGES)
        self.noted.append((row["topic"][0].as_py(), position_texts(row)[0].as_py(), why))
        for number in range(mask.bit_length()):
            if mask >> number & 1:
                self._rejects.append(
                    with_columns(
                        found,
                        reason=pa.array([f"{NOT_DELIVERED}{names[number]}: {why}"]),
                        subscription=pa.nulls(1, pa.string()),
                        sequence=pa.nulls(1, pa.int64()),
                        was_due=pa.nulls(1, pa.int64()),
                    )
                )

    def take_rejects(self) -> pa.Table:
        """Removes and returns the rejects, as MESSAGES: a row for each message and subscription, with the reason."""
        taken, self._rejects = concat(self._rejects), []
        return taken


# An occurrence that is later than this, ms, was missed: with the misfire policy `skip` it is not delivered.
MISFIRE_GRACE_MILLIS = 60_000

# The most following occurrences, of all messages, that a shard dispatches in a tick; the others come in the next tick.
MOST_AT_ONCE = 5_000


class Occurrences:
    """Dispatches the occurrences of recurring messages, and moves each message on to its next one.

    A recurring message has one row that counts for each subscription: that of its pending occurrence. The next one
    follows from it, the message's properties and the tick. Numbers rise by one, however many occurrences were missed.

    Args:
        state: records the moves.

    Attributes:
        failed: the messages whose rule fails.
        n_misfires: how often missed occurrences of a message were left out, counted for each subscription.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._state = state
        self.failed = FailedSchedules(context.subscriptions)
        self._earlier = EarlierOccurrences(context.store)
        self.n_misfires = 0

    def dispatch_occurrences(
        self, rows: pa.Table, masks: Int64Array, shaped: Int64Array, expired: Int64Array | None = None
    ) -> tuple[pa.Table, Int64Array]:
        """Moves recurring messages that are dispatched on to their next occurrence.

        Args:
            rows: as MESSAGES, in order, due at the cutoff or before.
            masks: int64, (rows,): the subscriptions to which each row goes now, as bits.
            shaped: int64, (rows,): the subscriptions of the row's topic that are shaped, as bits. If there are any, no
                further occurrence of the row's message goes out in this tick.
            expired: int64, (rows,): the subscriptions for which the occurrence has expired, as bits; None: none.

        Returns:
            the rows, and those of following occurrences that are due at the cutoff, in order; and their masks, which
            are 0 where an occurrence is skipped, because it was missed or has been delivered.
        """
        if not has_occurrences(rows):
            return rows, masks
        now, cutoff = self._context.now, self._context.cutoff
        if self._earlier:
            index, masks = _each_subscription(rows, masks)
            rows, shaped = rows.take(pa.array(index)), shaped[index]
            expired = None if expired is None else expired[index]
        chosen = np.flatnonzero(are_recurring(rows) & (masks != 0))
        masks, wanted = masks.copy(), masks
        current = CurrentOccurrences(_take(rows, chosen), masks[chosen])
        is_skipped = self._are_skipped(current)
        following = self._next_times(current)
        self.n_misfires += _misfires(current, following, is_skipped, now, masks[chosen])
        further: list[tuple[int, Occurrence]] = []
        pending = PendingOccurrences(np.where(is_skipped, current.numbers, current.numbers + 1), following)
        # Rows are looked at one by one unless all that they need is to wait for the next occurrence.
        is_due = (following != NEVER) & (following <= cutoff)
        for i in np.flatnonzero(is_due | is_skipped | self._have_done(current)).tolist():
            row = current.one(i)
            room = 0 if shaped[chosen[i]] else MOST_AT_ONCE - len(further)
            others, last = self._following(row, not is_skipped[i], room)
            further += [(int(chosen[i]), one) for one in others]
            pending.put(i, last)
        ended = np.flatnonzero(pending.times == NEVER)
        if len(ended):
            out = {int(at): (one.number, one.due if one.at is None else one.at) for at, one in further}
            last_out = {i: out[int(chosen[i])] for i in ended.tolist() if int(chosen[i]) in out}
            self.failed.find_failed(_take(rows, chosen), wanted[chosen], current, ended, last_out, now)
        masks[chosen[is_skipped]] = 0
        is_replaced = is_skipped if expired is None else is_skipped | (expired[chosen] & wanted[chosen] != 0)
        self._move_on(rows, wanted, chosen, pending, is_replaced)
        # Occurrences that were parked, or put off to a later tick, go out late: in the order in which they were due.
        is_late = pc.and_(pc.is_valid(rows["occurrence"]), pc.is_valid(rows["was_due"]))
        is_late = pc.and_(is_late, pc.is_null(rows["shaped_from"]))  # those with a place go out at their place
        if not further and not pc.any(is_late).as_py():
            return rows, masks
        has_place = pa.array(shaped & wanted != 0)
        due = pc.if_else(pc.and_not(is_late, has_place), rows["was_due"], rows["deliver_at"])
        shaped_from = pc.if_else(pc.and_(is_late, has_place), rows["was_due"], rows["shaped_from"])
        was_due = pc.if_else(is_late, None, rows["was_due"])
        rows = with_columns(rows, deliver_at=due, was_due=was_due, shaped_from=shaped_from)
        at = np.array([i for i, _ in further], np.int64)
        more = with_columns(
            rows.take(pa.array(at)),
            deliver_at=pa.array([one.due for _, one in further], pa.int64()),
            occurrence=pa.array([one.number for _, one in further], pa.int64()),
            occurrence_at=pa.array([one.at for _, one in further], pa.int64()),
            shaped_from=pa.nulls(len(at), pa.int64()),
        )
        name, all_masks = "mask", np.append(masks, wanted[at])
        both = in_order(concat([rows, more], rows.schema).append_column(name, pa.array(all_masks)))
        return both.drop_columns([name]), int64(both, name)

    def skip_next(self, rows: pa.Table, subscription: int, sequence: int) -> Int64Array:
        """Moves messages on to the occurrence after the pending one, which is not delivered. A paused one stays paused.

        Args:
            rows: as MESSAGES: those that count for the subscription.
            subscription: its number.
            sequence: of the moves.

        Returns:
            int64, (rows,), ms since the epoch: the next occurrence is later than this.
        """
        masks = np.full(rows.num_rows, 1 << subscription)
        current = CurrentOccurrences(rows, masks)
        following = self._next_times(current)
        self.failed.find_failed(rows, masks, current, np.flatnonzero(following == NEVER), {}, self._context.now)
        times = np.where(current.is_paused & (following != NEVER), PAUSED_DELIVER_AT, following)
        pending = PendingOccurrences(current.numbers + 1, times, np.where(current.is_paused, following, NEVER))
        self._replace_all(rows, current, subscription, pending, sequence)
        return current.since

    def pause_schedules(self, rows: pa.Table, subscription: int, sequence: int) -> Int64Array:
        """Has the pending occurrences of messages wait; the arguments are those of `skip_next`.

        Returns:
            int64, (rows,), ms since the epoch: when the pending occurrences are due now.
        """
        current = CurrentOccurrences(rows, np.full(rows.num_rows, 1 << subscription))
        pending = PendingOccurrences(current.numbers, np.full(len(current), PAUSED_DELIVER_AT), current.by_rule)
        self._replace_all(rows, current, subscription, pending, sequence)
        return pending.times

    def resume_schedules(self, rows: pa.Table, subscription: int, sequence: int) -> Int64Array:
        """Gives pending occurrences back their time by the rule; arguments and result are as of `pause_schedules`."""
        now = self._context.now
        current = CurrentOccurrences(rows, np.full(rows.num_rows, 1 << subscription))
        # A late occurrence is treated like one that was parked: by the misfire policy.
        was_due = np.where(current.by_rule < now, current.by_rule, NEVER)
        pending = PendingOccurrences(current.numbers, np.maximum(current.by_rule, now), current.by_rule, was_due)
        self._replace_all(rows, current, subscription, pending, sequence)
        return pending.times

    def _replace_all(
        self,
        rows: pa.Table,
        current: CurrentOccurrences,
        subscription: int,
        pending: PendingOccurrences,
        sequence: int,
    ) -> None:
        if self._earlier:  # what a rebuild has found of these occurrences, a pause too, holds no more
            for i, number in enumerate(current.numbers.tolist()):
                self._earlier.forget(current.message(i), number)
        is_replaced = np.ones(rows.num_rows, np.bool_)
        self._state.replace_occurrences(rows, subscription, pending, is_replaced, sequence)

    def without_done(self, rows: pa.Table, subscription: int) -> pa.Table:
        """Replaces occurrences that were done before a rebuild by the next ones that were not.

        Args:
            rows: as MESSAGES.
            subscription: its number.

        Returns:
            as MESSAGES: the rows, without messages that have no such occurrence.
        """
        if not self._earlier or not has_occurrences(rows):
            return rows
        chosen = np.flatnonzero(are_recurring(rows))
        current = CurrentOccurrences(_take(rows, chosen), np.full(len(chosen), 1 << subscription))
        following: dict[int, Occurrence | None] = {}
        for i in range(len(current)):
            if int(current.numbers[i]) in self._earlier.done(current.message(i)):
                following[int(chosen[i])] = self._first_not_done(current.one(i))
        if not following:
            return rows
        columns = {name: rows[name].to_pylist() for name in ("occurrence", "deliver_at", "occurrence_at", "was_due")}
        for i, one in following.items():
            if one is not None:
                for values, value in zip(columns.values(), one[:3], strict=False):
                    values[i] = value
                columns["was_due"][i] = None
        changed = with_columns(rows, **{name: pa.array(values, pa.int64()) for name, values in columns.items()})
        is_left = np.ones(rows.num_rows, np.bool_)
        is_left[[i for i, one in following.items() if one is None]] = False
        return where(changed, is_left)

    def _first_not_done(self, row: CurrentOccurrence) -> Occurrence | None:
        """Returns the first occurrence after `row` that was not done before a rebuild; None: all were done."""
        now, done = self._context.now, self._earlier.done(row.message)
        times = self._earlier.rescheduled(row.message)
        found = self._next(row, row.number, *done[row.number].since(now), times)
        while found is not None and found.number in done:
            found = self._next(row, found.number, *done[found.number].since(now), times)
        return found

    def rebuild(self, rows: pa.Table) -> None:
        """Restores the state after a rebuild, from OCCURRENCES_DONE."""
        self._earlier.rebuild(rows)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._earlier.save()

    def _are_skipped(self, current: CurrentOccurrences) -> BoolArray:
        """Tells which occurrences are skipped, because they were missed or done before a rebuild: bool, (rows,)."""
        is_late: BoolArray = self._context.now - current.was_due > MISFIRE_GRACE_MILLIS
        is_skipped = current.recurrences.have_misfire(Misfire.SKIP) & is_late
        for i in np.flatnonzero(self._have_done(current)).tolist():
            is_skipped[i] |= int(current.numbers[i]) in self._earlier.done(current.message(i))
        return is_skipped

    def _have_done(self, current: CurrentOccurrences) -> BoolArray:
        """Tells which messages have occurrences that were done, or rescheduled, before a rebuild: bool, (rows,)."""
        if not self._earlier:
            return np.zeros(len(current), np.bool_)
        return np.array([current.message(i) in self._earlier for i in range(len(current))], np.bool_)

    def _next_times(self, current: CurrentOccurrences) -> Int64Array:
        """Returns when the next occurrences are: int64, (rows,), ms since the epoch; NEVER: there is none."""
        # Even with the policy `all` nothing is missed before the publish time; the producer's clock may be ahead.
        now, recurrences = self._context.now, current.recurrences
        not_missed = np.where(recurrences.have_misfire(Misfire.ALL), np.minimum(recurrences.published, now), now)
        return recurrences.following(current.numbers, np.maximum(current.since, not_missed))

    def _following(self, row: CurrentOccurrence, is_out: bool, most: int) -> tuple[list[Occurrence], Occurrence | None]:
        """Returns the following occurrences that are due, and the one that is pending after them; None: none is.

        Args:
            is_out: whether the current occurrence is dispatched, not skipped.
            most: how many following occurrences may be dispatched.
        """
        now, cutoff = self._context.now, self._context.cutoff
        due: list[Occurrence] = []
        # A missed occurrence that is skipped passes its number to the next one.
        done, times = self._earlier.done(row.message), self._earlier.rescheduled(row.message)
        number = row.number if is_out or row.number in done else row.number - 1
        since, then = done[number].since(now) if number in done else (row.since, now)
        while (found := self._next(row, number, since, then, times)) is not None:
            if found.number in done:
                number = found.number
                since, then = done[number].since(now)
                continue
            if row.rule.misfire is Misfire.SKIP and now - found.due > MISFIRE_GRACE_MILLIS:
                found = self._next(row, number, now, now, {})
                if found is None:
                    break
            number, since, then = found.number, max(found.due, found.at or 0), now
            if found.due > cutoff:
                break
            elif len(due) >= most:
                # It is put off beyond the cutoff, because what is due by the cutoff counts as dispatched.
                at = found.due if found.at is None else found.at
                found = Occurrence(found.number, cutoff + 1, at, found.due)
                break
            else:
                due.append(found)
        if done or times:
            self._earlier.forget(row.message, found.number if found is not None else number + 1)
        return due, found

    def _next(
        self, row: CurrentOccurrence, number: int, since: int, now: int, times: Mapping[int, int]
    ) -> Occurrence | None:
        """Returns the occurrence that follows another one; None: there is none.

        Args:
            row: an occurrence of the message.
            number: of the other one.
            since: the following occurrence is later than this, ms since the epoch.
            now: when the other one went out, ms since the epoch. Occurrences missed by then are left out, except with
                the policy `all`.
            times: by number: when rescheduled occurrences are due, ms since the epoch.
        """
        due = times.get(number + 1)
        if row.rule.misfire is Misfire.ALL:
            after = counts_from(since, row.published, now)
        else:
            after = since if due is not None else max(since, now)
        found = row.rule.next_occurrence(number, after, row.start, after)
        if found is None:
            return None
        return Occurrence(*found) if due is None else Occurrence(found[0], due, found[1])

    def _move_on(
        self,
        rows: pa.Table,
        masks: Int64Array,
        chosen: Int64Array,
        pending: PendingOccurrences,
        is_replaced: BoolArray,
    ) -> None:
        """Gives messages a new row, that of their pending occurrence, for each subscription to which they went.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): these subscriptions, as bits.
            chosen: int64, (n,): the indexes of the messages' rows.
            pending: the pending occurrences of the n messages.
            is_replaced: bool, (n,): the old row is not dispatched.
        """
        # A row that is dispatched and has no successor needs no new row.
        moves_on = (pending.times != NEVER) | is_replaced
        for subscription in numbers_in(masks[chosen]):
            at = np.flatnonzero((masks[chosen] >> subscription & 1 > 0) & moves_on)
            if len(at):
                self._state.replace_occurrences(
                    _take(rows, chosen[at]),
                    subscription,
                    pending.take_rows(at),
                    is_replaced[at],
                    self._context.next_sequence(),
                )


def _misfires(
    current: CurrentOccurrences, following: Int64Array, is_skipped: BoolArray, now: int, masks: Int64Array
) -> int:
    """Returns how many messages leave missed occurrences out, counted for each of their subscriptions.

    Args:
        current: the current occurrences, (rows,).
        following: int64, (rows,), ms since the epoch: when the next occurrences are.
        is_skipped: bool, (rows,): the occurrence is not dispatched.
        now: ms since the epoch.
        masks: int64, (rows,): the subscriptions, as bits.
    """
    has_misfired = is_skipped.copy()
    if (current.since < now).any():
        missed = current.recurrences.following(current.numbers, current.since)
        has_misfired |= (missed != NEVER) & (missed <= now) & (following > missed)
    return sum(mask.bit_count() for mask in masks[has_misfired].tolist())


def _take(rows: pa.Table, index: Int64Array) -> pa.Table:
    """Takes rows by ascending indexes; if these are all rows, they are not copied."""
    return rows if len(index) == rows.num_rows else rows.take(pa.array(index))


def _each_subscription(rows: pa.Table, masks: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Repeats recurring messages for each subscription, because each has its own occurrences that were done.

    Args:
        rows: as MESSAGES.
        masks: int64, (rows,): the subscriptions, as bits.

    Returns:
        the indexes of rows, and the mask of each repetition, int64, (n,) each.
    """
    recurs = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
    bits = [
        [1 << b for b in range(mask.bit_length()) if mask >> b & 1] if repeats and mask > 0 else [mask]
        for mask, repeats in zip(masks.tolist(), recurs.tolist(), strict=True)
    ]
    index = np.repeat(np.arange(len(bits)), [len(row_bits) for row_bits in bits])
    return index, np.array([bit for row_bits in bits for bit in row_bits], np.int64)
