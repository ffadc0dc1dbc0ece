"""Does something to all pending messages that a filter means: what to send for it, and what became of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from admin.control_requests import (
    Cancel,
    ControlRequest,
    Outcome,
    cancel_request,
    reschedule_requests,
    restore_requests,
    skip_requests,
)
from admin.message_ids import MessageRef
from admin.pending import Pending, PendingError, PendingFilter, PendingMessage, State
from conf.settings import Settings, Subscription

MAX_MATCHED = 10_000  # unless more are asked for


class TooManyError(PendingError):
    """More messages match than may be changed at once."""


class CumulativeError(PendingError):
    """Messages of a subscription with a cumulative type can't be skipped."""


class Action(StrEnum):
    CANCEL = "cancel"
    SKIP = "skip"
    RESCHEDULE = "reschedule"
    RESTORE = "restore"


@dataclass(frozen=True)
class Change:
    """What is to be done to messages. To reschedule them: to a time, ms since the epoch, or by so many ms."""

    action: Action
    deliver_at: int | None = None
    shift_millis: int | None = None

    def new_time(self, message: PendingMessage) -> int:
        if self.deliver_at is not None:
            return self.deliver_at
        # What is held back has no time that could be shifted: it is delivered at once.
        return 0 if message.is_held else max(0, message.deliver_at + (self.shift_millis or 0))


@dataclass(frozen=True)
class Call:
    """What is done to messages in one way, or where they are cancelled to entries."""

    subscription: str
    action: Action
    messages: list[MessageRef] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # when the messages wait
    cancels: list[Cancel] = field(default_factory=list)
    deliver_at: int = 0  # when they are to be delivered


@dataclass(frozen=True)
class Plan:
    """The calls that change messages, and how many messages each can be answered for.

    Attributes:
        total: messages, counted for each subscription that they wait for.
        impossible: of these, how many can't be cancelled alone.
        batch_sizes: by subscription, ledger and entry, of the entries that are cancelled whole.
    """

    calls: list[Call]
    total: int
    impossible: int
    batch_sizes: dict[tuple[str, int, int], int]


class Tally:
    """Counts what became of the messages of a plan, by result, for each subscription that they waited for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.results: Counter[str] = Counter({"NOT_ALLOWED": plan.impossible} if plan.impossible else {})
        self.done = 0

    def add(self, outcome: Outcome) -> None:
        key = outcome.subscription, outcome.message.ledger_id, outcome.message.entry_id
        n = self._plan.batch_sizes.get(key, 1) if outcome.message.batch_index < 0 else 1
        self.results[outcome.result] += n
        self.done += n * outcome.is_done

    @property
    def is_complete(self) -> bool:
        """Whether all were done."""
        return self.done >= self._plan.total

    def to_json(self) -> dict[str, int]:
        """The counts as `applied`, `tooLate` and so on."""
        counts = {"APPLIED": 0, "TOO_LATE": 0, **self.results}
        return {_camel(result): n for result, n in counts.items()}


def meant(wanted: PendingFilter, action: Action) -> PendingFilter:
    """The filter that an action goes by: to restore is meant what was taken back."""
    return wanted.model_copy(update={"state": State.TAKEN_BACK}) if action is Action.RESTORE else wanted


def check(pending: Pending, action: Action) -> None:
    """Whether an action can be done to the messages of a listing.

    Raises:
        CumulativeError: they can't be skipped.
    """
    if action is Action.SKIP and (cumulative := [s for s in pending.subscriptions if s.type.is_cumulative]):
        raise CumulativeError(
            f"messages of {cumulative[0].name} can't be skipped: its type {cumulative[0].type} acknowledges "
            "cumulatively (cancel them)"
        )


def matching(pending: Pending, max_matched: int) -> list[PendingMessage]:
    """All messages of a listing, soonest first.

    Raises:
        TooManyError: there are more than `max_matched`.
    """
    page = pending.page(max_matched)
    if page.cursor:
        raise TooManyError(f"{pending.count():,} messages match, and at most {max_matched:,} may")
    return page.messages


def plan(subscriptions: Sequence[Subscription], messages: Sequence[PendingMessage], change: Change) -> Plan:
    """What to send to change messages for the subscriptions that have them in the state that was asked for.

    A skip names a thousand messages, a cancel one entry. So all are skipped, but where the subscription's type is
    cumulative: there entries are cancelled, of which all messages are meant.
    """
    calls: list[Call] = []
    batch_sizes: dict[tuple[str, int, int], int] = {}
    total = impossible = 0
    for subscription in subscriptions:
        waiting = [m for m in messages if subscription.name in m.subscriptions]
        total += len(waiting)
        if change.action in (Action.RESCHEDULE, Action.RESTORE) or not subscription.type.is_cumulative:
            action = Action.SKIP if change.action is Action.CANCEL else change.action
            by_time: dict[int, list[PendingMessage]] = defaultdict(list)
            for m in waiting:
                by_time[change.new_time(m) if action is Action.RESCHEDULE else 0].append(m)
            for time, chosen in by_time.items():
                refs, times = [m.ref for m in chosen], [m.deliver_at for m in chosen]
                calls.append(Call(subscription.name, action, refs, times, deliver_at=time))
            continue
        cancels = []
        for (ledger_id, entry_id), parts in _by_entry(waiting):
            if len(parts) < parts[0].batch_size:
                impossible += len(parts)
                continue
            batch_sizes[subscription.name, ledger_id, entry_id] = len(parts)
            cancels.append(Cancel(MessageRef(ledger_id, entry_id), max(m.deliver_at for m in parts)))
        if cancels:
            calls.append(Call(subscription.name, Action.CANCEL, cancels=cancels))
    return Plan(calls, total, impossible, batch_sizes)


def requests(settings: Settings, issued_by: str, topic: str, call: Call) -> Iterator[ControlRequest]:
    """A call's commands."""
    names = [call.subscription]
    match call.action:
        case Action.RESCHEDULE:
            return reschedule_requests(settings, issued_by, topic, call.messages, call.deliver_at, names)
        case Action.RESTORE:
            return restore_requests(settings, issued_by, topic, call.messages, names)
        case Action.SKIP:
            return skip_requests(settings, issued_by, topic, call.messages, names, call.times)
        case Action.CANCEL:
            return (cancel_request(settings, issued_by, topic, cancel, names) for cancel in call.cancels)


def _by_entry(messages: Sequence[PendingMessage]) -> Iterator[tuple[tuple[int, int], list[PendingMessage]]]:
    entries: dict[tuple[int, int], list[PendingMessage]] = defaultdict(list)
    for message in messages:
        entries[message.ref.ledger_id, message.ref.entry_id].append(message)
    yield from entries.items()


def _camel(result: str) -> str:
    first, *rest = result.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)
