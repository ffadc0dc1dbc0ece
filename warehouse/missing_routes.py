"""Topics that have pending messages and no route any more: known by the job's status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from conf.settings import Route, Settings
from status.job_status import read_status
from status.troubles import NO_ROUTE, Troubles
from tracker.commands.decode import resolve_topic
from warehouse.known_routes import KnownRoute, KnownRoutes, as_routes

if TYPE_CHECKING:
    from types import TracebackType

_CHECK_SECONDS = 30
_REST = 20  # times as long as a count takes nothing is counted after it


def missing_routes(settings: Settings) -> list[Route]:
    """The routes that the job had once and that the settings do not have, with the subscriptions that they had last."""
    status = read_status(settings.warehouse)
    known = KnownRoutes.from_json(status.routes if status is not None else {})
    return [route for route in as_routes(known.routes) if settings.route(route.source) is None]


def with_missing_routes(settings: Settings) -> Settings:
    """The settings, and the missing routes as if they were in them."""
    return settings.model_copy(update={"routes": (*settings.routes, *missing_routes(settings))})


def settings_with(settings: Settings, topic: str) -> tuple[Settings, bool]:
    """Settings that have a route for a topic if there has been one, and whether it is missing from the given ones."""
    if resolve_topic(topic, {route.source for route in settings.routes})[0] is None:
        known = with_missing_routes(settings)
        if resolve_topic(topic, {route.source for route in known.routes})[0] is not None:
            return known, True
    return settings, False


class MissingRoutesWatch:
    """Counts the pending messages of topics without a route every half a minute or so. A context manager.

    Args:
        routes: the missing ones, by topic.
        count: gives how many messages of a topic wait.
    """

    def __init__(self, routes: Mapping[str, KnownRoute], count: Callable[[str], int], troubles: Troubles) -> None:
        self._topics = list(routes)
        self._count = count
        self._troubles = troubles
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="missing routes", daemon=True)

    def __enter__(self) -> MissingRoutesWatch:
        if self._topics:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def check(self) -> None:
        """Counts them now, and begins or ends the topics' troubles."""
        for topic in self._topics:
            try:
                n = self._count(topic)
            except Exception as error:
                self._troubles.begin(NO_ROUTE, topic, f"without a route; what waits can't be counted: {error}")
                continue
            if n:
                self._troubles.begin(
                    NO_ROUTE,
                    topic,
                    f"without a route, and {n:,} messages wait: put the route back, or end it with "
                    "`delaylake topics purge`",
                )
            else:
                self._troubles.end(NO_ROUTE, topic)

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.monotonic()
            self.check()
            self._stopped.wait(max(_CHECK_SECONDS, _REST * (time.monotonic() - started)))
