"""Recurring messages: when one of their occurrences is handed out, the next one takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.message_state.earlier_occurrences import EarlierOccurrences, Message
from tracker.commands.message_state.moves import PAUSED_DELIVER_AT
from tracker.commands.moment import Moment
from tracker.commands.operations import Operations
from tracker.commands.schema import PAUSE_SCHEDULE, SKIP_NEXT
from tracker.messages import (
    BoolArray,
    Int64Array,
    are_recurring,
    concat,
    has_occurrences,
    in_order,
    int64,
    message_ids,
    where,
    with_columns,
)
from tracker.recurrence.columns import NEVER, Recurrences
from tracker.recurrence.pending import Occurrence, PendingOccurrences
from tracker.recurrence.recurrence import Misfire, Recurrence
from tracker.recurrence.start import counts_from
from tracker.store import Store

# An occurrence that comes so much later than it was due, ms, was missed: with `misfire` skip it is passed over.
MISFIRE_GRACE_MILLIS = 60_000

# A shard hands out at most this many consecutive occurrences in a tick; the rest comes with the next.
MOST_AT_ONCE = 5_000


class _Row(NamedTuple):
    """A recurring message and the occurrence from which its next one follows. Times are ms since the epoch."""

    message: Message
    rule: Recurrence
    start: int  # when the first occurrence is
    number: int
    since: int  # the next occurrence is later than this
    published: int


class _Rows:
    """Recurring messages and the occurrences from which their next ones follow. Times are ms since the epoch.

    Args:
        rows: as MESSAGES, of recurring messages.
        masks: int64, (rows,): the subscriptions to which they go, as bits.

    Attributes:
        recurrences: of the rows.
        numbers: int64, (rows,), of their occurrences.
        since: int64, (rows,): the next occurrences are later than this.
        was_due: int64, (rows,): when the occurrences were due, whatever held them back.
        by_rule: int64, (rows,): when the occurrences are due by the rule.
        is_paused: bool, (rows,): the message is paused.
    """

    def __init__(self, rows: pa.Table, masks: Int64Array) -> None:
        self.recurrences = Recurrences(rows)
        self.numbers = int64(rows, "occurrence")
        self.is_paused: BoolArray = int64(rows, "deliver_at") == PAUSED_DELIVER_AT
        at = pc.if_else(pa.array(self.is_paused), rows["occurrence_at"], rows["deliver_at"])
        due = pc.coalesce(rows["was_due"], at)
        # What a rate puts off was not missed, and puts no other one off.
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

    def one(self, i: int) -> _Row:
        """Returns what the next occurrence of one row depends on."""
        rule, start = self.recurrences.one(i)
        published = int(self.recurrences.published[i])
        return _Row(self.message(i), rule, start, int(self.numbers[i]), int(self.since[i]), published)


class Occurrences:
    """Hands out the occurrences of recurring messages, and moves each message on to its next one.

    Of a recurring message one row a subscription counts: that of its next occurrence, which follows from the last one,
    the message's properties and the tick. Numbers rise by one, whatever has been missed.

    Args:
        store: where the occurrences are kept that were done before a rebuild.
        operations: to which moves are added.

    Attributes:
        n_misfires: how often a message left out what was missed, for each subscription.
    """

    def __init__(self, store: Store, operations: Operations) -> None:
        self._operations = operations
        self._earlier = EarlierOccurrences(store)
        self.n_misfires = 0

    def hand_out(
        self, rows: pa.Table, masks: Int64Array, moment: Moment, cutoff: int, shaped: Int64Array
    ) -> tuple[pa.Table, Int64Array]:
        """Moves the recurring messages that are handed out on to their next occurrence.

        Args:
            rows: as MESSAGES, in order, due at the cutoff or before.
            masks: int64, (rows,): the subscriptions to which each row goes now, as bits.
            moment: of this tick.
            cutoff: ms since the epoch.
            shaped: int64, (rows,): the subscriptions for which a row of this topic has a place, as bits. If there are
                any, no further occurrence of the row's message goes out in this tick.

        Returns:
            the rows, in order, with those of the following occurrences that are due at the cutoff, too; and their
            masks, 0 where an occurrence is passed over, because it was missed or has been delivered.
        """
        if not has_occurrences(rows):
            return rows, masks
        if self._earlier:
            index, masks = _each_subscription(rows, masks)
            rows, shaped = rows.take(pa.array(index)), shaped[index]
        chosen = np.flatnonzero(are_recurring(rows) & (masks != 0))
        masks, wanted = masks.copy(), masks
        of = _Rows(_taken(rows, chosen), masks[chosen])
        is_passed_over = self._are_passed_over(of, moment.now)
        following = self._next_times(of, moment.now)
        self.n_misfires += _misfires(of, following, is_passed_over, moment.now, masks[chosen])
        further: list[tuple[int, Occurrence]] = []
        pending = PendingOccurrences(np.where(is_passed_over, of.numbers, of.numbers + 1), following)
        # One by one those of which more has to be done than to wait for the next one.
        is_due = (following != NEVER) & (following <= cutoff)
        for i in np.flatnonzero(is_due | is_passed_over | self._have_done(of)).tolist():
            row = of.one(i)
            room = 0 if shaped[chosen[i]] else MOST_AT_ONCE - len(further)
            others, last = self._following(row, not is_passed_over[i], moment.now, cutoff, room)
            further += [(int(chosen[i]), one) for one in others]
            pending.put(i, last)
        masks[chosen[is_passed_over]] = 0
        self._move_on(rows, wanted, chosen, pending, is_passed_over, moment)
        # What was held back or put off is one of those that are late, in their order.
        is_late = pc.and_(pc.is_valid(rows["occurrence"]), pc.is_valid(rows["was_due"]))
        is_late = pc.and_(is_late, pc.is_null(rows["shaped_from"]))  # what has a place goes then
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

    def command(self, kind: str, rows: pa.Table, subscription: int, sequence: int, moment: Moment) -> Int64Array:
        """Applies a command to the next occurrence of messages.

        Args:
            kind: of the command: SKIP_NEXT moves a message on to the occurrence after its next one, which is not
                delivered; PAUSE_SCHEDULE has the next one wait; RESUME_SCHEDULE gives it its time by the rule back.
            rows: as MESSAGES, those that count for the subscription; of RESUME_SCHEDULE all are paused.
            subscription: its number.
            sequence: of the moves.
            moment: of this tick.

        Returns:
            int64, (rows,), ms since the epoch: of a skip, after what time the following occurrence is; of the others,
            when the next occurrence is due now.
        """
        of = _Rows(rows, np.full(rows.num_rows, 1 << subscription))
        if kind == SKIP_NEXT:
            following = self._next_times(of, moment.now)
            # What is paused stays so.
            times = np.where(of.is_paused & (following != NEVER), PAUSED_DELIVER_AT, following)
            pending = PendingOccurrences(of.numbers + 1, times, np.where(of.is_paused, following, NEVER))
        elif kind == PAUSE_SCHEDULE:
            pending = PendingOccurrences(of.numbers, np.full(len(of), PAUSED_DELIVER_AT), of.by_rule)
        else:
            # Late, it is as if it had been held back: `misfire` says what comes of it.
            was_due = np.where(of.by_rule < moment.now, of.by_rule, NEVER)
            pending = PendingOccurrences(of.numbers, np.maximum(of.by_rule, moment.now), of.by_rule, was_due)
        self._replace(rows, subscription, pending, np.ones(rows.num_rows, np.bool_), sequence, moment)
        return of.since if kind == SKIP_NEXT else pending.times

    def next_rows(self, rows: pa.Table, subscription: int, now: int) -> pa.Table:
        """Returns rows with the next occurrence of their messages, where theirs was done before a rebuild.

        Args:
            rows: as MESSAGES.
            subscription: its number.
            now: ms since the epoch.

        Returns:
            MESSAGES; without rows of messages of which nothing is left.
        """
        if not self._earlier or not has_occurrences(rows):
            return rows
        chosen = np.flatnonzero(are_recurring(rows))
        of = _Rows(_taken(rows, chosen), np.full(len(chosen), 1 << subscription))
        following: dict[int, Occurrence | None] = {}
        for i in range(len(of)):
            if int(of.numbers[i]) in self._earlier.done(of.message(i)):
                following[int(chosen[i])] = self._first_not_done(of.one(i), now)
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

    def _first_not_done(self, row: _Row, now: int) -> Occurrence | None:
        """Returns the first occurrence after a row's, which was done before a rebuild, that was not; None: none is."""
        done, times = self._earlier.done(row.message), self._earlier.rescheduled(row.message)
        found = self._next(row, row.number, *done[row.number].since(now), times)
        while found is not None and found.number in done:
            found = self._next(row, found.number, *done[found.number].since(now), times)
        return found

    def rebuild(self, rows: pa.Table) -> None:
        """Takes over the occurrences that were done before a rebuild: see `OCCURRENCES_DONE`."""
        self._earlier.rebuild(rows)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        self._earlier.save()

    def _are_passed_over(self, of: _Rows, now: int) -> BoolArray:
        """Tells which occurrences are not handed out: bool, (rows,)."""
        is_missed: BoolArray = of.recurrences.have_misfire(Misfire.SKIP) & (now - of.was_due > MISFIRE_GRACE_MILLIS)
        for i in np.flatnonzero(self._have_done(of)).tolist():
            is_missed[i] |= int(of.numbers[i]) in self._earlier.done(of.message(i))
        return is_missed

    def _have_done(self, of: _Rows) -> BoolArray:
        """Tells of which messages occurrences were done, or rescheduled, before a rebuild: bool, (rows,)."""
        if not self._earlier:
            return np.zeros(len(of), np.bool_)
        return np.array([of.message(i) in self._earlier for i in range(len(of))], np.bool_)

    def _next_times(self, of: _Rows, now: int) -> Int64Array:
        """Returns when the next occurrences are: int64, (rows,), ms since the epoch, NEVER where there is none."""
        # With all, too, nothing was missed before the message was published; its producer's clock may be ahead.
        not_missed = np.where(of.recurrences.have_misfire(Misfire.ALL), np.minimum(of.recurrences.published, now), now)
        return of.recurrences.following(of.numbers, np.maximum(of.since, not_missed))

    def _following(
        self, row: _Row, is_out: bool, now: int, cutoff: int, most: int
    ) -> tuple[list[Occurrence], Occurrence | None]:
        """Returns the occurrences that follow a row's and are due, and then the one that is pending; None: none is."""
        due: list[Occurrence] = []
        # One that was missed and is passed over gives its number to the next.
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
                # Not to be taken for one that has been handed out, its time is put off to the next tick's.
                at = found.due if found.at is None else found.at
                found = Occurrence(found.number, cutoff + 1, at, found.due)
                break
            else:
                due.append(found)
        if done or times:
            self._earlier.forget(row.message, found.number if found is not None else number + 1)
        return due, found

    def _next(self, row: _Row, number: int, since: int, now: int, times: Mapping[int, int]) -> Occurrence | None:
        """Returns what follows an occurrence.

        Args:
            since: what follows is later than this, ms since the epoch.
            now: when the occurrence went out, ms since the epoch: what was missed by then is left out, but for `all`.
            times: of those that were rescheduled, ms since the epoch.
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
        moment: Moment,
    ) -> None:
        """Gives messages the row of their pending occurrence, for each subscription to which they went.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): those subscriptions, as bits.
            chosen: int64, (n,): the indexes of the messages' rows.
            pending: of the n messages.
            is_replaced: bool, (n,): the row is not handed out.
        """
        # A row that goes out and has no successor needs no other one in its place.
        moves_on = (pending.times != NEVER) | is_replaced
        for subscription in range(int(masks[chosen].max(initial=0)).bit_length()):
            at = np.flatnonzero((masks[chosen] >> subscription & 1 > 0) & moves_on)
            if len(at):
                sequence = self._operations.next_sequence(moment)
                of = _taken(rows, chosen[at])
                self._replace(of, subscription, pending.take(at), is_replaced[at], sequence, moment)

    def _replace(
        self,
        rows: pa.Table,
        subscription: int,
        pending: PendingOccurrences,
        is_replaced: BoolArray,
        sequence: int,
        moment: Moment,
    ) -> None:
        """Puts the pending occurrences in the place of rows.

        Args:
            is_replaced: bool, (rows,): the row is not handed out: the tables have to tell that it is not pending.
        """
        has_next = pending.times != NEVER
        times = np.where(has_next, pending.times, moment.released)
        numbers = pa.array(pending.numbers, mask=~has_next)
        by_rule = pa.array(pending.by_rule, mask=pending.by_rule == NEVER)
        was_due = pa.array(pending.was_due, mask=pending.was_due == NEVER)
        self._operations.move_on(rows, subscription, times, numbers, by_rule, was_due, has_next, is_replaced, sequence)


def _misfires(of: _Rows, following: Int64Array, is_passed_over: BoolArray, now: int, masks: Int64Array) -> int:
    """Returns how many messages leave out what was missed, counted for each of their subscriptions.

    Args:
        following: int64, (rows,), ms since the epoch: when the next occurrences are.
        is_passed_over: bool, (rows,): the occurrence is not handed out.
        masks: int64, (rows,): the subscriptions, as bits.
    """
    has_misfired = is_passed_over.copy()
    if (of.since < now).any():
        missed = of.recurrences.following(of.numbers, of.since)
        has_misfired |= (missed != NEVER) & (missed <= now) & (following > missed)
    return sum(mask.bit_count() for mask in masks[has_misfired].tolist())


def _taken(rows: pa.Table, index: Int64Array) -> pa.Table:
    """Takes rows by their ascending indexes: all of them without copying what they have."""
    return rows if len(index) == rows.num_rows else rows.take(pa.array(index))


def _each_subscription(rows: pa.Table, masks: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Repeats recurring messages for each subscription, for what has been done is each one's own.

    Returns:
        the indexes of rows, and the mask of each: int64, (n,).
    """
    recurs = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
    bits = [
        [1 << b for b in range(mask.bit_length()) if mask >> b & 1] if repeats and mask > 0 else [mask]
        for mask, repeats in zip(masks.tolist(), recurs.tolist(), strict=True)
    ]
    index = np.repeat(np.arange(len(bits)), [len(of_row) for of_row in bits])
    return index, np.array([bit for of_row in bits for bit in of_row], np.int64)
