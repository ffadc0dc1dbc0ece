"""What a tick releases in one lane."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from streaming.release.attempt import Assignment
from tracker.in_flight import SENDING
from tracker.messages import Int64Array, int64, unpack


@dataclass(frozen=True)
class Job:
    """What a tick releases in one lane, all shards together."""

    tick: int
    is_planned: bool
    lane: str
    assignments: tuple[Assignment, ...]
    due: Int64Array = field(compare=False)  # when its rows are, ms since the epoch, ascending
    is_new: bool = False  # it has not been handed out before
    is_in_order: bool = False  # it has what was held back: one task sends all shards, by when it was due

    def __lt__(self, other: Job) -> bool:
        return self.tick < other.tick

    @property
    def rows(self) -> int:
        """The number of rows to be sent."""
        return len(self.due)

    @property
    def first_due(self) -> int:
        """When the first row is due, ms since the epoch."""
        return int(self.due[0])

    def rows_due(self, millis: int) -> int:
        """How many rows are due then or before."""
        return int(np.searchsorted(self.due, millis, "right"))


def job_of(tick: int, is_planned: bool, assignments: list[Assignment], is_new: bool) -> Job:
    """Makes the job of a tick's assignments, of all its shards."""
    tables = [unpack(assignment.body) for assignment in assignments]
    sending = json.loads((tables[0].schema.metadata or {}).get(SENDING.encode(), b"{}"))
    lane = assignments[0].lane(sending.get("lanes", 1), sending.get("lane_set", 0))
    due = np.sort(np.concatenate([int64(table, "deliver_at") for table in tables]))
    is_in_order = any("was_due" in t.column_names and t["was_due"].null_count < t.num_rows for t in tables)
    return Job(tick, is_planned, lane, tuple(assignments), due, is_new, is_in_order)
