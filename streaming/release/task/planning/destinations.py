"""Finds the destinations of a release's messages: those that the settings now have for the subscriptions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from broker.client import PulsarError
from broker.protocol.sending import is_refusal
from conf.settings import Settings, dead_letter_topic, rejects_topic
from streaming.checkpoint.offset import UNKNOWN
from streaming.release.attempt import Attempt, FailedProducer
from streaming.release.naming import Recipient
from streaming.release.task.producer_line import reason_of
from tracker.subscriptions import DEFAULT_BACKOFF, dead_letters_of

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class Destination(NamedTuple):
    """A topic to which a message is sent."""

    subscription: str | None  # None: it is the rejects topic
    topic: (
        str  # without a partition's number; empty: there is none, because the settings no longer have the subscription
    )
    recipient: Recipient
    is_dead: bool  # the topic is that of the subscription's dead letters
    partitions: int  # 0: the topic is not partitioned


class _Route(NamedTuple):
    """The destination of a subscription, or of rejected messages."""

    subscription: str | None  # None: of rejected messages
    destination: str | None  # None: there is none, because the settings no longer have the subscription
    is_new: bool = False  # the settings had another destination when the message was dispatched


class Destinations:
    """Finds the destinations of messages, and notes those that are left out.

    Args:
        settings: the settings now; their routes name the destinations.
        sending: routes, partitions and retries from the offset with which the messages were dispatched.
        attempt: says which recipients to leave out.
        partitions_now: returns the number of a topic's partitions, 0: it is not partitioned, or the exception where the
            look-up fails. Called where the settings have another destination than the offset, or the offset does not
            know the number.

    Attributes:
        skipped: recipients of `Attempt.skipped` for which the release has messages.
        failed: recipients whose destination can't be looked up.
    """

    def __init__(
        self,
        settings: Settings,
        sending: Mapping[str, Any],
        attempt: Attempt,
        partitions_now: Callable[[str], int | PulsarError],
    ) -> None:
        self._routes = _routes(settings, sending.get("routes", {}))
        self._partitions: Mapping[str, int] = sending.get("partitions", {})
        self._looked_up: dict[str, int] = {}  # partitions now; no message of a recorded number goes by it
        self._most_retries: Mapping[str, Mapping[str, int]] = sending.get("attempts", {})
        self._attempt = attempt
        self._partitions_now = partitions_now
        self._dropped: Counter[tuple[str, str]] = Counter()
        self.skipped: set[Recipient] = set()
        self.failed: dict[Recipient, FailedProducer] = {}

    def of_messages(
        self, topic: str, subscription_mask: int, is_rejected: bool, attempt: int | None, n: int = 1
    ) -> Iterator[Destination]:
        """Yields the destinations of like messages that are not left out of this attempt, or empty ones.

        Args:
            topic: the source topic.
            subscription_mask: the subscriptions of the messages, as bits.
            is_rejected: whether they go to the rejects topic alone.
            attempt: the number of the retry; None: the messages are no retries.
            n: the number of messages.
        """
        if is_rejected:
            routes = [_Route(None, rejects_topic(topic))]
        else:
            routes = [route for i, route in enumerate(self._routes.get(topic, ())) if subscription_mask >> i & 1]
        for route in routes:
            if (found := self._of_route(topic, route, attempt, n)) is not None:
                yield found

    def by_name(self, by_number: Mapping[tuple[str, int], _Value]) -> dict[tuple[str, str | None], _Value]:
        """Returns values by source topic and subscription's name; values of unknown subscriptions are left out.

        Args:
            by_number: the values by source topic and subscription's number.
        """
        return {
            (topic, self._routes[topic][number].subscription): value
            for (topic, number), value in by_number.items()
            if number < len(self._routes.get(topic, ()))
        }

    def log_dropped(self) -> None:
        """Logs for each subscription how many messages have no destination."""
        for (topic, name), n in self._dropped.items():
            _log.warning(
                "%s: %d messages handed out to %s are not sent: the settings no longer have it", topic, n, name
            )

    def _of_route(self, topic: str, route: _Route, attempt: int | None, n: int) -> Destination | None:
        subscription, destination, is_new = route
        is_dead = False
        if attempt is not None and subscription is not None:
            is_dead = attempt > self._most_retries.get(topic, {}).get(subscription, DEFAULT_BACKOFF.attempts)
        recipient = target_of(topic, subscription, is_dead)
        if recipient in self._attempt.skipped:
            self.skipped.add(recipient)
            return None
        if self._attempt.only is not None and recipient not in self._attempt.only:
            return None
        if destination is None:
            self._dropped[topic, str(subscription)] += n
            return Destination(subscription, "", recipient, is_dead, 0)
        destination = dead_letter_topic(destination) if is_dead else destination
        partitions = self._partitions.get(destination, UNKNOWN if is_new or is_dead else 0)
        if partitions == UNKNOWN and destination in self._looked_up:
            partitions = self._looked_up[destination]
        elif partitions == UNKNOWN:
            now = self._partitions_now(destination)
            if isinstance(now, PulsarError):
                self.failed[recipient] = _not_found(destination, recipient, now, self._attempt.is_first)
                return None
            partitions = self._looked_up[destination] = now
        return Destination(subscription, destination, recipient, is_dead, partitions)


def target_of(topic: str, subscription: str | None, is_dead: bool) -> Recipient:
    """Returns the recipient of a source topic's message.

    Args:
        topic: the source topic.
        subscription: None: the message goes to the rejects topic.
        is_dead: whether it goes to the subscription's dead letters, which are a recipient of their own.
    """
    return topic, dead_letters_of(subscription) if subscription and is_dead else subscription or ""


def _routes(settings: Settings, recorded: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[_Route]]:
    """Returns the destinations of each source topic's subscriptions, in the order of the subscriptions' numbers.

    The settings say the destination now; that of a route that they no longer have is the recorded one.

    Args:
        settings: the settings now.
        recorded: by source topic [subscription's name, destination] when the messages were dispatched.
    """
    by_number: dict[str, list[_Route]] = {
        topic: [_Route(name, destination) for name, destination in subscriptions]
        for topic, subscriptions in recorded.items()
    }
    for route in settings.routes:
        now = {s.name: s.destination for s in route.subscriptions}
        if route.source in by_number:
            by_number[route.source] = [
                _Route(name, now.get(name), now.get(name) != before)
                for name, before, _ in by_number[route.source]
                if name is not None
            ]
        else:
            by_number[route.source] = [_Route(name, destination) for name, destination in now.items()]
    return by_number


def _not_found(destination: str, recipient: Recipient, error: PulsarError, is_untouched: bool) -> FailedProducer:
    reason, is_refused = reason_of(error), is_refusal(error)
    return FailedProducer(destination, "", recipient, reason, is_refused, None, is_untouched=is_untouched)
