"""The plan of a task: a planned message is one row of a release for one destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from streaming.release.attempt import FailedProducer
from streaming.release.naming import Target
from streaming.release.task.producer_line import Line
from streaming.release.task.shared_paces import Pace, RateLimit

OrderKey = tuple[str, str | None, bytes]  # source topic, subscription, the messages' key


@dataclass(slots=True, kw_only=True)
class PlannedSend:
    """A planned message. Times are ms since the epoch."""

    due: int
    sequence_id: int
    topic: str  # the destination, or its partition; empty: there is none
    producer: str  # the producer's first name, before it takes any other
    row: int  # the index of the row in the plan
    subscription: str | None  # None: it goes to the rejects topic
    is_batched: bool
    at: int  # when it is handed to the producer: when the last message of its batch is due
    was_at: int  # the same by the time before it was held back; else as `at`
    first_id: int  # the sequence id of the first message of its batch
    is_large: bool = False  # the client may refuse it
    is_last: bool = True  # it is the last message of its batch
    key: OrderKey | None = None  # messages with the same key arrive one after another; None: it waits for no other
    rank: tuple[int, ...] = ()  # the place among the messages of its key, of all shards
    is_dead: bool = False  # it is a dead letter of its subscription
    pace: Pace | None = None  # the rate's bucket, for the first message of a batch; set when all messages are planned
    n_places: int = 1  # the number of places that its batch takes from the bucket
    line: Line = None  # type: ignore[assignment]  # set when all messages are planned


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planned messages of one assignment."""

    tick: int
    kind: int
    rows: pa.Table
    columns: dict[str, list[Any]]  # the rows' columns of MESSAGES, by name
    sends: list[PlannedSend]
    skipped: set[Target]  # targets of `Attempt.skipped` for which the assignment has messages
    failed: Sequence[FailedProducer]  # targets whose destination can't be looked up
    has_held: bool  # whether some messages were held back
    limits: Mapping[tuple[str, str | None], RateLimit]  # the rates, by source topic and subscription
    dropped: Sequence[PlannedSend] = ()  # messages for subscriptions that the settings no longer have
    unsendable: Mapping[int, str] = field(default_factory=dict)  # by row: why it can't be sent
