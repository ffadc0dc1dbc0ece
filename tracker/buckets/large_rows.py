"""Which rows of the delayed index wait there, although they are due soon: large ones, until there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import BoolArray, int64
from tracker.packing import fitting, payload_sizes, row_sizes
from tracker.payload_refs import lengths

MAX_ID = (1 << 63) - 1

# Where a row comes in the order in which large rows are loaded: deliver_at, ledger_id, entry_id.
LargeKey = tuple[int, int, int]


class LargeRule(NamedTuple):
    """Which rows are large.

    Attributes:
        n_bytes: of a large row's payload, at least; 0: no row is large.
        others: source topics without rows that wait, because their messages come in the order of keys.
        in_order: source topics of which all rows wait for their turn, also small ones: their messages come in the order
            of keys, and some are large. What is loaded of them is dispatched whatever its bytes.
        is_whole: whether rows with a schedule key and those of recurring messages may be large, and large rows wait for
            their turn also if they are due when they come in. False: so an earlier program did.

    Rejected rows are never large.
    """

    n_bytes: int = 0
    others: tuple[str, ...] = ()
    is_whole: bool = False
    in_order: tuple[str, ...] = ()

    def take_turns(self, rows: pa.Table) -> BoolArray:
        """Tells which rows, as MESSAGES, are loaded in turn, as there is room: bool, (rows,)."""
        do = self.are_large(rows)
        if self.in_order and rows.num_rows:
            is_one = pc.and_(pc.is_in(rows["topic"], pa.array(self.in_order)), pc.is_null(rows["reason"]))
            do |= is_one.to_numpy(zero_copy_only=False)
        return do

    def are_large(self, rows: pa.Table) -> BoolArray:
        """Tells which rows, as MESSAGES, are large: bool, (rows,)."""
        if not self.n_bytes or not rows.num_rows:
            return np.zeros(rows.num_rows, np.bool_)
        are: BoolArray = payload_sizes(rows) >= self.n_bytes
        if not are.any():
            return are
        for name in ("reason",) if self.is_whole else ("schedule_key", "occurrence", "reason"):
            are &= pc.is_null(rows[name]).to_numpy(zero_copy_only=False)
        if others := (*self.others, *self.in_order):
            are &= ~pc.is_in(rows["topic"], pa.array(others)).to_numpy(zero_copy_only=False)
        return are


NONE_LARGE = LargeRule()


class LargeRows(NamedTuple):
    """Which large rows are in state.

    Attributes:
        rule: which rows are large.
        after: large rows up to this key are in state, or have been; those after it are in the delayed index alone.
            None: those due before the load horizon are in state, as all other rows are.
    """

    rule: LargeRule = LargeRule()
    after: LargeKey | None = None

    def wait(self, rows: pa.Table) -> BoolArray:
        """Tells which rows wait in the delayed index although they may be due soon: bool, (rows,)."""
        if self.after is None:
            return np.zeros(rows.num_rows, np.bool_)
        waiting = self.rule.take_turns(rows)
        if waiting.any():
            time, ledger, entry = self.after
            due, ledgers, entries = (int64(rows, name) for name in ("deliver_at", "ledger_id", "entry_id"))
            waiting &= (due > time) | ((due == time) & ((ledgers > ledger) | ((ledgers == ledger) & (entries > entry))))
        return waiting

    def to_json(self) -> dict[str, Any]:
        """Returns it as an offset has it."""
        whole = {"whole": True, "in_order": list(self.rule.in_order)} if self.rule.is_whole else {}
        return {"bytes": self.rule.n_bytes, "others": list(self.rule.others), "after": list(self.after or ()), **whole}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> LargeRows:
        """Reads what `to_json` returned; empty: the offset of an earlier program."""
        after: Sequence[int] = saved.get("after", ())
        others, in_order = tuple(saved.get("others", ())), tuple(saved.get("in_order", ()))
        rule = LargeRule(saved.get("bytes", 0), others, saved.get("whole", False), in_order)
        return cls(rule, (after[0], after[1], after[2]) if after else None)


# The most rows of a release: a row's place in it has 22 bits in its sequence id.
_RELEASE_ROWS = 1 << 20


class Budget:
    """What the rows of a release may have together. Large rows that do not fit are left for a later one.

    So are the last of very many rows, because a row's place in a release has a field of fixed width.

    Args:
        n_bytes: about the bytes of large rows. At least one of them fits.
        are_large: tells which rows are large: bool, (rows,).
        file_bytes: instead, those of large rows with a payload in a file, which does not pass through Spark; 0: they
            count as the others.
    """

    def __init__(self, n_bytes: int, are_large: Callable[[pa.Table], BoolArray], file_bytes: int = 0) -> None:
        self._left = n_bytes
        self._file_left = file_bytes
        self._has_file_bytes = file_bytes > 0
        self._rows_left = _RELEASE_ROWS
        self._are_large = are_large

    @property
    def is_spent(self) -> bool:
        """Whether no large row fits any more."""
        return self._left <= 0 or self._rows_left <= 0 or (self._has_file_bytes and self._file_left <= 0)

    def fitting(self, rows: pa.Table) -> BoolArray:
        """Tells which rows fit, bool, (rows,): of the large ones the first; what they have is taken off the budget."""
        large = self._are_large(rows)
        fits: BoolArray = ~large
        if large.any() and not self.is_spent:
            sizes = row_sizes(rows)[large]
            of_files = np.where(lengths(rows)[large] > 0, sizes, 0) if self._has_file_bytes else np.zeros_like(sizes)
            n = min(fitting(sizes - of_files, self._left), fitting(of_files, self._file_left or 1))
            fits[np.flatnonzero(large)[:n]] = True
            self._left -= int((sizes - of_files)[:n].sum())
            self._file_left -= int(of_files[:n].sum())
        fits &= np.cumsum(fits) <= self._rows_left
        self._rows_left -= int(fits.sum())
        return fits
