"""A release of all shards together, as its lane sends it, what remains of it, and the result."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming.release.attempt import Assignment
from streaming.release.driver.transitions import RemainderState
from streaming.release.naming import Recipient
from tracker.in_flight import IN_ORDER, SENDING
from tracker.messages import MESSAGES, Int64Array, empty_table, int64, order_keys
from tracker.packing import row_sizes
from tracker.payload_refs import files_of
from tracker.shaping.token_bucket import spans
from tracker.subscriptions import without_dead_letters
from warehouse.schemas import DELIVERIES

_ROWS_AT_ONCE = 20_000  # the most rows of releases that are sent together, because one task has them all in memory

ReleaseId = tuple[int, int]  # tick, kind


@dataclass(frozen=True, kw_only=True)
class LaneRelease:
    """A tick's release in a lane, all shards together, which one Spark job sends. They are ordered by tick."""

    tick: int
    kind: int
    lane: str
    assignments: tuple[Assignment, ...]
    due: Int64Array = field(compare=False)  # when its rows are due, ms since the epoch, ascending, shape (rows,)
    n_bytes: int = 0  # of its rows, about
    sent_to: int = 0  # an earlier run may have sent the lane's releases up to this tick, this one, too; 0: it has not
    # (first, last) time at which shaped messages are due, ms since the epoch, by source topic and subscription number.
    shaped: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict, compare=False)
    # Whether one task has to send all shards: some messages were parked, or come in the order of their keys.
    is_in_order: bool = False
    # (first, last) time at which messages in order are due, ms since the epoch; by source topic and order key.
    keys: Mapping[tuple[str, bytes], tuple[int, int]] = field(default_factory=dict, compare=False)
    # Source topics with messages that can't be parked any more: what was to come after them does already.
    passed: frozenset[str] = field(default=frozenset(), compare=False)
    payload_files: Mapping[str, int] = field(default_factory=dict, compare=False)  # as `files_of` returns them

    @property
    def id(self) -> ReleaseId:
        """(tick, kind)."""
        return self.tick, self.kind

    def __lt__(self, other: LaneRelease) -> bool:
        return self.tick < other.tick

    @property
    def is_new(self) -> bool:
        """Whether no earlier run has dispatched it."""
        return not self.sent_to

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return len(self.due)

    @property
    def first_due(self) -> int:
        """When the first row is due, ms since the epoch."""
        return int(self.due[0])

    def rows_due(self, millis: int) -> int:
        """Counts the rows that are due by a time, ms since the epoch."""
        return int(np.searchsorted(self.due, millis, "right"))


@dataclass(frozen=True)
class Remainder:
    """The messages of a release for one recipient that have not arrived, and stay open."""

    release: LaneRelease
    recipient: Recipient
    done: frozenset[tuple[int, str, str]] = frozenset()  # messages that have arrived before, as `SendReport.done`
    # `FailedProducer.arrived_to` of producers with messages that have not arrived, by topic and producer's name.
    arrived_to: dict[tuple[str, str], int] = field(default_factory=dict)
    is_resumed: bool = False  # of an earlier run: some messages may have arrived, and be recorded
    is_untouched: bool = False  # none of its messages was given to a producer, in any run

    @property
    def release_id(self) -> ReleaseId:
        """The release (tick, kind) of the remainder."""
        return self.release.id

    @property
    def state(self) -> RemainderState:
        """RECALLED where the shards are to park its messages, because nothing of it was sent; else OPEN."""
        is_recalled = self.is_untouched and is_parked(self.recipient) and self.recipient[0] not in self.release.passed
        return RemainderState.RECALLED if is_recalled else RemainderState.OPEN


@dataclass(frozen=True)
class RemainderResult:
    """The result of an attempt to send remainders of one recipient."""

    reason: str = ""  # why some messages have not arrived; empty: all have
    is_slow: bool = False  # the destination is only slow
    messages: int = 0  # the number of messages, where all have arrived


def is_parked(recipient: Recipient) -> bool:
    """Whether what comes due for a recipient is parked while it is unwritable: not dead letters and rejects."""
    return bool(recipient[1]) and not without_dead_letters(recipient[1])[1]


def oldest(remainders: Iterable[Remainder]) -> list[Remainder]:
    """Returns the remainders to send together: all, or those of the oldest ticks where all have too many rows.

    Args:
        remainders: ascending by release.
    """
    chosen: list[Remainder] = []
    rows = 0
    for _, of_tick in itertools.groupby(remainders, lambda remainder: remainder.release.tick):
        added = list(of_tick)
        rows += sum(remainder.release.rows for remainder in added)
        if chosen and rows > _ROWS_AT_ONCE:
            break
        chosen += added
    return chosen


@dataclass
class SentRelease:
    """A release that is SENT: rows to be written to tables, and what remains of it."""

    release: LaneRelease
    deliveries: pa.Table = field(default_factory=partial(empty_table, DELIVERIES))  # rows of the table `deliveries`
    refused: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # messages that the client does not take
    remainders: list[Remainder] = field(default_factory=list)  # messages for unwritable destinations


def lane_release_of(tick: int, kind: int, assignments: list[Assignment], now: int) -> LaneRelease:
    """Makes the release of all shards together.

    Args:
        tick: of the release.
        kind: of the release.
        assignments: one for each shard with rows.
        now: the tick that dispatches it: the release's own, or the first tick of a later run.
    """
    tables = [assignment.rows() for assignment in assignments]
    sending = json.loads((tables[0].schema.metadata or {}).get(SENDING.encode(), b"{}"))
    lane = assignments[0].lane(sending.get("lanes", 1), sending.get("lane_set", 0))
    due = np.sort(np.concatenate([int64(table, "deliver_at") for table in tables]))
    is_in_order = any("was_due" in t.column_names and t["was_due"].null_count < t.num_rows for t in tables)
    shaped = _joined(spans(table) for table in tables)
    keys = _keys(tables) if kind & IN_ORDER else {}
    sent_to = now - 1 if tick < now else 0
    return LaneRelease(
        tick=tick,
        kind=kind,
        lane=lane,
        assignments=tuple(assignments),
        due=due,
        n_bytes=sum(int(row_sizes(table).sum()) for table in tables),
        sent_to=sent_to,
        shaped=shaped,
        is_in_order=is_in_order or bool(keys),
        keys=keys,
        passed=frozenset().union(*(_passed(table) for table in tables)),
        payload_files=_files(tables),
    )


def _files(tables: Iterable[pa.Table]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for rows in tables:
        for name, end in files_of(rows).items():
            ends[name] = max(ends.get(name, 0), end)
    return ends


def _passed(rows: pa.Table) -> frozenset[str]:
    """Returns the topics of occurrences, of retries, of messages with a schedule key, and of those parked before.

    A schedule has its next occurrence, a retry may be followed by another, and a key may have its next message. What a
    slow destination gets of what was parked for it would go back and forth.
    """
    topics: set[str] = set()
    for name in ("occurrence", "attempt", "schedule_key", "was_due"):
        if name in rows.column_names and rows[name].null_count < rows.num_rows:
            topics |= set(rows["topic"].filter(pc.is_valid(rows[name])).to_pylist())
    return frozenset(topics)


def _keys(tables: Iterable[pa.Table]) -> dict[tuple[str, bytes], tuple[int, int]]:
    columns = [{"topic": t["topic"], "key": order_keys(t), "due": t["deliver_at"]} for t in tables]
    rows = pa.concat_tables(pa.table(of_shard) for of_shard in columns)
    times = rows.group_by(["topic", "key"], use_threads=False).aggregate([("due", "min"), ("due", "max")])
    topics, keys, first, last = (times[name].to_pylist() for name in ("topic", "key", "due_min", "due_max"))
    return dict(zip(zip(topics, keys, strict=True), zip(first, last, strict=True), strict=True))


def _joined(spans: Iterable[Mapping[tuple[str, int], tuple[int, int]]]) -> dict[tuple[str, int], tuple[int, int]]:
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for one in spans:
        for recipient, (first, last) in one.items():
            before = found.get(recipient, (first, last))
            found[recipient] = min(first, before[0]), max(last, before[1])
    return found
