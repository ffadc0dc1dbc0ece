"""When messages expire: from a time on, their end, they are not sent.

A message has an end by its properties `expireAt` and `expireAfter`, and by the `expire_after` of a subscription.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.due_time import EXPIRE_AFTER, EXPIRE_AT, MAX_TIME_MILLIS, BadScheduleError, duration, expires_at
from tracker.messages import Int64Array, are_recurring, concat, has_occurrences, int64, is_rejected, where, with_columns
from tracker.rebuilt import PARKED_ENDS
from tracker.store import Store, get_rows, put_rows
from tracker.subscriptions import Subscriptions, by_topic, dead_letters_in

NO_END = 1 << 62  # ms since the epoch; the end of what has none

MOST_ENDED = 20_000  # rows that are taken at once, about; the others follow with the next calls

_TABLE = "parked_ends"
_SLOT_MILLIS = 60_000

_BODY = ("payload", "payload_at", "properties", "key", "ordering_key", "ordering_key_bytes", "retry_reasons")


def may_expire(rows: pa.Table, subscriptions: Subscriptions) -> bool:
    """Whether any of some rows, as MESSAGES, may have an end."""
    if subscriptions.expire_after or has_occurrences(rows):
        return bool(rows.num_rows)
    return has_ends(rows)


def has_ends(rows: pa.Table) -> bool:
    """Whether any of some rows is of a message that has an end itself, and does not recur."""
    return "expires_at" in rows.column_names and rows["expires_at"].null_count < rows.num_rows


def due_times(rows: pa.Table) -> Int64Array:
    """Returns when rows, as MESSAGES, were due before they were parked or shaped: int64, (rows,), ms."""
    times: Int64Array = pc.coalesce(rows["shaped_from"], rows["was_due"], rows["deliver_at"]).to_numpy()
    return times


def ends_of(rows: pa.Table, number: int, subscriptions: Subscriptions) -> Int64Array:
    """Returns when messages expire for a subscription. Dead letters and rejected messages do not.

    Args:
        rows: as MESSAGES.
        number: of the subscription, in each row's topic.

    Returns:
        int64, (rows,), ms since the epoch; NO_END: never.
    """
    ends = np.full(rows.num_rows, NO_END, np.int64)
    if has_ends(rows):
        ends = pc.fill_null(rows["expires_at"], NO_END).to_numpy().astype(np.int64)
    due = due_times(rows)
    if has_occurrences(rows):
        after = _durations(rows)
        ends = np.where((after > 0) & are_recurring(rows), np.minimum(ends, due + after), ends)
    if subscriptions.expire_after:
        after = by_topic(rows, lambda topic: subscriptions.expire_after.get(topic, {}).get(number, 0))
        ends = np.where(after > 0, np.minimum(ends, due + after), ends)
    has_none = is_rejected(rows) | (dead_letters_in(rows, subscriptions) >> number & 1 > 0)
    ends[has_none] = NO_END
    return ends


def moved_ends(rows: pa.Table, times: Int64Array) -> pa.Table:
    """Returns rows, as MESSAGES, with the ends that their messages have when they are due at other times.

    Args:
        times: int64, (rows,), ms since the epoch.
    """
    if not has_ends(rows):
        return rows
    before, properties = rows["expires_at"].to_pylist(), rows["properties"].to_pylist()
    ends = [
        moved_end(end, dict(given or ()), due)
        for end, given, due in zip(before, properties, times.tolist(), strict=True)
    ]
    return with_columns(rows, expires_at=pa.array(ends, pa.int64()))


def moved_end(end: int | None, properties: Mapping[str, str], due: int) -> int | None:
    """Returns the end that a message has when it is due at another time: `expireAfter` counts from then.

    Args:
        end: that it had before, ms since the epoch; None: none.
        properties: the message's.
        due: the other time, ms since the epoch.
    """
    if end is None or EXPIRE_AFTER not in properties:
        return end
    return expires_at({name: properties[name] for name in (EXPIRE_AT, EXPIRE_AFTER) if name in properties}, due)


class ParkedEnds:
    """When messages expire that are parked: rows as PARKED_ENDS, by minute, in a table of the store.

    A row counts as long as no later row of its message does, which the caller finds out.

    Args:
        store: where the rows are kept.
        meta: the attribute of that name, which the caller saves; empty: there are no rows.
    """

    def __init__(self, store: Store, meta: Sequence[Sequence[int]] = ()) -> None:
        self._store = store
        # By minute: its number of values, and its earliest end, ms since the epoch.
        self._slots = {slot: (n, earliest) for slot, n, earliest in meta}

    @property
    def meta(self) -> list[list[int]]:
        """The metadata, as JSON has it, which the caller saves."""
        return [[slot, *one] for slot, one in sorted(self._slots.items())]

    def add_rows(self, rows: pa.Table, ends: Int64Array) -> None:
        """Adds rows that are parked.

        Args:
            rows: as MESSAGES, each for one subscription, with the sequence with which it was parked.
            ends: int64, (rows,), ms since the epoch; NO_END: the row is left out.
        """
        if (found := parked_ends(rows, ends)).num_rows:
            self._add(found)

    def take_ended(self, now: int) -> pa.Table:
        """Removes and returns rows whose end has come by now, ms since the epoch: about MOST_ENDED, as PARKED_ENDS."""
        found, n_taken = [], 0
        for slot in sorted(slot for slot, (_, earliest) in self._slots.items() if earliest <= now):
            n, earliest = self._slots.pop(slot)
            left = []
            while n and n_taken < MOST_ENDED:
                n -= 1
                rows = concat([get_rows(self._store, _TABLE, (slot, n))], PARKED_ENDS)
                self._store.remove(_TABLE, (slot, n))
                has_ended = int64(rows, "ends_at") <= now
                found.append(where(rows, has_ended))
                left.append(where(rows, ~has_ended))
                n_taken += int(has_ended.sum())
            if n:
                self._slots[slot] = n, earliest
            self._add(concat(left, PARKED_ENDS))
        return concat(found, PARKED_ENDS)

    def rebuild(self, rows: pa.Table) -> None:
        """Restores the state after a rebuild, from PARKED_ENDS."""
        if rows.num_rows:
            self._add(rows)

    def _add(self, rows: pa.Table) -> None:
        ends = int64(rows, "ends_at")
        for slot in np.unique(ends // _SLOT_MILLIS).tolist():
            is_in = ends // _SLOT_MILLIS == slot
            n, earliest = self._slots.get(slot, (0, NO_END))
            put_rows(self._store, _TABLE, (slot, n), where(rows, is_in))
            self._slots[slot] = n + 1, min(earliest, int(ends[is_in].min()))


def parked_ends(rows: pa.Table, ends: Int64Array) -> pa.Table:
    """Returns those of parked rows, as MESSAGES, that have an end (int64, (rows,), ms since the epoch): PARKED_ENDS."""
    has_end = ends < NO_END
    return _without_body(where(rows, has_end)).append_column(PARKED_ENDS.field("ends_at"), pa.array(ends[has_end]))


def _without_body(rows: pa.Table) -> pa.Table:
    """Returns rows, as MESSAGES, without what is only sent; recurring messages keep it for their next occurrence."""
    recurs = pa.array(are_recurring(rows))
    columns = {}
    for name in _BODY:
        nothing = pa.nulls(rows.num_rows, rows.schema.field(name).type)
        columns[name] = pc.if_else(recurs, rows[name], nothing) if pc.any(recurs).as_py() else nothing
    return with_columns(rows, **columns)


def _durations(rows: pa.Table) -> Int64Array:
    """Returns the property `expireAfter` of rows, as MESSAGES: int64, (rows,), ms; 0: none."""
    texts = pc.map_lookup(rows["properties"].combine_chunks(), EXPIRE_AFTER, "first")
    if texts.null_count == len(texts):
        return np.zeros(rows.num_rows, np.int64)
    encoded = texts.dictionary_encode()
    millis = np.array([_millis(text) for text in encoded.dictionary.to_pylist()], np.int64)
    found: Int64Array = np.where(
        texts.is_valid().to_numpy(zero_copy_only=False),
        millis[pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)],
        0,
    )
    return found


@lru_cache(maxsize=1_000)
def _millis(text: str) -> int:
    """Returns a duration, ms; 0: the text is none, as it was accepted by an earlier version, which did not read it."""
    try:
        return min(duration(EXPIRE_AFTER, text), MAX_TIME_MILLIS)
    except BadScheduleError:
        return 0
