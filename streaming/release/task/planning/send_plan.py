"""A plan of what a task sends: one row of a release, to one destination, is one planned message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from streaming.release.attempt import Failed
from streaming.release.naming import Target
from streaming.release.task.producer_line import Line
from streaming.release.task.shared_paces import Pace, RateLimit

OrderKey = tuple[str, str | None, bytes]  # source topic, subscription, the messages' key


@dataclass(slots=True, kw_only=True)
class PlannedSend:
    """A message that a plan sends. Times are ms since the epoch."""

    due: int
    sequence_id: int
    topic: str  # the destination, or its partition
    producer: str  # the producer's name, as long as it has its own
    row: int  # the index of its row in the plan
    subscription: str | None  # None: to the rejects topic
    is_batched: bool
    at: int  # when it is handed over: when the last message of its batch is due
    was_at: int  # the same, but where that was held back: when it was due before
    first_id: int  # the sequence id of its batch's first message
    is_large: bool = False  # the client may refuse it
    is_last: bool = True  # of its batch
    key: OrderKey | None = None  # messages with the same one arrive one after another; None: it waits for none
    rank: tuple[int, ...] = ()  # with a key: its place among those of all shards
    is_dead: bool = False  # it goes to the dead letters of its subscription
    pace: Pace | None = None  # where its batch takes places before it is handed over; set when all are planned
    n_places: int = 1  # of its batch
    line: Line = None  # type: ignore[assignment]  # set when all are planned


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The messages of one assignment: where, when, and under which names they are sent."""

    tick: int
    kind: int
    rows: pa.Table
    columns: dict[str, list[Any]]  # the rows' columns of MESSAGES, by name
    sends: list[PlannedSend]
    skipped: set[Target]  # destinations of `Attempt.skipped` for which it has messages
    failed: Sequence[Failed]  # destinations that can't be looked up
    has_held: bool  # whether it has messages that were held back
    limits: Mapping[tuple[str, str | None], RateLimit]  # by source topic and subscription, of those with a rate
