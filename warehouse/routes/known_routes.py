"""The routes that a checkpoint knows: a subscription keeps its number also when it is taken out of the settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from conf.errors import DelayLakeError
from conf.settings import BackoffSettings, Route, Settings, Subscription, SubscriptionType
from status.dead_letters import destinations_of
from tracker.schemas import Routes, SubscriptionRule
from tracker.shaping.token_bucket import rule_of
from tracker.subscriptions import DEFAULT_BACKOFF, MAX_SUBSCRIPTIONS, Backoff, Subscriptions

if TYPE_CHECKING:
    from status.job_status import JobStatus


class RoutesError(DelayLakeError):
    """The settings' routes don't fit the checkpoint."""


_CUMULATIVE = frozenset(kind for kind in SubscriptionType if kind.is_cumulative)


@dataclass(frozen=True)
class KnownSubscription:
    """A subscription that is in the settings, or was (`is_removed`)."""

    name: str
    type: str
    destination: str
    is_removed: bool = False
    backoff: Backoff | None = field(default=None, kw_only=True)  # None: the default
    shaping: str | None = None  # the rule by which its messages are shaped, from `rule_of`; None: they are not shaped
    is_in_order: bool = field(default=False, kw_only=True)  # whether it gets the messages of a key in order
    expire_after: int | None = field(default=None, kw_only=True)  # ms; None: only messages themselves have an end

    def to_json(self) -> list[Any]:
        """The subscription as an offset has it."""
        always = [self.name, self.type, self.destination, self.is_removed]
        return always if self.shaping is None else [*always, self.shaping]


@dataclass(frozen=True)
class KnownRoute:
    """A source topic's subscriptions, by number. A missing route (`is_missing`) has those that it had last."""

    subscriptions: tuple[KnownSubscription, ...]
    is_missing: bool = False

    @property
    def left(self) -> list[KnownSubscription]:
        """The subscriptions that are not removed."""
        return [s for s in self.subscriptions if not s.is_removed]


class KnownRoutes:
    """All routes that a checkpoint has had, by source topic. Nobody changes them, or what the properties return."""

    def __init__(self, routes: Mapping[str, KnownRoute]) -> None:
        self.routes = dict(sorted(routes.items()))

    @staticmethod
    def from_json(recorded: Mapping[str, Any]) -> KnownRoutes:
        """Reads the routes that `to_json` wrote. The last ones are kept: each batch's offset has the same."""
        global _last_read
        last, routes = _last_read
        if last != recorded:
            routes = KnownRoutes._read(recorded)
            _last_read = recorded, routes
        return routes

    @staticmethod
    def _read(recorded: Mapping[str, Any]) -> KnownRoutes:
        return KnownRoutes(
            {
                topic: KnownRoute(
                    tuple(
                        KnownSubscription(
                            *s,
                            backoff=_backoff(route.get("backoffs", {}).get(s[0])),
                            is_in_order=s[0] in route.get("in_order", ()),
                            expire_after=route.get("expire_after", {}).get(s[0]),
                        )
                        for s in route["subscriptions"]
                    ),
                    route["is_missing"],
                )
                for topic, route in recorded.items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The routes as JSON, as an offset has them."""
        return {
            topic: {
                "is_missing": route.is_missing,
                "subscriptions": [s.to_json() for s in route.subscriptions],
            }
            | _if_any("backoffs", {s.name: list(s.backoff) for s in route.subscriptions if s.backoff is not None})
            | _if_any("in_order", [s.name for s in route.subscriptions if s.is_in_order])
            | _if_any("expire_after", {s.name: s.expire_after for s in route.subscriptions if s.expire_after})
            for topic, route in self.routes.items()
        }

    def updated_to(self, settings: Settings) -> KnownRoutes:
        """Returns these routes, updated to the settings.

        A new subscription gets the next number, one that is back its old number. Known routes that are not in the
        settings are missing, known subscriptions that are not there are removed.

        Raises:
            RoutesError: a topic has had too many subscriptions.
        """
        routes = {topic: replace(route, is_missing=True) for topic, route in self.routes.items()}
        for route in settings.routes:
            now = {s.name: _known(s) for s in route.subscriptions}
            before = self.routes[route.source].subscriptions if route.source in self.routes else ()
            known = [now.pop(s.name, replace(s, is_removed=True)) for s in before]
            if len(known) + len(now) > MAX_SUBSCRIPTIONS:
                raise RoutesError(
                    f"{route.source} has had {len(known) + len(now)} subscriptions on this checkpoint, with those that "
                    f"were taken out; {MAX_SUBSCRIPTIONS} can be: forget these with `delaylake rebuild "
                    "--discard-checkpoint`"
                )
            routes[route.source] = KnownRoute((*known, *now.values()))
        return KnownRoutes(routes)

    @cached_property
    def missing(self) -> dict[str, KnownRoute]:
        """The routes that the settings do not have, by source topic."""
        return {topic: route for topic, route in self.routes.items() if route.is_missing}

    @cached_property
    def subscriptions(self) -> Subscriptions:
        """The subscriptions of each source topic by number."""
        names = {topic: [s.name for s in route.subscriptions] for topic, route in self.routes.items()}
        removed = {
            topic: sum(1 << i for i, s in enumerate(route.subscriptions) if s.is_removed)
            for topic, route in self.routes.items()
        }
        in_order = {
            topic: sum(1 << i for i, s in enumerate(route.subscriptions) if s.is_in_order)
            for topic, route in self.routes.items()
        }
        cumulative = {
            topic: sum(1 << i for i, s in enumerate(route.subscriptions) if s.type in _CUMULATIVE)
            for topic, route in self.routes.items()
        }
        backoffs = {
            topic: {i: s.backoff for i, s in enumerate(route.subscriptions) if s.backoff is not None}
            for topic, route in self.routes.items()
        }
        expire_after = {
            topic: {i: s.expire_after for i, s in enumerate(route.subscriptions) if s.expire_after is not None}
            for topic, route in self.routes.items()
        }
        return Subscriptions(
            names,
            {t: bits for t, bits in removed.items() if bits},
            frozenset(self.missing),
            {topic: topic_rules for topic, topic_rules in backoffs.items() if topic_rules},
            self.shaping,
            {topic: bits for topic, bits in in_order.items() if bits},
            {topic: ends for topic, ends in expire_after.items() if ends},
            {topic: bits for topic, bits in cumulative.items() if bits},
        )

    @cached_property
    def shaping(self) -> dict[str, dict[int, str]]:
        """The rules of subscriptions whose messages are shaped, by source topic and number; topics without are absent.

        Removed subscriptions, and those of missing routes, are included: they get no messages.
        """
        rules = {
            topic: {i: s.shaping for i, s in enumerate(route.subscriptions) if s.shaping is not None}
            for topic, route in self.routes.items()
        }
        return {topic: topic_rules for topic, topic_rules in rules.items() if topic_rules}

    @cached_property
    def command_routes(self) -> Routes:
        """The rules by which commands apply to each source topic's subscriptions, by number.

        Single messages of a missing route can be skipped whatever the subscription's type, as nobody consumes there.
        """
        return {
            topic: [
                SubscriptionRule(s.name, SubscriptionType(s.type).is_cumulative and not route.is_missing, s.is_removed)
                for s in route.subscriptions
            ]
            for topic, route in self.routes.items()
        }

    @cached_property
    def destinations(self) -> dict[str, list[list[str]]]:
        """[name, destination] of each source topic's subscriptions, by number, with removed ones."""
        return {topic: [[s.name, s.destination] for s in route.subscriptions] for topic, route in self.routes.items()}

    @cached_property
    def attempts(self) -> dict[str, dict[str, int]]:
        """The number of retries that a message gets, if not the default, by source topic and subscription."""
        found = {
            topic: {
                s.name: s.backoff.attempts
                for s in route.subscriptions
                if s.backoff is not None and s.backoff.attempts != DEFAULT_BACKOFF.attempts
            }
            for topic, route in self.routes.items()
        }
        return {topic: topic_rules for topic, topic_rules in found.items() if topic_rules}

    @property
    def gone(self) -> frozenset[tuple[str, str]]:
        """The (topic, subscription) pairs to which no messages go out: removed, or of a missing route."""
        every = {(topic, s.name) for topic, route in self.routes.items() for s in route.subscriptions}
        return frozenset(every.difference(self._open()))

    def reinstated_since(self, before: KnownRoutes) -> list[tuple[str, str]]:
        """Returns the (topic, subscription) pairs to which messages go out, and did not in `before`."""
        earlier = set(before._open())
        return [pair for pair in self._open() if pair not in earlier]

    def _open(self) -> Iterator[tuple[str, str]]:
        for topic, route in self.routes.items():
            if not route.is_missing:
                yield from ((topic, s.name) for s in route.left)


_last_read: tuple[Mapping[str, Any], KnownRoutes] = {}, KnownRoutes({})  # what `from_json` has read last


def _known(subscription: Subscription) -> KnownSubscription:
    backoff = subscription.backoff
    known = None
    if backoff is not None:
        known = Backoff(backoff.first, backoff.factor, backoff.max, backoff.jitter, backoff.attempts)
    shaping = rule_of(subscription.rate, subscription.windows)
    name, kind, destination = subscription.name, subscription.type.value, subscription.destination
    is_in_order = subscription.order == "key"
    return KnownSubscription(
        name,
        kind,
        destination,
        shaping=shaping,
        backoff=known,
        is_in_order=is_in_order,
        expire_after=subscription.expire_after,
    )


def _backoff(recorded: Sequence[Any] | None) -> Backoff | None:
    return None if recorded is None else Backoff(*recorded)


def _if_any(name: str, values: Collection[Any]) -> dict[str, Any]:
    """Returns a field of JSON, or no field if it has no values, so that offsets stay as they were if it is not used."""
    return {name: values} if values else {}


def known_routes(settings: Settings) -> KnownRoutes:
    """Returns the settings' routes as a new checkpoint knows them."""
    return KnownRoutes({}).updated_to(settings)


def known_destinations(settings: Settings, status: JobStatus | None) -> dict[tuple[str, str], str]:
    """Returns by source topic and subscription the topic to which messages go, or went last.

    Args:
        settings: count where the job knows nothing of a topic.
        status: of the job; None: there was none yet.
    """
    return destinations_of(known_routes(settings).to_json() | (status.routes if status is not None else {}))


def subscription_names(settings: Settings) -> dict[str, list[str]]:
    """Returns the names of each source topic's subscriptions, in the order of the settings."""
    return {route.source: [s.name for s in route.subscriptions] for route in settings.routes}


def _settings(backoff: Backoff | None) -> BackoffSettings | None:
    if backoff is None:
        return None
    first, factor, longest, jitter, attempts = backoff
    return BackoffSettings(first=first, factor=factor, max=longest, jitter=jitter, attempts=attempts)


def as_routes(routes: Mapping[str, KnownRoute]) -> list[Route]:
    """Returns known routes, also missing ones, as routes of the settings, without removed subscriptions."""
    return [
        Route(
            source=topic,
            subscriptions=tuple(
                Subscription(
                    name=s.name, type=SubscriptionType(s.type), destination=s.destination, backoff=_settings(s.backoff)
                )
                for s in route.left
            ),
        )
        for topic, route in routes.items()
    ]


def changes(before: KnownRoutes, after: KnownRoutes) -> list[str]:
    """Returns a line of text for each difference between two states of the routes.

    Args:
        after: `before`, updated to the settings.
    """
    lines = []
    for topic, route in after.routes.items():
        old = before.routes.get(topic)
        if route.is_missing:
            if old is not None and not old.is_missing:
                lines.append(f"{topic}: the route was taken out: it is not read, and what waits is held back")
            continue
        if old is None or old.is_missing:
            lines.append(f"{topic}: the route {'was added' if old is None else 'is back'}")
        if old is not None:
            lines += [f"{topic}: subscription {line}" for line in _changed(old.subscriptions, route.subscriptions)]
    return lines


def _changed(before: Sequence[KnownSubscription], after: Sequence[KnownSubscription]) -> Iterator[str]:
    old = {s.name: s for s in before}
    for now in after:
        was = old.get(now.name)
        if was is None:
            yield f"{now.name} was added"
        elif now.is_removed != was.is_removed:
            yield f"{now.name} was taken out: it gets nothing more" if now.is_removed else f"{now.name} is back"
        elif not now.is_removed:
            if now.type != was.type:
                yield f"{now.name} has the type {now.type}, not {was.type}"
            if now.destination != was.destination:
                yield f"{now.name} goes to {now.destination}, not {was.destination}"
            if now.shaping != was.shaping:
                yield f"{now.name} has another rate, or other windows"
            if now.backoff != was.backoff:
                yield f"{now.name} has another backoff"
            if now.expire_after != was.expire_after:
                yield f"{now.name} has another expire_after, for what comes due from now on"
            if now.is_in_order != was.is_in_order:
                what = "in order" if now.is_in_order else "in no order any more"
                yield f"{now.name} gets the messages of a key {what}, from what is handed out next"
