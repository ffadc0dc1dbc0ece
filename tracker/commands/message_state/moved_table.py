"""The last moves of a ledger's messages for one subscription, stored in parts, so that a change rewrites few rows."""

from __future__ import annotations

import numpy as np

from tracker.messages import Int64Array
from tracker.packing import pack_columns, unpack_columns
from tracker.properties.schedule import MAX_TIME_MILLIS
from tracker.store import Store, get_present

# Columns. CODE: entry and batch index (see `codes`), by which rows are sorted. SEQUENCE: of the move. TIME: the
# deliver_at of the new row; its bits from ATTEMPT_BIT on are the row's attempt. UNTIL: when the last of the earlier
# rows is past. Times are ms since the epoch.
CODE, SEQUENCE, TIME, UNTIL = range(4)

ATTEMPT_BIT = 48  # a time is below 2^48
TIME_MASK = (1 << ATTEMPT_BIT) - 1

_COLUMNS = 4

_PARTS = "moved_parts"
_ROWS = "moved_rows"
_WHOLE = "moved"  # of earlier versions: all rows in one value

# A part with more rows is split into parts of _SPLIT_ROWS. Smaller parts cost more store calls, larger ones more bytes
# a call.
_MOST_ROWS = 2_048
_SPLIT_ROWS = 1_536

_SUBSCRIPTION_BITS = 6  # a mask of subscriptions has 64 bits

# Columns of the list of parts. _FIRST: a part has the codes from this on, up to the next part's. _NUMBER: in the store.
# _LAST: when the last of its rows is past, ms since the epoch.
_FIRST, _NUMBER, _LAST = range(3)


class MovedTable:
    """A sorted table of moves, in parts of one to two thousand rows. A call reads and writes only the parts it needs.

    Args:
        store: where the parts are kept.
        ledger: the messages' ledger.
        subscription: its number.
    """

    def __init__(self, store: Store, ledger: int, subscription: int) -> None:
        self._store, self._ledger, self._subscription = store, ledger, subscription
        data = store.get(_PARTS, (ledger, subscription)) or b""
        self._parts = np.frombuffer(data, np.int64).reshape(-1, 3)
        self._rows: dict[int, Int64Array] = {}
        self._changed: set[int] = set()
        self._has_whole = False
        if not data and (whole := store.get(_WHOLE, (ledger, subscription))):
            self._has_whole = True
            self.put(np.frombuffer(whole, np.int64).reshape(-1, _COLUMNS))

    @property
    def last(self) -> int:
        """When the last row is past, ms since the epoch."""
        return int(self._parts[:, _LAST].max(initial=0))

    def rows_near(self, codes: Int64Array) -> Int64Array:
        """Returns all rows of the parts that may have some codes: int64, (n, 4), sorted by code."""
        if not len(self._parts) or not len(codes):
            return np.zeros((0, _COLUMNS), np.int64)
        tables = [self._load(int(self._parts[part, _NUMBER])) for part in np.unique(self._parts_of(codes)).tolist()]
        return tables[0] if len(tables) == 1 else np.concatenate(tables)

    def put(self, rows: Int64Array) -> None:
        """Adds moves of distinct messages. They replace earlier moves, whose rows are taken into account in UNTIL.

        Args:
            rows: int64, (n, 4), sorted by code.
        """
        if not len(self._parts):
            self._parts = np.zeros((1, 3), np.int64)
            self._rows[0] = rows[:0]
        part_of = self._parts_of(rows[:, CODE])
        # From the last part to the first, because splitting a part shifts the following ones.
        for part in np.unique(part_of)[::-1].tolist():
            number = int(self._parts[part, _NUMBER])
            merged = _merged(self._load(number), rows[part_of == part])
            step = len(merged) if len(merged) <= _MOST_ROWS else _SPLIT_ROWS
            pieces = [merged[start : start + step] for start in range(0, len(merged), step)]
            new = int(self._parts[:, _NUMBER].max()) + 1
            numbers = [number, *range(new, new + len(pieces) - 1)]
            firsts = [int(self._parts[part, _FIRST]), *(int(piece[0, CODE]) for piece in pieces[1:])]
            of_pieces = np.array([*zip(firsts, numbers, map(_last, pieces), strict=True)], np.int64)
            self._parts = np.concatenate([self._parts[:part], of_pieces, self._parts[part + 1 :]])
            self._rows |= zip(numbers, pieces, strict=True)
            self._changed |= set(numbers)

    def save(self) -> bool:
        """Writes the changes to the store; returns whether there were any."""
        if not self._changed:
            return False
        for number in sorted(self._changed):
            self._store.put(_ROWS, self._key(number), pack_columns(self._rows[number]))
        self._changed.clear()
        self._store.put(_PARTS, (self._ledger, self._subscription), self._parts.tobytes())
        if self._has_whole:
            self._store.remove(_WHOLE, (self._ledger, self._subscription))
            self._has_whole = False
        return True

    def remove(self) -> None:
        """Removes all rows from the store."""
        for number in self._parts[:, _NUMBER].tolist():
            self._store.remove(_ROWS, self._key(number))
        for table in (_PARTS, _WHOLE) if self._has_whole else (_PARTS,):
            self._store.remove(table, (self._ledger, self._subscription))

    def _parts_of(self, codes: Int64Array) -> Int64Array:
        """Returns the index of each code's part: int64, (n,)."""
        return np.searchsorted(self._parts[:, _FIRST], codes, side="right") - 1

    def _key(self, number: int) -> tuple[int, int]:
        return self._ledger, number << _SUBSCRIPTION_BITS | self._subscription

    def _load(self, number: int) -> Int64Array:
        if number not in self._rows:
            self._rows[number] = unpack_columns(get_present(self._store, _ROWS, self._key(number)), _COLUMNS)
        return self._rows[number]


def zero_where_held(times: Int64Array) -> Int64Array:
    """Returns times, int64, (n,), with 0 instead of `HELD_DELIVER_AT` and `PAUSED_DELIVER_AT`.

    A row that was held back or paused is never loaded again. So no move has to be remembered for it once a later row
    counts.
    """
    return np.where(times > MAX_TIME_MILLIS, 0, times)


def _merged(before: Int64Array, rows: Int64Array) -> Int64Array:
    """Returns rows, int64, (n, 4), sorted by code, with new rows added; these replace rows with the same code."""
    place = np.searchsorted(before[:, CODE], rows[:, CODE])
    is_again = place < len(before)
    is_again[is_again] = before[place[is_again], CODE] == rows[is_again, CODE]
    merged, earlier = before.copy(), before[place[is_again]]
    merged[place[is_again]] = rows[is_again]
    past = np.maximum(earlier[:, UNTIL], zero_where_held(earlier[:, TIME] & TIME_MASK))
    merged[place[is_again], UNTIL] = np.maximum(rows[is_again, UNTIL], past)
    return merged if is_again.all() else np.insert(merged, place[~is_again], rows[~is_again], axis=0)


def _last(rows: Int64Array) -> int:
    """Returns the time at which the last of some rows is past, ms since the epoch; 0: there are no rows."""
    return max(int((rows[:, TIME] & TIME_MASK).max(initial=0)), int(rows[:, UNTIL].max(initial=0)))
