"""Keeps unwritable and slow destinations apart, with what remains for them, and decides what is tried next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conf.times import Moment
from status.alerts import SLOW, UNWRITABLE
from streaming.release.driver.lane_release import LaneRelease, ReleaseId, Remainder, RemainderResult, is_parked, oldest
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import (
    DestinationEvent,
    DestinationState,
    RemainderEvent,
    RemainderState,
    after,
)
from streaming.release.naming import Recipient

_log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 1.0  # until the first new attempt
_POLL_SECONDS = 0.1
_LATELY_SECONDS = 600  # for so long one that was slow does not share a connection

# For so long a slow destination has to keep up, twice as long each time that it is slow again.
_KEEPS_UP_SECONDS = 10.0
_MOST_KEEPS_UP_SECONDS = 300.0

# The messages of a round, and how much a slow destination is given at a time: as much as it took before in so long.
_FIRST_MESSAGES = 100
_MOST_MESSAGES = 20_000
_ROUND_SECONDS = 5.0


class Wait(NamedTuple):
    """A step: nothing is to be done for a while, or until something has changed."""

    seconds: float


class Probe(NamedTuple):
    """A step: try whether a topic accepts a producer."""

    topic: str


class Send(NamedTuple):
    """A step: send remainders together, and write their deliveries when all have arrived."""

    remainders: list[Remainder]
    is_slow: bool


class Ended(NamedTuple):
    """A step: the destination can be written again, and nothing more is to be done."""


Step = Wait | Probe | Send | Ended


@dataclass
class Drain:
    """The rounds in which a slow destination gets what is parked for it.

    Attributes:
        round: the number of the last round that was asked for; 0: none was.
        most: the most messages of that round.
        is_answered: whether an offset has had that round.
        n: the number of messages of the last round that was answered.
        others_wait: whether others waited after it.
    """

    round: int = 0
    most: int = _FIRST_MESSAGES
    is_answered: bool = True
    n: int = 0
    others_wait: bool = True
    _seconds: float = 0.0  # that the last remainders took
    _kept_up_since: float = 0.0  # monotonic; 0: it does not keep up

    def note_sent(self, messages: int, seconds: float) -> None:
        """Notes how long the destination took for some messages."""
        self._seconds = seconds
        fitting = int(_ROUND_SECONDS * messages / max(seconds, 0.1))
        self.most = min(max(fitting, _FIRST_MESSAGES), _MOST_MESSAGES)

    def ask(self, number: int) -> None:
        """Begins the next round."""
        self.round, self.is_answered = number, False

    def note_answer(self, n: int, others_wait: bool) -> None:
        """Notes that a tick has dispatched the messages of the last round."""
        self.is_answered, self.n, self.others_wait = True, n, others_wait

    def is_over(self, fast_seconds: float, seconds: float, now: float) -> bool:
        """Whether the destination has kept up for a while: each round had all that waited, and it took that in no time.

        So it does where nothing may go out, because what waits is parked for another reason, too. Called when all
        that was dispatched has arrived.

        Args:
            fast_seconds: it may take so long for a round.
            seconds: for so long it has to have kept up.
            now: the time, seconds, monotonic.
        """
        if not self.is_answered or not self.round:
            return False
        if self.n and (self.others_wait or self._seconds > fast_seconds):
            self._kept_up_since = 0.0
            return False
        self._kept_up_since = self._kept_up_since or now
        return now - self._kept_up_since >= seconds


@dataclass
class UnwritableDestination:
    """The destination of a recipient that can't be written, or is slow."""

    topic: str
    state: DestinationState
    since: int  # ms since the epoch
    reason: str = ""  # why it can't be written, or is slow
    rejects: str = ""  # the reason with which due messages are rejected, where it is REJECTING
    remainders: dict[ReleaseId, Remainder] = field(default_factory=dict)
    delay: float = 0.0  # until the next attempt, seconds
    try_at: float = 0.0  # when it is tried next, seconds, monotonic
    drain: Drain = field(default_factory=Drain)  # of a slow one
    keeps_up_seconds: float = 0.0  # for so long a slow one has to keep up
    sending_since: float = 0.0  # since when the oldest remainders are sent, seconds, monotonic; 0: they are not
    has_arrived: bool = False  # all that is open; it is over when nothing is on its way and `keeps_up`
    keeps_up: bool = False

    @property
    def is_slow(self) -> bool:
        """Whether the destination is slow."""
        return self.state == DestinationState.SLOW

    @property
    def has_recalled(self) -> bool:
        """Whether the shards are still to park some messages."""
        return any(self.recalls(remainder) for remainder in self.remainders.values())

    def recalls(self, remainder: Remainder) -> bool:
        """Whether the shards are to park a remainder's messages: where they reject them, nobody would let them go."""
        return remainder.state == RemainderState.RECALLED and self.state != DestinationState.REJECTING

    def remainders_to_send(self) -> list[Remainder]:
        """Returns the remainders to send together, without those whose messages the shards are to park."""
        return oldest(
            remainder for _, remainder in sorted(self.remainders.items()) if remainder.state == RemainderState.OPEN
        )

    def note(self, event: DestinationEvent, now: Moment) -> None:
        """Changes the state after an event."""
        before, self.state = self.state, after(self.state, event)
        if (before == DestinationState.SLOW) != self.is_slow:
            self.drain, self.since, self.sending_since = Drain(), now.millis, 0.0


@dataclass(frozen=True, kw_only=True)
class RetryRules:
    """How unwritable and slow destinations are tried.

    Attributes:
        retry_max_seconds: the longest time between two attempts.
        reject_after_millis: due messages of a subscription are rejected when its destination has been unwritable for so
            long; None: they wait. Rejects and dead letters always wait for their topic.
        slow_seconds: a destination that takes for longer what it is given is slow.
        lookahead_ceiling_millis: the longest lookahead; what is due later was dispatched before the clock was set back.
        gone: recipients that the settings no longer have; they are forgotten when they have no remainders.
    """

    retry_max_seconds: float
    reject_after_millis: int | None = None
    slow_seconds: float = 2.0
    lookahead_ceiling_millis: int = 0
    gone: Collection[Recipient] = frozenset()


class UnwritableDestinations:
    """The destinations that can't be written or are slow. Others are WRITABLE.

    The remainders of one are sent together, ordered by when messages are due, at longer and longer intervals. It is
    writable again when all have arrived, or, without remainders, when it accepts a producer. Until then no more
    messages are dispatched for the recipient, so that it gets all in order.

    A slow destination has a connection of its own, and shares no lane with others. It gets what is parked for it in
    rounds (`Drain`), as much as it takes, until it has kept up for a while.

    Args:
        topics: the topic of each recipient.
        rules: how they are tried.
        releases: of this run.
    """

    def __init__(self, topics: Mapping[Recipient, str], rules: RetryRules, releases: Releases) -> None:
        self._topics = topics
        self._rules = rules
        self._releases = releases
        self._destinations: dict[Recipient, UnwritableDestination] = {}
        self._round = 0  # of all slow destinations together
        self._slow_until: dict[Recipient, float] = {}  # when recipients stopped being slow, seconds, monotonic
        self._keeps_up_seconds: dict[Recipient, float] = {}  # for so long they had to keep up

    @property
    def recipients(self) -> frozenset[Recipient]:
        """The recipients whose destinations are not WRITABLE."""
        return frozenset(self._destinations)

    def lately_slow(self, now: Moment) -> frozenset[Recipient]:
        """Returns the recipients whose destinations were slow a short while ago."""
        since = now.seconds - _LATELY_SECONDS
        return frozenset(recipient for recipient, until in self._slow_until.items() if until > since)

    def open_remainders(self) -> set[tuple[Recipient, ReleaseId]]:
        """Returns the remainders that are not CLOSED, as (recipient, release)."""
        return {
            (recipient, release_id) for recipient, one in self._destinations.items() for release_id in one.remainders
        }

    def recorded(self) -> dict[str, Any]:
        """Returns the unwritable recipients and their remainders, as `Feedback.unwritable` has them."""
        found: dict[str, dict[str, Any]] = {}
        for (source, subscription), known in sorted(self._destinations.items()):
            one: dict[str, Any] = {"since": known.since, "open": []}
            for (tick, kind), remainder in sorted(known.remainders.items()):
                one.setdefault("recalled" if known.recalls(remainder) else "open", []).append([tick, kind])
            one |= {"rejects": known.rejects} if known.rejects else {}
            one |= {"round": known.drain.round, "most": known.drain.most} if known.drain.round else {}
            found.setdefault(source, {})[subscription] = one
        return found

    def alerts(self) -> dict[tuple[str, str], str]:
        """Returns what an operator is to know, by kind of alert and topic."""
        found = {}
        for one in self._destinations.values():
            if one.is_slow:
                why = one.reason.removeprefix("slow: ")
                found[SLOW, one.topic] = f"is slow, and what is due for it waits: {why}"
            else:
                what = "; what is due for it is rejected" if one.rejects else ""
                found[UNWRITABLE, one.topic] = f"can't be written: {one.reason}{what}"
        return found

    def resume(
        self, recorded: Mapping[str, Any], releases: Mapping[ReleaseId, LaneRelease], now: Moment
    ) -> list[Recipient]:
        """Takes over the unwritable recipients of the run before; returns those that are new here.

        Args:
            recorded: `Offset.unwritable` of its last offset.
            releases: those that are dispatched again; remainders of other releases are dropped.
            now: the time.
        """
        added = []
        for source, names in recorded.items():
            for subscription, one in names.items():
                recipient = (source, subscription)
                named = [(tick, kind) for tick, kind in one["open"]]
                remainders = [
                    Remainder(releases[release_id], recipient, is_resumed=True)
                    for release_id in named
                    if release_id in releases
                ]
                self._round = max(self._round, one.get("round", 0))
                rejects = one.get("rejects", "") if self._rules.reject_after_millis is not None else ""
                is_slow = "round" in one and not rejects
                if self.add(recipient, "so it was before the start", remainders, now, is_slow):
                    added.append(recipient)
                    known = self._destinations[recipient]
                    known.since = one["since"]
                    if rejects:
                        known.note(DestinationEvent.OVERDUE, now)
                        known.rejects = rejects
        return added

    def add(
        self, recipient: Recipient, reason: str, remainders: list[Remainder], now: Moment, is_slow: bool = False
    ) -> bool:
        """Notes that the destination of a recipient can't be written, or is slow, and keeps remainders for it.

        Args:
            recipient: of the destination.
            reason: why it can't be written; empty: as before.
            remainders: the remainders; may be empty.
            now: the time.
            is_slow: whether it is slow. Ignored where it is known.

        Returns:
            whether it was WRITABLE before.
        """
        known = self._destinations.get(recipient)
        is_new = known is None
        if known is None:
            known = UnwritableDestination(self._topics[recipient], DestinationState.WRITABLE, now.millis)
            known.note(DestinationEvent.LATE if is_slow else DestinationEvent.REFUSED, now)
            known.delay = 0.0 if is_slow else _FIRST_DELAY_SECONDS
            known.try_at = now.seconds + known.delay
            longer = 2 * self._keeps_up_seconds.get(recipient, 0.0) if recipient in self.lately_slow(now) else 0.0
            known.keeps_up_seconds = min(max(longer, _KEEPS_UP_SECONDS), _MOST_KEEPS_UP_SECONDS)
            self._destinations[recipient] = known
            what = "is slow" if is_slow else "can't be written"
            _log.warning("%s %s, and what is due for it waits: %s", known.topic, what, reason)
        known.reason = reason or known.reason
        for remainder in remainders:
            known.remainders.setdefault(remainder.release_id, remainder)
        return is_new

    def forget_taken_back(self, recorded: Mapping[str, Any]) -> None:
        """Forgets remainders whose messages the shards reject, or park.

        Args:
            recorded: `Offset.unwritable`, which says for which recipients and releases they do.
        """
        for source, names in recorded.items():
            for subscription, one in names.items():
                if (known := self._destinations.get((source, subscription))) is not None:
                    for tick, kind in [*one.get("recalled", ()), *(one["open"] if "rejects" in one else ())]:
                        _close(known, (tick, kind), RemainderEvent.TAKEN_BACK)

    def note_drained(self, drained: Mapping[Recipient, tuple[int, bool]]) -> None:
        """Notes by recipient how many messages a tick has let go to a slow destination, and whether others wait."""
        for recipient, (n, others_wait) in drained.items():
            if recipient in self._destinations:
                self._destinations[recipient].drain.note_answer(n, others_wait)

    def next_step(self, recipient: Recipient, now: Moment) -> Step:
        """Returns what is to be done next for a destination. A probe's or a sending's result goes to `note_result`."""
        known = self._destinations.get(recipient)
        if known is None:
            return Ended()
        if known.try_at > now.seconds:
            return Wait(known.try_at - now.seconds)
        if known.has_arrived:
            return self._settle(recipient, known, now)
        remainders = known.remainders_to_send()
        if not remainders or known.rejects:
            if recipient not in self._rules.gone and not known.is_slow:
                return Probe(known.topic)
            self._note_all_arrived(recipient, known, now)
            return Wait(0.0)
        if not all(self._releases.is_written(remainder) for remainder in remainders):
            return Wait(_POLL_SECONDS)
        if known.is_slow and known.drain.others_wait and is_parked(recipient):
            self._ask(recipient, known, now)  # so that they are at hand when these have arrived
        known.sending_since = known.sending_since or now.seconds
        return Send(remainders, known.is_slow)

    def note_result(self, recipient: Recipient, step: Probe | Send, sent: RemainderResult, now: Moment) -> None:
        """Notes the result of a step.

        Args:
            recipient: of the destination.
            step: as `next_step` returned it.
            sent: of a probe its `reason` alone.
            now: the time after it.
        """
        known = self._destinations[recipient]
        if sent.reason:
            self._note_failed(recipient, known, sent, now)
        elif isinstance(step, Send):
            known.drain.note_sent(sent.messages, now.seconds - known.sending_since)
            known.sending_since = 0.0
            for remainder in step.remainders:
                _close(known, remainder.release_id, RemainderEvent.ARRIVED)
        else:
            self._note_all_arrived(recipient, known, now)

    def _note_failed(
        self, recipient: Recipient, known: UnwritableDestination, sent: RemainderResult, now: Moment
    ) -> None:
        known.note(DestinationEvent.LATE if sent.is_slow else DestinationEvent.REFUSED, now)
        longer = min(max(2 * known.delay, _FIRST_DELAY_SECONDS), self._rules.retry_max_seconds)
        known.delay = 0.0 if known.is_slow else longer
        known.reason = sent.reason
        self._reject_in_time(recipient, known, now)
        known.try_at = now.seconds + known.delay

    def _reject_in_time(self, recipient: Recipient, known: UnwritableDestination, now: Moment) -> None:
        """Begins to reject due messages of a subscription, if its destination has been unwritable for long enough.

        If it is too early, the next attempt is made at that time at the latest.
        """
        limit = self._rules.reject_after_millis
        if limit is None or known.rejects or not is_parked(recipient) or known.is_slow or known.has_recalled:
            return
        left = known.since + limit - now.millis
        if left > 0:
            known.delay = min(known.delay, left / 1000)
            return
        _log.warning("%s can't be written for too long, and what is due for it is rejected", known.topic)
        known.note(DestinationEvent.OVERDUE, now)
        known.rejects = f"{known.topic} can't be written: {known.reason}"

    def _note_all_arrived(self, recipient: Recipient, known: UnwritableDestination, now: Moment) -> None:
        """Notes that all has arrived that was dispatched for a destination; asks for more, where it may be slow yet."""
        known.delay = 0.0
        was_slow = known.is_slow
        known.note(DestinationEvent.ARRIVED, now)
        if known.is_slow and not was_slow:
            known.reason = "it could not be written, and was slow before"
        known.has_arrived = True
        known.keeps_up = (
            not known.is_slow
            or not is_parked(recipient)
            or known.drain.is_over(self._rules.slow_seconds, known.keeps_up_seconds, now.seconds)
        )
        if not known.keeps_up:
            self._ask(recipient, known, now)

    def _ask(self, recipient: Recipient, known: UnwritableDestination, now: Moment) -> None:
        """Asks the shards for the next messages for a slow destination, once all has come that was asked for before."""
        if known.drain.is_answered and not known.has_recalled and not self._is_on_its_way(recipient, now):
            self._round += 1
            known.drain.ask(self._round)

    def _settle(self, recipient: Recipient, known: UnwritableDestination, now: Moment) -> Step:
        if self._is_on_its_way(recipient, now):
            return Wait(_POLL_SECONDS)
        known.has_arrived = False
        if known.remainders or not known.keeps_up:
            known.delay = _POLL_SECONDS if known.rejects or known.is_slow or known.has_recalled else 0.0
            known.try_at = now.seconds + known.delay
            return Wait(known.delay)
        was_slow = known.is_slow
        known.note(DestinationEvent.SETTLED, now)
        del self._destinations[recipient]
        if was_slow:
            self._slow_until[recipient] = now.seconds
            self._keeps_up_seconds[recipient] = known.keeps_up_seconds
        what = "keeps up again" if was_slow else "can be written again"
        what = "is not in the settings, and nothing is open" if recipient in self._rules.gone else what
        _log.warning("%s %s", known.topic, what)
        return Ended()

    def _is_on_its_way(self, recipient: Recipient, now: Moment) -> bool:
        return self._releases.is_on_its_way(recipient, now.millis + self._rules.lookahead_ceiling_millis)


def _close(known: UnwritableDestination, release_id: ReleaseId, event: RemainderEvent) -> None:
    if (remainder := known.remainders.pop(release_id, None)) is not None:
        after(remainder.state, event)
