"""Recurring messages: when one of their occurrences is handed out, the next one takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.moment import Moment
from tracker.commands.operations import Operations
from tracker.commands.rebuilt import OCCURRENCES_DONE
from tracker.messages import (
    BoolArray,
    Int64Array,
    concat,
    has_occurrences,
    in_order,
    int64,
    pack,
    unpack,
    with_columns,
)
from tracker.recurrence.recurrence import Misfire, Recurrence
from tracker.recurrence.start import first_of
from tracker.store import Store

# An occurrence that comes so much later than it was due, ms, was missed: with `misfire` skip it is passed over.
MISFIRE_GRACE_MILLIS = 60_000

# So many occurrences that follow one another does a shard hand out in one tick; the rest comes with the next.
MOST_AT_ONCE = 5_000

_TABLE = "occurrences_done"

# The number of a subscription, ledger, entry, number in the entry.
_Message = tuple[int, int, int, int]

_COLUMNS = [
    *("ledger_id", "entry_id", "batch_index", "publish_time"),
    *("occurrence", "occurrence_at", "deliver_at", "was_due", "shaped_from", "properties"),
]


class Occurrence(NamedTuple):
    """An occurrence of a recurring message. Times are ms since the epoch."""

    number: int  # from 1
    due: int
    at: int | None = None  # when it is due by its rule; None: `due`


class _Row(NamedTuple):
    """What the next occurrence depends on. Times are ms since the epoch."""

    message: _Message
    rule: Recurrence
    start: int  # when the first occurrence is
    number: int
    since: int  # the next occurrence is later than this
    was_due: int


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
        self._store = store
        self._operations = operations
        data = store.get(_TABLE, (0, 0))
        self._done = _as_done(unpack(data)) if data else {}
        self._is_changed = False
        self.n_misfires = 0

    def hand_out(
        self, rows: pa.Table, masks: Int64Array, moment: Moment, cutoff: int, one_by_one: BoolArray
    ) -> tuple[pa.Table, Int64Array]:
        """Moves the recurring messages that are handed out on to their next occurrence.

        Args:
            rows: as MESSAGES, in order, due at the cutoff or before.
            masks: int64, (rows,): the subscriptions to which each row goes now, as bits.
            moment: of this tick.
            cutoff: ms since the epoch.
            one_by_one: bool, (rows,): of the row's message no further occurrence goes out in this tick.

        Returns:
            the rows, in order, with those of the following occurrences that are due at the cutoff, too; and their
            masks, 0 where an occurrence is passed over, because it was missed or has been delivered.
        """
        if not has_occurrences(rows):
            return rows, masks
        if self._done:
            index, masks = _each_subscription(rows, masks)
            rows, one_by_one = rows.take(pa.array(index)), one_by_one[index]
        chosen = np.flatnonzero(pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False) & (masks != 0))
        masks, wanted = masks.copy(), masks
        further: list[tuple[int, int, int, int | None]] = []
        pending: list[tuple[int, bool, Occurrence | None]] = []
        recurring = rows.take(pa.array(chosen))
        for i, row in zip(chosen.tolist(), self._rows(recurring, masks[chosen]), strict=True):
            is_out = not self._is_passed_over(row, moment.now)
            room = 0 if one_by_one[i] else MOST_AT_ONCE - len(further)
            others, following = self._following(row, is_out, moment.now, cutoff, room)
            further += [(i, *other) for other in others]
            if self._has_misfired(row, is_out, following, moment.now):
                self.n_misfires += int(masks[i]).bit_count()
            if not is_out:
                masks[i] = 0
            # A row that goes out and has no successor needs no other one in its place.
            if following is not None or not is_out:
                pending.append((i, is_out, following))
        self._move_on(rows, wanted, pending, moment)
        # What was held back or put off is one of those that are late, in their order.
        is_late = pc.and_(pc.is_valid(rows["occurrence"]), pc.is_valid(rows["was_due"]))
        is_late = pc.and_(is_late, pc.is_null(rows["shaped_from"]))  # what has a place goes then
        if not further and not pc.any(is_late).as_py():
            return rows, masks
        due = pc.if_else(is_late, rows["was_due"], rows["deliver_at"])
        rows = with_columns(rows, deliver_at=due, was_due=pc.if_else(is_late, None, rows["was_due"]))
        at, numbers, times = (np.array([one[i] for one in further], np.int64) for i in range(3))
        more = with_columns(
            rows.take(pa.array(at)),
            deliver_at=pa.array(times),
            occurrence=pa.array(numbers),
            occurrence_at=pa.nulls(len(at), pa.int64()),
            shaped_from=pa.nulls(len(at), pa.int64()),
        )
        name, all_masks = "mask", np.append(masks, wanted[at])
        both = in_order(concat([rows, more], rows.schema).append_column(name, pa.array(all_masks)))
        return both.drop_columns([name]), int64(both, name)

    def skip(self, rows: pa.Table, subscription: int, sequence: int, moment: Moment) -> Int64Array:
        """Moves messages on to the occurrence after their next one, which is not delivered.

        Args:
            rows: as MESSAGES, those that count for the subscription.
            subscription: its number.
            sequence: of the moves.
            moment: of this tick.

        Returns:
            int64, (rows,), ms since the epoch: after this the following occurrence is.
        """
        masks = np.full(rows.num_rows, 1 << subscription)
        of = list(self._rows(rows, masks))
        following = [self._next(row, row.number, row.since, moment.now) for row in of]
        self._replace(rows, subscription, following, np.ones(rows.num_rows, np.bool_), sequence, moment)
        return np.array([row.since for row in of], np.int64)

    def rebuild(self, rows: pa.Table) -> None:
        """Takes over the occurrences that were done before a rebuild: see `OCCURRENCES_DONE`."""
        self._done = _as_done(rows)
        self._is_changed = bool(self._done)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        if self._is_changed:
            rows = [(*message, *done) for message, of in self._done.items() for done in of.items()]
            if rows:
                columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
                self._store.put(_TABLE, (0, 0), pack(pa.table(columns, names=OCCURRENCES_DONE.names)))
            else:
                self._store.remove(_TABLE, (0, 0))
            self._is_changed = False

    def _rows(self, rows: pa.Table, masks: Int64Array) -> Iterator[_Row]:
        columns = [masks.tolist(), *(rows[name].to_pylist() for name in _COLUMNS)]
        for mask, ledger, entry, index, published, number, at, due, held_from, shaped_from, properties in zip(
            *columns, strict=True
        ):
            subscription = mask.bit_length() - 1 if self._done else 0
            rule, start = _rule(tuple(properties or ()), published)
            was_due = due if held_from is None else held_from
            # What a rate puts off was not missed, and puts no other one off.
            named = was_due if shaped_from is None else shaped_from
            since = max(named if at is None else at, named)
            yield _Row((subscription, ledger, entry, max(index, 0)), rule, start, number, since, was_due)

    def _is_passed_over(self, row: _Row, now: int) -> bool:
        if row.number in self._done.get(row.message, ()):
            return True
        return row.rule.misfire is Misfire.SKIP and now - row.was_due > MISFIRE_GRACE_MILLIS

    def _has_misfired(self, row: _Row, is_out: bool, following: Occurrence | None, now: int) -> bool:
        """Whether occurrences of a row's message are left out, because they were missed."""
        if row.rule.misfire is Misfire.ALL or row.number in self._done.get(row.message, ()):
            return False
        if not is_out:
            return True
        missed = row.rule.following(row.since, row.start) if row.since < now else None
        return missed is not None and missed <= now and following is not None and following.due > missed

    def _following(
        self, row: _Row, is_out: bool, now: int, cutoff: int, most: int
    ) -> tuple[list[Occurrence], Occurrence | None]:
        """Returns the occurrences that follow a row's and are due, and then the one that is pending; None: none is."""
        due: list[Occurrence] = []
        # One that was missed and is passed over gives its number to the next.
        done = self._done.get(row.message, {})
        number, since = (row.number, row.since) if is_out or row.number in done else (row.number - 1, row.since)
        since = done.get(number, since)
        while (found := self._next(row, number, since, now)) is not None:
            number, since = found.number, found.due
            if found.number in done:
                since = done[number]
            elif found.due > cutoff:
                break
            elif len(due) >= most:
                # Not to be taken for one that has been handed out, its time is put off to the next tick's.
                found = Occurrence(found.number, cutoff + 1, found.due)
                break
            else:
                due.append(found)
        if done:
            last = found.number if found is not None else number + 1
            self._done[row.message] = {n: at for n, at in done.items() if n > last}
            self._done = {message: of for message, of in self._done.items() if of}
            self._is_changed = True
        return due, found

    def _next(self, row: _Row, number: int, since: int, now: int) -> Occurrence | None:
        since = since if row.rule.misfire is Misfire.ALL else max(since, now)
        found = row.rule.next_occurrence(number, since, row.start, now)
        return None if found is None else Occurrence(*found)

    def _move_on(
        self, rows: pa.Table, masks: Int64Array, pending: list[tuple[int, bool, Occurrence | None]], moment: Moment
    ) -> None:
        """Gives messages the row of their pending occurrence, for each subscription to which they went."""
        at = np.array([i for i, _, _ in pending], np.int64)
        is_replaced = np.array([not is_out for _, is_out, _ in pending], np.bool_)
        for subscription in range(int(masks[at].max(initial=0)).bit_length()):
            chosen = np.flatnonzero(masks[at] >> subscription & 1)
            if len(chosen):
                following = [pending[i][2] for i in chosen.tolist()]
                of = rows.take(pa.array(at[chosen]))
                sequence = self._operations.next_sequence(moment)
                self._replace(of, subscription, following, is_replaced[chosen], sequence, moment)

    def _replace(
        self,
        rows: pa.Table,
        subscription: int,
        following: list[Occurrence | None],
        is_replaced: BoolArray,
        sequence: int,
        moment: Moment,
    ) -> None:
        """Puts the following occurrences, None: there is none, in the place of rows.

        Args:
            is_replaced: bool, (rows,): the row is not handed out: the tables have to tell that it is not pending.
        """
        has_next = np.array([found is not None for found in following], np.bool_)
        times = np.array([found.due if found is not None else moment.released for found in following], np.int64)
        numbers = pa.array([found and found.number for found in following], pa.int64())
        at = pa.array([found and found.at for found in following], pa.int64())
        self._operations.move_on(rows, subscription, times, numbers, at, has_next, is_replaced, sequence)


@lru_cache(maxsize=100_000)
def _rule(properties: tuple[tuple[str, str], ...], published: int) -> tuple[Recurrence, int]:
    """Returns how a message recurs, and when its first occurrence is, ms since the epoch."""
    of_message = dict(properties)
    rule = Recurrence.of_properties(of_message)
    assert rule is not None, "a row with an occurrence is of a recurring message"
    return rule, first_of(of_message, published)


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


def _as_done(rows: pa.Table) -> dict[_Message, dict[int, int]]:
    done: dict[_Message, dict[int, int]] = {}
    for *message, number, at in zip(*(rows[name].to_pylist() for name in OCCURRENCES_DONE.names), strict=True):
        subscription, ledger, entry, index = message
        done.setdefault((subscription, ledger, entry, max(index, 0)), {})[number] = at
    return done
