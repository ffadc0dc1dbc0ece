"""The current occurrences of recurring messages, from which their next occurrences follow."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.message_state.earlier_occurrences import Message
from tracker.commands.message_state.moves import PAUSED_DELIVER_AT
from tracker.messages import BoolArray, Int64Array, int64, message_ids
from tracker.recurrence.columns import Recurrences
from tracker.recurrence.recurrence import Recurrence


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
        was_due: int64, (rows,): when the occurrences were due before they were held back or shaped.
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
