"""Plans the commands that change all pending messages that match a filter, and counts their outcomes."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from delaylake.commands import Ids
from delaylake.control import MAX_ENTRIES, ControlRequest
from delaylake.message_ids import Outcome

from admin.control.requests import request_factory
from broker.entries.message_ids import MessageRef
from conf.settings import Settings, Subscription
from tracker.commands.kinds import CANCEL, OPERATIONS, SKIP, Effect
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import Int64Array, int64, typed, where
from warehouse.queries.listing import PendingError, PendingFilter, State
from warehouse.queries.pending_messages import Pending
from warehouse.queries.pending_rows import WAITS
from warehouse.schemas import DELAYED_INDEX

# The columns of messages to be changed.
NAMED = pa.schema(
    [
        DELAYED_INDEX.field(name)
        for name in ("ledger_id", "entry_id", "partition", "batch_index", "batch_size", "deliver_at")
    ]
)

MAX_MATCHED = 10_000  # the default of the maximum number of matching messages
MOST_MATCHED = 1_000_000  # the highest value that a caller, or api.max_matched_per_filter, may set for it


class TooManyError(PendingError):
    """More messages match than may be changed at once."""


class CumulativeError(PendingError):
    """Messages of a subscription with a cumulative type can't be skipped."""


@dataclass(frozen=True)
class Change:
    """A change of messages.

    Attributes:
        kind: of the operation: a key of OPERATIONS with `by_filter`.
        fields: as the operation's.
        shift_millis: instead of a reschedule's field, by how many ms each is delivered later; negative: sooner.
    """

    kind: str
    fields: Mapping[str, int | str] = field(default_factory=dict)
    shift_millis: int | None = None

    def shifted_times(self, rows: pa.Table) -> Int64Array:
        """Returns the shifted times of messages, ms since the epoch, int64, (rows,)."""
        due = int64(rows, "deliver_at")
        # The time of a held message can't be shifted: the message is delivered at once.
        return np.where(due >= HELD_DELIVER_AT, 0, np.maximum(due + (self.shift_millis or 0), 0))


@dataclass(frozen=True)
class Call:
    """An operation on messages of one subscription; a cancel is on whole entries.

    Attributes:
        subscription: name of the subscription.
        rows: the messages or entries, as NAMED; an entry has the latest time of its messages.
        fields: as the operation's.
        batch_size: the number of messages in each row.
    """

    subscription: str
    kind: str
    rows: pa.Table
    fields: Mapping[str, int | str] = field(default_factory=dict)
    batch_size: int = 1


@dataclass(frozen=True)
class Plan:
    """The calls that change messages.

    Attributes:
        total: the number of messages; a message counts for each subscription that it waits for.
        impossible: the number of those that can't be cancelled, because other messages of their entry must not be.
    """

    calls: list[Call]
    total: int
    impossible: int


class Tally:
    """Counts the messages in outcomes by result; a message counts for each subscription that it waited for.

    Args:
        plan: the plan whose impossible messages count as NOT_ALLOWED; None: there are none.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.results: Counter[str] = Counter({"NOT_ALLOWED": plan.impossible} if plan and plan.impossible else {})
        self.done = 0

    def add(self, outcome: Outcome) -> None:
        self.results[outcome.result] += outcome.n_messages
        self.done += outcome.n_messages * outcome.is_done

    def to_json(self) -> dict[str, int]:
        """The counts as `applied`, `tooLate` and so on."""
        counts = {"APPLIED": 0, "TOO_LATE": 0, **self.results}
        return {_camel(result): n for result, n in counts.items()}


def filter_for(wanted: PendingFilter, kind: str) -> PendingFilter:
    """Returns the filter for an operation's messages: a restore is for cancelled ones."""
    is_undone = OPERATIONS[kind].effect == Effect.RESTORE
    return wanted.model_copy(update={"state": State.CANCELLED}) if is_undone else wanted


def check(pending: Pending, kind: str) -> None:
    """Checks that an operation is allowed on the messages of a listing.

    Raises:
        CumulativeError: they can't be skipped, since a subscription has a cumulative type.
    """
    if kind == SKIP and (cumulative := [s for s in pending.subscriptions if s.type.is_cumulative]):
        raise CumulativeError(
            f"messages of {cumulative[0].name} can't be skipped: its type {cumulative[0].type} acknowledges "
            "cumulatively (cancel them)"
        )


def matching(pending: Pending, max_matched: int) -> pa.Table:
    """Returns all messages of a listing, soonest first, with the columns of NAMED and WAITS.

    Raises:
        TooManyError: the listing has more than `max_matched` messages.
    """
    rows = pending.rows(max_matched + 1, NAMED.names)
    if rows.num_rows > max_matched:
        raise TooManyError(f"{pending.count():,} messages match, and at most {max_matched:,} may")
    return rows


def plan(subscriptions: Sequence[Subscription], rows: pa.Table, change: Change) -> Plan:
    """Plans the calls that change messages, each for the subscriptions in its WAITS.

    A cancel becomes a skip, which has the same effect. If the subscription's type is cumulative, entries whose messages
    all match are cancelled as a whole instead.

    Args:
        subscriptions: the subscriptions of the listing, in its order.
        rows: the rows that `matching` returned.
    """
    calls: list[Call] = []
    total = impossible = 0
    for number, subscription in enumerate(subscriptions):
        waiting = where(rows, int64(rows, WAITS) >> number & 1 > 0).select(NAMED.names)
        total += waiting.num_rows
        if change.kind == CANCEL and subscription.type.is_cumulative:
            entries = _whole_entries(waiting)
            sizes = int64(entries, "batch_size")
            impossible += waiting.num_rows - int(sizes.sum())
            calls += [
                Call(subscription.name, CANCEL, where(entries, sizes == size), batch_size=size)
                for size in np.unique(sizes).tolist()
            ]
        elif change.shift_millis is not None:
            by_time = _by_time(waiting, change.shifted_times(waiting))
            calls += [Call(subscription.name, change.kind, rows, {"deliver_at": time}) for time, rows in by_time]
        elif waiting.num_rows:
            kind = SKIP if change.kind == CANCEL else change.kind
            calls.append(Call(subscription.name, kind, waiting, change.fields))
    return Plan(calls, total, impossible)


def requests(settings: Settings, issued_by: str, topic: str, calls: Iterable[Call]) -> Iterator[ControlRequest]:
    """Makes the commands for a plan's calls, with outcomes that are summed up.

    Their request ids are one id with numbers behind it, so that the control log can show the change as one.
    """
    change, numbers = uuid.uuid4().hex, itertools.count()
    for call in calls:
        # Commands are made one at a time, so that a million messages don't become as many Python objects.
        for start in range(0, call.rows.num_rows, MAX_ENTRIES):
            made = request_factory(
                settings, issued_by, topic, [call.subscription], sum_up=True, request_id=f"{change}.{next(numbers)}"
            )
            rows = call.rows.slice(start, MAX_ENTRIES)
            position = (rows[name].to_pylist() for name in ("ledger_id", "entry_id", "partition", "batch_index"))
            messages, times = [MessageRef(*ids) for ids in zip(*position, strict=True)], rows["deliver_at"].to_pylist()
            known = times if OPERATIONS[call.kind].effect == Effect.CANCEL else ()
            yield from made.make(call.kind, Ids(messages, known, call.batch_size), **call.fields)


def _whole_entries(rows: pa.Table) -> pa.Table:
    """Returns a row, with batch_index -1, for each entry whose messages are all among the rows."""
    entries = rows.group_by(["ledger_id", "entry_id"], use_threads=False).aggregate(
        [("batch_size", "max"), ("deliver_at", "max"), ("partition", "max"), ([], "count_all")]
    )
    entries = where(entries, int64(entries, "count_all") == int64(entries, "batch_size_max"))
    columns = {
        "ledger_id": entries["ledger_id"],
        "entry_id": entries["entry_id"],
        "partition": entries["partition_max"],
        "batch_index": pa.array(np.full(entries.num_rows, -1)),
        "batch_size": entries["batch_size_max"],
        # A cancel's time may be later than its message's. The time of held messages is beyond the allowed maximum.
        "deliver_at": pc.min_element_wise(entries["deliver_at_max"], MAX_TIME_MILLIS),
    }
    return typed(columns, NAMED)


def _by_time(rows: pa.Table, times: Int64Array) -> Iterator[tuple[int, pa.Table]]:
    """Yields each time, ascending, and the rows with it.

    Args:
        times: the rows' times, int64, (rows,).
    """
    order = np.argsort(times, kind="stable")
    rows, times = rows.take(pa.array(order)), times[order]
    starts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1)).tolist()
    for start, end in itertools.pairwise([*starts, len(times)]):
        yield int(times[start]), rows.slice(start, end - start)


def _camel(result: str) -> str:
    first, *rest = result.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)
