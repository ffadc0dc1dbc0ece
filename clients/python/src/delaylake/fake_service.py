"""The service in memory: topics, messages and a clock. See `testing`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar
from urllib.parse import unquote

from delaylake import paging, rest
from delaylake.commands import (
    CANCEL,
    END_SCHEDULE,
    PAUSE_SCHEDULE,
    RESUME_SCHEDULE,
    SCHEDULE_OPERATIONS,
    SKIP,
    Command,
    full_name,
)
from delaylake.errors import Invalid, NotFound
from delaylake.listing import PendingMessage, Schedule, ScheduleProgress
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.occurrences import Rule, RuleError
from delaylake.scheduled import Scheduled
from delaylake.times import MAX_MILLIS, millis, moment

_SUBSCRIPTION = "default"
_CUMULATIVE = ("Exclusive", "Failover")
_NOT_COMPARED = ("deliverAt", "traceparent", "tracestate", "baggage")  # of messages with one request id
_LATER = "*"  # subscriptions that are added later
_MISFIRE_MILLIS = 60_000  # with `skip` an occurrence that is later than this is left out
MILLI = timedelta(milliseconds=1)

_STATES = ("waiting", "held", "paused", "cancelled", "ended")
_OVER = ("cancelled", "ended")

_Listed = TypeVar("_Listed")

Subscriptions = Mapping[str, Iterable[str] | Mapping[str, str]]


@dataclass(frozen=True)
class Delivery:
    """A message as it comes to a subscription's destination.

    Attributes:
        topic: the source topic.
        properties: those of the message, and those that the service adds.
        deliver_at: when it was due.
        delivered_at: when it came, by the fake's clock.
        occurrence: the number of a recurring message's occurrence; None: it comes once.
        attempt: how often it has been retried.
    """

    topic: str
    subscription: str
    id: MessageId
    payload: bytes
    key: str | None
    ordering_key: str | None
    properties: Mapping[str, str]
    deliver_at: datetime
    delivered_at: datetime
    occurrence: int | None = None
    attempt: int = 0


@dataclass(frozen=True)
class Expired:
    """A message that could not be sent to a subscription by its end.

    Attributes:
        expired_at: when, by the fake's clock.
        occurrence: the number of a recurring message's occurrence; None: it comes once.
    """

    topic: str
    subscription: str
    id: MessageId
    expired_at: datetime
    occurrence: int | None = None


@dataclass(frozen=True)
class Rejected:
    """A message that the service puts among its topic's rejects, with the reason."""

    topic: str
    id: MessageId
    payload: bytes
    properties: Mapping[str, str]
    reason: str


@dataclass(frozen=True)
class Backoff:
    """The delays of a subscription's retries, as its setting `backoff`, without jitter."""

    first: timedelta = timedelta(seconds=10)
    factor: float = 2
    max: timedelta = timedelta(hours=1)
    attempts: int = 5

    def delay_millis(self, attempt: int) -> int:
        """Returns the delay of a retry, ms; the first one has number 1."""
        return min(self.first * self.factor ** (attempt - 1), self.max) // MILLI


@dataclass
class _Copy:
    """What becomes of a message for one subscription. Times are ms since the epoch.

    Attributes:
        state: `waiting`, `cancelled`, `delivered`, `expired`, or of a schedule `ended`.
        due: when it is due.
        planned: when its rule has the occurrence: `due`, unless that was moved.
        occurrence: the number of the occurrence that waits; 0: the message comes once.
        last_occurrence: the number of the last one that was delivered or skipped; 0: none.
        is_paused: its schedule is paused.
        is_parked: it came due while its subscription was paused.
        last: the last delivery.
        end: from when on it is not sent; None: it has no end.
    """

    subscription: str
    due: int
    planned: int
    occurrence: int = 0
    state: str = "waiting"
    attempt: int = 0
    delivered: int = 0
    last_occurrence: int = 0
    is_paused: bool = False
    is_parked: bool = False
    last: Delivery | None = None
    end: int | None = None


@dataclass
class _Message:
    """A message that was sent.

    Attributes:
        due: when it was due when it was sent, ms since the epoch.
        rule: None: it comes once.
        key_began: when the first of its schedule key, from which on one has always waited, was published.
        copies: by subscription.
    """

    id: MessageId
    sent: Scheduled
    published_at: int
    due: int
    rule: Rule | None
    key_began: int
    copies: dict[str, _Copy] = field(default_factory=dict)

    @property
    def schedule_key(self) -> str | None:
        return self.sent.properties.get("scheduleKey")

    def deliver(self, copy: _Copy, now: int) -> Delivery:
        """Delivers what waits for a subscription; then its next occurrence waits, if there is one."""
        properties = {
            **self.sent.properties,
            "delaylake.source": self.sent.topic,
            "delaylake.messageId": str(self.id),
            "delaylake.deliverAt": str(copy.due),
        }
        if copy.occurrence:
            properties["delaylake.occurrence"] = str(copy.occurrence)
        elif copy.end is not None:
            properties["delaylake.expiresAt"] = str(copy.end)
        if copy.attempt:
            properties["delaylake.attempt"] = str(copy.attempt)
        copy.last = Delivery(
            self.sent.topic,
            copy.subscription,
            self.id,
            self.sent.payload,
            self.sent.key,
            self.sent.ordering_key,
            properties,
            moment(copy.due),
            moment(now),
            copy.occurrence or None,
            copy.attempt,
        )
        copy.delivered += 1
        copy.is_parked = False
        if self.rule is None:
            copy.state = "delivered"
        else:
            self.move_on(self.rule, copy, copy.planned if self.rule.misfire == "all" else max(copy.planned, now))
        return copy.last

    def set_end(self, copy: _Copy) -> None:
        """Gives what waits for a subscription the end that it has when it is due at its time."""
        properties = self.sent.properties
        after = properties.get("expireAfter")
        ends = [int(at) for at in (properties.get("expireAt"),) if at is not None]
        ends += [] if after is None else [copy.due + int(after)]
        copy.end = min(ends, default=None)

    def expire(self, copy: _Copy, now: int) -> Expired:
        """Has what waits for a subscription expire; then its next occurrence waits, if there is one."""
        found = Expired(self.sent.topic, copy.subscription, self.id, moment(now), copy.occurrence or None)
        was_parked, copy.is_parked = copy.is_parked, False
        if self.rule is None:
            copy.state = "cancelled" if was_parked else "expired"
        else:
            self.move_on(self.rule, copy, copy.planned if self.rule.misfire == "all" else max(copy.planned, now))
        return found

    def move_on(self, rule: Rule, copy: _Copy, after: int) -> None:
        """Lets the first occurrence after a time wait, in place of the one that waits; or the schedule ends."""
        copy.last_occurrence = copy.occurrence
        following = rule.next_after(after)
        if following is None or copy.occurrence == rule.times:
            copy.state = "ended"
        else:
            copy.due = copy.planned = following
            copy.occurrence += 1
            self.set_end(copy)

    def make_up(self, copy: _Copy, now: int) -> None:
        """Gives a recurring message that did not go on for a time the occurrence that it goes on with."""
        if self.rule is not None and self.rule.misfire == "skip" and copy.planned < now - _MISFIRE_MILLIS:
            following = self.rule.next_after(now)
            if following is None:
                copy.state = "ended"
            else:
                copy.planned = following
        copy.due = copy.planned


class FakeService:
    """Topics, messages, and the clock. See `FakeClient`."""

    def __init__(
        self, subscriptions: Subscriptions | None, now: datetime | None, lookahead: timedelta, backoff: Backoff
    ) -> None:
        self._topics = None if subscriptions is None else {full_name(t): _types(n) for t, n in subscriptions.items()}
        self.now = millis("now", now or datetime.now(timezone.utc))
        self._lookahead = lookahead // MILLI
        self._backoff = backoff
        self._entries = itertools.count()
        self._messages: dict[tuple[str, int, int], _Message] = {}
        self._paused: set[tuple[str, str]] = set()
        self._answers: dict[str, tuple[object, list[Outcome]]] = {}
        self._requests: dict[tuple[str, str], tuple[object, MessageId]] = {}
        self._redriven: dict[str, Redriven] = {}
        self.deliveries: list[Delivery] = []
        self.dead_letters: list[Delivery] = []
        self.rejects: list[Rejected] = []
        self.expired: list[Expired] = []

    def types_of(self, topic: str) -> Mapping[str, str]:
        """Returns the subscriptions of a topic, with their types.

        Raises:
            NotFound: there is no such topic.
        """
        if self._topics is None:
            return {_SUBSCRIPTION: "Shared"}
        if topic not in self._topics:
            raise NotFound(f"no such topic: {topic} has no route")
        return self._topics[topic]

    def send(self, sent: Scheduled) -> MessageId:
        """Takes a message; a wrong rule puts it among the rejects.

        Returns:
            its id; if its request id is an earlier message's, the id of that one.

        Raises:
            NotFound: there is no such topic.
            Invalid: another message has had its request id.
        """
        types = self.types_of(sent.topic)
        properties = {name: value for name, value in sent.properties.items() if name not in _NOT_COMPARED}
        body = sent.payload, sent.key, sent.ordering_key, properties
        if sent.request_id and (first := self._requests.get((sent.topic, sent.request_id))):
            if first[0] != body:
                raise Invalid("another message has had this request id", request_id=sent.request_id)
            return first[1]
        message_id = MessageId(1, next(self._entries), deliver_at=sent.deliver_at)
        if sent.request_id:
            self._requests[sent.topic, sent.request_id] = body, message_id
        due: int | None = self.now if sent.deliver_at is None else millis("deliver_at", sent.deliver_at)
        try:
            rule = Rule.of_properties(sent.properties, due or 0)
            if rule is not None and sent.deliver_at is None:
                due = rule.next_after(self.now)
            if due is None:
                raise RuleError("repeat: no occurrence")
        except RuleError as error:
            self.rejects.append(Rejected(sent.topic, message_id, sent.payload, sent.properties, str(error)))
            return message_id
        message = _Message(message_id, sent, self.now, due, rule, self.now)
        before = None if message.schedule_key is None else self._of_key(sent.topic, message.schedule_key)
        mode = sent.properties.get("scheduleMode", "replace")
        if before is not None:
            message.key_began = before.key_began
            if "debounceMax" in sent.properties:
                due = min(due, before.key_began + int(sent.properties["debounceMax"]))
        message.copies = {name: _Copy(name, due, due, 0 if rule is None else 1) for name in types}
        for copy in message.copies.values():
            message.set_end(copy)
        if before is not None:
            superseded = message if mode == "keep" else before
            for copy in superseded.copies.values():
                if superseded is message or not self._is_dispatched(superseded, copy):
                    copy.state = "cancelled"
        self._messages[sent.topic, message_id.ledger_id, message_id.entry_id] = message
        return message_id

    def advance(self, target: int) -> list[Delivery]:
        """Moves the clock to a time, and delivers what is due by then, in order; what is parked may expire."""
        before = len(self.deliveries)
        while True:
            due = [
                (time, message.id.entry_id, copy.subscription, message, copy)
                for message in self._messages.values()
                for copy in message.copies.values()
                if copy.state == "waiting" and not copy.is_paused
                for time in [copy.end if copy.is_parked else copy.due]
                if time is not None and time <= target
            ]
            if not due:
                break
            time, *_, message, copy = min(due, key=lambda one: one[:3])
            self.now = max(self.now, time)
            if copy.end is not None and copy.end <= self.now:
                self.expired.append(message.expire(copy, self.now))
            elif (message.sent.topic, copy.subscription) in self._paused:
                copy.is_parked = True
            else:
                self.deliveries.append(message.deliver(copy, self.now))
        self.now = max(self.now, target)
        return self.deliveries[before:]

    def answer(self, command: Command) -> list[Outcome]:
        """Applies a command; returns its outcomes, also when it is repeated.

        Raises:
            NotFound: there is no such topic.
            TooLate, NotAllowed, Invalid: it is not done for each subscription.
        """
        body = (command.operation, command.topic, command.named, command.subscription, tuple(command.fields.items()))
        before, outcomes = self._answers.get(command.request_id, (body, None))
        if before != body:
            outcomes = list(self._apply(command, reused="another command has this request id"))
        elif outcomes is None:
            outcomes = list(self._apply(command))
            self._answers[command.request_id] = body, outcomes
        command.check(outcomes)
        return outcomes

    def _apply(self, command: Command, reused: str = "") -> Iterator[Outcome]:
        types = self.types_of(command.topic)
        named = command.subscription
        subscriptions = list(types) if named in (None, _LATER) else [named or ""]
        if named in (None, _LATER) and command.operation not in SCHEDULE_OPERATIONS:
            subscriptions.insert(0, _LATER)  # the others' answers change what it is told
        for subscription in subscriptions:
            if subscription not in types and subscription != _LATER:
                raise NotFound(f"no such subscription: {subscription}", request_id=command.request_id)
        message = self._named(command)
        for subscription in subscriptions:
            result, reason = ("INVALID", reused) if reused else self._result(command, message, subscription, types)
            position = message.id if message is not None else command.message or MessageId(-1, -1)
            yield Outcome(subscription, position, result, reason, command.is_done_by(result))

    def _result(
        self, command: Command, message: _Message | None, subscription: str, types: Mapping[str, str]
    ) -> tuple[str, str]:
        """Applies a command for one subscription; returns result and reason."""
        if command.operation == SKIP and types.get(subscription) in _CUMULATIVE:
            return "NOT_ALLOWED", f"{subscription} acknowledges cumulatively"
        if command.named is None:
            return self._pause(command, subscription)
        if message is None:
            if command.operation == CANCEL and command.message is not None:
                return (
                    ("WAITING", "")
                    if command.deliver_at > self.now
                    else ("TOO_LATE", "not known, and its time is past")
                )
            return "NOT_FOUND", "no such message"
        if subscription != _LATER:
            return self._change(command, message, message.copies[subscription])
        has_begun = any(copy.last_occurrence for copy in message.copies.values())
        if has_begun or message.due - self._lookahead <= self.now:
            return ("ALREADY_APPLIED", "") if command.operation in (CANCEL, SKIP) else ("TOO_LATE", "released")
        return "APPLIED", ""

    def _change(self, command: Command, message: _Message, copy: _Copy) -> tuple[str, str]:
        """Applies a command to a message of one subscription; returns result and reason."""
        operation = command.operation
        if refused := self._refused(operation, message, copy):
            return refused
        match operation:
            case "cancel" | "skip" | "end_schedule":
                copy.state = "cancelled"
            case "restore":
                copy.state = "waiting"
            case "reschedule" | "deliver_now":
                self._move(message, copy, int(command.fields.get("deliver_at", 0)))
            case "postpone":
                self._move(message, copy, copy.due + int(command.fields["by_millis"]))
            case "skip_next" if message.rule is not None:
                message.move_on(message.rule, copy, copy.planned)
            case "pause_schedule":
                copy.is_paused = True
            case "resume_schedule":
                copy.is_paused = False
                message.make_up(copy, self.now)
            case "retry":
                self._retry(copy, int(command.fields.get("after_millis", 0)))
        return "APPLIED", ""

    def _refused(self, operation: str, message: _Message, copy: _Copy) -> tuple[str, str] | None:
        """Returns result and reason of a command that does nothing; None: it is applied."""
        is_cancelled, is_dispatched = copy.state == "cancelled", self._is_dispatched(message, copy)
        recurs = message.rule is not None
        is_of_schedule = operation in SCHEDULE_OPERATIONS
        if operation in (CANCEL, SKIP, END_SCHEDULE):
            if operation == END_SCHEDULE and not recurs:
                return "INVALID", "the message does not recur: cancel it"
            if is_cancelled or (operation == END_SCHEDULE and copy.state == "ended"):
                return "ALREADY_APPLIED", ""
        elif operation == "restore":
            if not is_cancelled:
                return "ALREADY_APPLIED", ""
            return ("TOO_LATE", "its time is past") if copy.due - self._lookahead <= self.now else None
        elif operation == "retry":
            if recurs:
                return "INVALID", "a recurring message is not retried by its id: send the delivered one back"
            if is_cancelled:
                return "INVALID", "cancelled: restore it first"
            return None if is_dispatched else ("ALREADY_APPLIED", "it waits")
        elif is_cancelled:
            return "INVALID", "cancelled: restore it first"
        elif operation == PAUSE_SCHEDULE and copy.is_paused:
            return "ALREADY_APPLIED", ""
        elif copy.is_paused and not is_of_schedule:
            return "INVALID", "paused: resume it first"
        elif is_of_schedule and not recurs:
            return "INVALID", "the message does not recur"
        if is_dispatched:
            return "TOO_LATE", "released"
        if operation == RESUME_SCHEDULE and not copy.is_paused:
            return "ALREADY_APPLIED", "it is not paused"
        return None

    def _is_dispatched(self, message: _Message, copy: _Copy) -> bool:
        """Whether what waits for a subscription can't be changed any more."""
        if copy.state != "waiting":
            return copy.state in ("delivered", "expired", "ended")
        holds = copy.is_paused or copy.is_parked or (message.sent.topic, copy.subscription) in self._paused
        return not holds and copy.due - self._lookahead <= self.now

    def _move(self, message: _Message, copy: _Copy, due: int) -> None:
        copy.due, copy.is_parked = min(max(due, self.now), MAX_MILLIS), False
        message.set_end(copy)

    def _retry(self, copy: _Copy, after: int) -> None:
        copy.attempt += 1
        if copy.attempt > self._backoff.attempts and copy.last is not None:
            self.dead_letters.append(copy.last)
            return
        copy.state = "waiting"
        copy.due = copy.planned = self.now + (after or self._backoff.delay_millis(copy.attempt))

    def _pause(self, command: Command, subscription: str) -> tuple[str, str]:
        place = command.topic, subscription
        if command.operation == "pause":
            self._paused.add(place)
            return "APPLIED", ""
        self._paused.discard(place)
        for message in self._messages.values():
            copy = message.copies.get(subscription)
            if message.sent.topic == command.topic and copy is not None and copy.is_parked:
                copy.is_parked = False
                message.make_up(copy, self.now)
        return "APPLIED", ""

    def _named(self, command: Command) -> _Message | None:
        """Returns the message that a command names; None: there is none, or it names none."""
        if command.schedule_key:
            return self._of_key(command.topic, command.schedule_key)
        if command.message is None:
            return None
        return self._messages.get((command.topic, command.message.ledger_id, command.message.entry_id))

    def _of_key(self, topic: str, key: str) -> _Message | None:
        """Returns the message that waits under a schedule key, and can still be changed."""
        found = [m for m in self._messages.values() if m.sent.topic == topic and m.schedule_key == key]
        for message in found:
            if any(c.state == "waiting" and not self._is_dispatched(message, c) for c in message.copies.values()):
                return message
        return None

    def payload_of(self, topic: str, message_id: MessageId) -> bytes:
        """Returns a message's payload."""
        return self._messages[full_name(topic), message_id.ledger_id, message_id.entry_id].sent.payload

    def redrive(self, call: rest.Call) -> Redriven:
        """Delivers dead letters once more that match a call's filter.

        Raises:
            NotFound: there is no such topic or subscription.
            Invalid: more match than the call allows.
        """
        topic = "persistent://" + "/".join(unquote(part) for part in call.path.split("/")[-5:-2])
        if call.content["filter"]["subscription"] not in self.types_of(topic):
            raise NotFound(f"no such subscription: {call.content['filter']['subscription']}")
        if call.request_id in self._redriven:
            return self._redriven[call.request_id]
        wanted = call.content["filter"]
        matching = [d for d in self.dead_letters if d.topic == topic and _matches(d, wanted)]
        if call.content["dryRun"]:
            return Redriven(len(matching))
        if len(matching) > call.content["max"]:
            raise Invalid(f"{len(matching)} match, and at most {call.content['max']} may", request_id=call.request_id)
        for letter in matching:
            self.dead_letters.remove(letter)
            copy = self._messages[topic, letter.id.ledger_id, letter.id.entry_id].copies[letter.subscription]
            copy.state, copy.attempt = "waiting", 0
            copy.due = copy.planned = self.now
        self._redriven[call.request_id] = Redriven(len(matching), len(matching))
        return self._redriven[call.request_id]

    def listed(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        """Yields the messages of a listing, soonest first, or its schedules, in the order in which they came."""
        of_path: dict[str, Callable[[Any], Iterator[Any]]] = {"delayed": self._pending, "schedules": self._schedules}
        return of_path[listing.path](listing)

    def _pending(self, listing: paging.Listing[PendingMessage]) -> Iterator[PendingMessage]:
        self.types_of(listing.topic)
        query = listing.query
        found: dict[tuple[int, int], list[tuple[_Message, _Copy]]] = {}
        for message in self._messages.values():
            for copy in message.copies.values():
                if message.sent.topic == listing.topic and self._is_listed(message, copy, query):
                    found.setdefault((copy.due, message.id.entry_id), []).append((message, copy))
        for (due, _), pairs in itertools.islice(sorted(found.items()), listing.limit):
            sent, is_on_hold = pairs[0][0].sent, any(copy.is_parked or copy.is_paused for _, copy in pairs)
            yield PendingMessage(
                pairs[0][0].id,
                None if is_on_hold else moment(due),
                tuple(copy.subscription for _, copy in pairs),
                sent.key,
                sent.ordering_key,
                sent.properties,
                moment(sent.event_time) if sent.event_time else None,
                moment(pairs[0][0].published_at),
                None,
                None if pairs[0][1].end is None else moment(pairs[0][1].end),
            )

    def _is_listed(self, message: _Message, copy: _Copy, query: Mapping[str, Any]) -> bool:
        state = {"waiting": "held" if copy.is_parked else "waiting", "cancelled": "takenBack"}.get(copy.state)
        wanted = query["state"]
        if state != wanted and not (wanted == "waiting" and state == "held"):
            return False
        if wanted == "takenBack" and copy.due <= self.now:
            return False
        due_from, due_before = query.get("dueFrom"), query.get("dueBefore")
        pairs = [text.partition("=")[::2] for text in query.get("property") or ()]
        return (
            query.get("subscription") in (None, copy.subscription)
            and query.get("key") in (None, message.sent.key)
            and (due_from is None or copy.due >= due_from)
            and (due_before is None or copy.due < due_before)
            and query.get("ledgerId") in (None, message.id.ledger_id)
            and query.get("entryId") in (None, message.id.entry_id)
            and all(message.sent.properties.get(name) == value for name, value in pairs)
        )

    def _schedules(self, listing: paging.Listing[Schedule]) -> Iterator[Schedule]:
        self.types_of(listing.topic)
        name, with_ended = listing.query.get("subscription"), listing.query.get("withEnded")
        made = (
            _schedule(message, message.rule, [c for c in message.copies.values() if name in (None, c.subscription)])
            for message in self._messages.values()
            if message.sent.topic == listing.topic and message.rule is not None
        )
        return itertools.islice((one for one in made if with_ended or one.state not in _OVER), listing.limit)


def _types(names: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, "Shared")


def _matches(letter: Delivery, wanted: Mapping[str, Any]) -> bool:
    """Whether a dead letter matches a re-drive's filter. All became dead letters now, and none keeps its reasons."""
    ids = wanted.get("messageIds")
    position = f"{letter.id.ledger_id}:{letter.id.entry_id}:{letter.id.batch_index}"
    return (
        letter.subscription == wanted["subscription"]
        and wanted.get("key") in (None, letter.key)
        and (ids is None or position in ids)
        and all(letter.properties.get(name) == value for name, value in wanted.get("properties", {}).items())
    )


def _schedule(message: _Message, rule: Rule, copies: Sequence[_Copy]) -> Schedule:
    properties = message.sent.properties
    progress = [_progress(copy) for copy in copies]
    waiting = [copy for copy in copies if copy.state == "waiting"]
    times = [copy.due for copy in waiting if not (copy.is_paused or copy.is_parked)]
    return Schedule(
        message.id,
        rule.text,
        rule.zone,
        None if rule.until is None else moment(rule.until),
        rule.times,
        rule.misfire,
        moment(rule.anchor),
        min((one.state for one in progress), key=_STATES.index, default="ended"),
        min((copy.occurrence for copy in waiting), default=None),
        moment(min(times)) if times else None,
        message.sent.key,
        properties.get("scheduleKey"),
        moment(message.published_at),
        None,
        tuple(progress),
    )


def _progress(copy: _Copy) -> ScheduleProgress:
    waits = copy.state == "waiting"
    state = "paused" if waits and copy.is_paused else "held" if waits and copy.is_parked else copy.state
    return ScheduleProgress(
        copy.subscription,
        state,
        copy.delivered,
        copy.last_occurrence or None,
        copy.occurrence if waits else None,
        moment(copy.due) if state == "waiting" else None,
    )
