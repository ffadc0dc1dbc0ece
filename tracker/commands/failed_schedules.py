"""Recurring messages whose rule fails: they get no further occurrence, and are rejected with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from tracker.commands.holding.giving_up import NOT_DELIVERED
from tracker.commands.message_state.current_occurrences import CurrentOccurrences
from tracker.messages import MESSAGES, Int64Array, concat, position_texts, typed, with_columns
from tracker.recurrence.recurrence import REPEAT, Misfire
from tracker.recurrence.start import counts_from
from tracker.subscriptions import Subscriptions


class FailedSchedules:
    """Collects a tick's recurring messages that have no further occurrence because their rule fails.

    Args:
        subscriptions: the subscriptions of each source topic.

    Attributes:
        noted: (source topic, position, why) of each of them.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._rejects: list[pa.Table] = []
        self.noted: list[tuple[str, str, str]] = []

    def find(
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
            current: their current occurrences.
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

    def take(self) -> pa.Table:
        """Removes and returns the rejects, as MESSAGES: a row for each message and subscription, with the reason."""
        taken, self._rejects = concat(self._rejects), []
        return taken
