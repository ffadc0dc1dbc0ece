"""The pending occurrences of recurring messages: the ones that wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tracker.messages import Int64Array
from tracker.recurrence.columns import NEVER


class Occurrence(NamedTuple):
    """An occurrence of a recurring message. Times are ms since the epoch."""

    number: int  # from 1
    due: int
    at: int | None = None  # when it is due by the rule; None: at `due`
    was_due: int | None = None  # when a late one was due; None: not late


class PendingOccurrences:
    """The pending occurrences of n messages in columns, int64, (n,). Times are ms since the epoch.

    Attributes:
        numbers: from 1.
        times: when they are due; NEVER: there is none.
        by_rule: when they are due by the rule; NEVER: at `times`.
        was_due: when late ones were due; NEVER: not late.
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
        """Sets the occurrence of the i-th message; None: there is none."""
        if one is None:
            self.times[i] = NEVER
        else:
            self.numbers[i], self.times[i] = one.number, one.due
            self.by_rule[i] = NEVER if one.at is None else one.at
            self.was_due[i] = NEVER if one.was_due is None else one.was_due

    def take(self, index: Int64Array) -> PendingOccurrences:
        """Returns the occurrences of some messages, by their indexes, int64, (m,)."""
        columns = (self.numbers, self.times, self.by_rule, self.was_due)
        return PendingOccurrences(*(column[index] for column in columns))
