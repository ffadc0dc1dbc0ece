"""The occurrences that wait, one for each of some recurring messages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tracker.messages import Int64Array
from tracker.recurrence.columns import NEVER


class Occurrence(NamedTuple):
    """An occurrence of a recurring message. Times are ms since the epoch."""

    number: int  # from 1
    due: int
    at: int | None = None  # when it is due by its rule; None: `due`
    was_due: int | None = None  # when it was due, where it is late


class PendingOccurrences:
    """The occurrences that wait from now on, int64, (n,).

    Attributes:
        numbers: from 1.
        times: ms since the epoch; NEVER: there is none.
        by_rule: when they are due by their rule; NEVER: the same as `times`.
        was_due: when they were due, where they are late; NEVER: they are not.
    """

    def __init__(
        self,
        numbers: Int64Array,
        times: Int64Array,
        by_rule: Int64Array | None = None,
        was_due: Int64Array | None = None,
    ) -> None:
        self.numbers, self.times = numbers, times
        self.by_rule = np.full(len(numbers), NEVER, np.int64) if by_rule is None else by_rule
        self.was_due = np.full(len(numbers), NEVER, np.int64) if was_due is None else was_due

    def put(self, i: int, one: Occurrence | None) -> None:
        """Sets one of them; None: there is none."""
        if one is None:
            self.times[i] = NEVER
        else:
            self.numbers[i], self.times[i] = one.number, one.due
            self.by_rule[i] = NEVER if one.at is None else one.at
            self.was_due[i] = NEVER if one.was_due is None else one.was_due

    def take(self, index: Int64Array) -> PendingOccurrences:
        """Returns some of them; `index`: int64, (m,)."""
        columns = (self.numbers, self.times, self.by_rule, self.was_due)
        return PendingOccurrences(*(column[index] for column in columns))
