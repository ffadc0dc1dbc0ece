"""Takes back all pending messages that a filter means: what to send for it, and what became of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from admin.control_requests import Cancel, ControlRequest, Outcome, cancel_request, skip_requests
from admin.message_ids import MessageRef
from admin.pending import Pending, PendingError, PendingMessage
from admin.policy import Operation
from conf.settings import Settings, Subscription

MAX_MATCHED = 10_000  # unless more are asked for

# Messages of a call of the control client, so that there is an answer, and progress, before the last one is sent.
CALL_MESSAGES = 20_000


class TooManyError(PendingError):
    """More messages match than may be taken back at once."""


class CumulativeError(PendingError):
    """Messages of a subscription with a cumulative type can't be skipped."""


@dataclass(frozen=True)
class Call:
    """What one call of the control client takes back: messages to skip, or entries to cancel."""

    subscription: str
    skips: list[MessageRef] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """The calls that take messages back, and how many messages each can be answered for.

    Attributes:
        total: messages, counted for each subscription that they wait for.
        impossible: of these, how many can't be taken back alone.
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
        """Whether all were taken back."""
        return self.done >= self._plan.total

    def to_json(self) -> dict[str, int]:
        """The counts as `applied`, `tooLate` and so on."""
        counts = {"APPLIED": 0, "TOO_LATE": 0, **self.results}
        return {_camel(result): n for result, n in counts.items()}


def check(pending: Pending, operation: Operation) -> None:
    """Whether an operation can be done to the messages of a listing.

    Raises:
        CumulativeError: they can't be skipped.
    """
    if operation is Operation.SKIP and (cumulative := [s for s in pending.subscriptions if s.type.is_cumulative]):
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


def plan(subscriptions: Sequence[Subscription], messages: Sequence[PendingMessage]) -> Plan:
    """What to send to take messages back from the subscriptions that they wait for.

    A skip names a thousand messages, a cancel one entry. So all are skipped, but where the subscription's type is
    cumulative: there entries are cancelled, of which all messages are meant.
    """
    calls: list[Call] = []
    batch_sizes: dict[tuple[str, int, int], int] = {}
    total = impossible = 0
    for subscription in subscriptions:
        waiting = [m for m in messages if subscription.name in m.subscriptions]
        total += len(waiting)
        if not subscription.type.is_cumulative:
            refs = [m.ref for m in waiting]
            calls += [
                Call(subscription.name, skips=refs[i : i + CALL_MESSAGES]) for i in range(0, len(refs), CALL_MESSAGES)
            ]
            continue
        cancels = []
        for (ledger_id, entry_id), parts in _by_entry(waiting):
            if len(parts) < parts[0].batch_size:
                impossible += len(parts)
                continue
            batch_sizes[subscription.name, ledger_id, entry_id] = len(parts)
            cancels.append(Cancel(MessageRef(ledger_id, entry_id), max(m.deliver_at for m in parts)))
        calls += [
            Call(subscription.name, cancels=cancels[i : i + CALL_MESSAGES])
            for i in range(0, len(cancels), CALL_MESSAGES)
        ]
    return Plan(calls, total, impossible, batch_sizes)


def requests(settings: Settings, issued_by: str, topic: str, call: Call) -> list[ControlRequest]:
    """A call's commands."""
    names = [call.subscription]
    cancels = [cancel_request(settings, issued_by, topic, cancel, names) for cancel in call.cancels]
    return cancels + skip_requests(settings, issued_by, topic, call.skips, names)


def _by_entry(messages: Sequence[PendingMessage]) -> Iterator[tuple[tuple[int, int], list[PendingMessage]]]:
    entries: dict[tuple[int, int], list[PendingMessage]] = defaultdict(list)
    for message in messages:
        entries[message.ref.ledger_id, message.ref.entry_id].append(message)
    yield from entries.items()


def _camel(result: str) -> str:
    first, *rest = result.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)
