"""The plan of a task, in columns: a planned message is one row of a release for one destination."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from streaming.release.attempt import FailedProducer
from streaming.release.naming import Recipient
from streaming.release.task.producer_line import Line
from streaming.release.task.shared_paces import Pace, RateLimit
from tracker.messages import MESSAGES, BoolArray, Int64Array

OrderKey = tuple[str, str | None, bytes]  # source topic, subscription, the messages' key


class PlannedLine(NamedTuple):
    """What the messages of one producer have in common."""

    topic: str  # the destination, or its partition; empty: there is none
    producer: str  # the producer's first name, before it takes any other
    source: str  # the source topic
    subscription: str | None  # None: they go to the rejects topic
    is_batched: bool
    is_dead: bool  # they are dead letters of their subscription
    schema_version: bytes | None  # of the source topic's schema; None: none

    @property
    def key(self) -> tuple[str, str]:
        """Topic and producer: no other line has both."""
        return self.topic, self.producer


@dataclass(kw_only=True)
class Sends:
    """Planned messages in columns, each of shape (messages,). Times are ms since the epoch."""

    row: Int64Array  # the index of the row in the plan
    line: Int64Array  # the index of its PlannedLine
    due: Int64Array
    sequence_id: Int64Array
    at: Int64Array  # when it is handed to the producer: when the last message of its batch is due
    was_at: Int64Array  # the same by the time before it was parked; else as `at`
    first_id: Int64Array  # the sequence id of the first message of its batch
    is_last: BoolArray  # it is the last message of its batch
    is_large: BoolArray  # the client may refuse it
    n_places: Int64Array  # the number of places that its batch takes from its rate

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.row)

    def take(self, chosen: Int64Array | BoolArray) -> Sends:
        """Returns some messages: by index, in its order, or by a mask."""
        return Sends(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})

    @staticmethod
    def concat(parts: Sequence[Sends]) -> Sends:
        """Returns the messages of at least one plan one after another."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Sends)}
        return Sends(**columns)


@dataclass(slots=True, eq=False)
class PlannedSend:
    """A planned message, as an object of its own; the fields are those of `Sends`."""

    of: PlannedLine
    is_batched: bool
    row: int
    due: int
    sequence_id: int
    at: int
    was_at: int
    first_id: int
    is_last: bool
    is_large: bool
    n_places: int
    key: OrderKey | None = None  # messages with the same key arrive one after another; None: it waits for no other
    pace: Pace | None = None  # the rate's bucket, for the first message of a batch; set when all messages are planned
    line: Line = None  # type: ignore[assignment]  # set when all messages are planned

    @property
    def topic(self) -> str:
        """The destination, or its partition; empty: there is none."""
        return self.of.topic

    @property
    def producer(self) -> str:
        """The producer's first name."""
        return self.of.producer

    @property
    def subscription(self) -> str | None:
        """None: it goes to the rejects topic."""
        return self.of.subscription

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter of its subscription."""
        return self.of.is_dead


def planned_sends(lines: Sequence[PlannedLine], sends: Sends) -> list[PlannedSend]:
    """Makes an object of each planned message.

    Args:
        lines: to which `sends.line` points.
        sends: the messages.
    """
    columns = [getattr(sends, column.name).tolist() for column in fields(sends) if column.name != "line"]
    are_batched = np.array([line.is_batched for line in lines], np.bool_)[sends.line].tolist()
    return list(map(PlannedSend, [lines[i] for i in sends.line.tolist()], are_batched, *columns))


def columns_of(rows: pa.Table, blank: Collection[int], content: Collection[str]) -> dict[str, list[Any]]:
    """Returns the columns of MESSAGES, and others that rows have, as lists by name.

    Messages are built of a dict, because that asks for twenty values of each.

    Args:
        rows: an earlier version of the program may have packed fewer columns; these are null.
        blank: the indexes of rows without content.
        content: the columns in which these rows are null.
    """
    columns = dict.fromkeys((*MESSAGES.names, *rows.column_names), [None] * rows.num_rows)
    columns |= {name: rows[name].to_pylist() for name in rows.column_names if rows[name].null_count < rows.num_rows}
    for name in content if blank else ():
        columns[name] = list(columns[name])
        for row in blank:
            columns[name][row] = None
    return columns


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planned messages of one assignment."""

    tick: int
    kind: int
    rows: pa.Table
    columns: Mapping[str, Sequence[Any]]  # the rows' columns of MESSAGES, by name
    lines: Sequence[PlannedLine]
    sends: Sends
    payload_bytes: Int64Array  # of each row
    skipped: set[Recipient]  # recipients of `Attempt.skipped` for which the assignment has messages
    failed: Sequence[FailedProducer]  # recipients whose destination can't be looked up
    has_held: bool  # whether some messages were parked
    limits: Mapping[tuple[str, str | None], RateLimit]  # the rates, by source topic and subscription
    order_keys: Sequence[bytes] | None  # of each row of a release that has to come in order; None: of another
    is_put_off: bool = False  # whether some messages are sent later than they are due
    dropped: Sequence[PlannedSend] = ()  # messages for subscriptions that the settings no longer have
    unsendable: Mapping[int, str] = field(default_factory=dict)  # by row: why it can't be sent
