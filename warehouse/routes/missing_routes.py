"""Missing routes: topics that have no route any more and may have pending messages. The job's status lists them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from conf.settings import Route, Settings
from status.alerts import NO_ROUTE, Alerts
from status.job_status import known_status
from tracker.commands.decode import resolve_topic
from warehouse.routes.known_routes import KnownRoute, KnownRoutes, as_routes

if TYPE_CHECKING:
    from types import TracebackType

_CHECK_SECONDS = 30
_REST = 20  # the pause after a count, as a multiple of the count's time, at least


def missing_routes(settings: Settings) -> list[Route]:
    """Returns the routes that the job had once and the settings do not have, with their last subscriptions."""
    status = known_status(settings.warehouse)
    known = KnownRoutes.from_json(status.routes if status is not None else {})
    return [route for route in as_routes(known.routes) if settings.route(route.source) is None]


def with_missing_routes(settings: Settings) -> Settings:
    """Returns a copy of the settings that has the missing routes, too."""
    return settings.model_copy(update={"routes": (*settings.routes, *missing_routes(settings))})


def settings_with(settings: Settings, topic: str) -> tuple[Settings, bool]:
    """Returns settings that have a route for a topic, if there is or was one.

    Args:
        topic: a source topic or a partition of it, complete or not.

    Returns:
        the given settings, with missing routes if only these have the topic; and whether missing routes were added.
    """
    if resolve_topic(topic, {route.source for route in settings.routes})[0] is None:
        known = with_missing_routes(settings)
        if resolve_topic(topic, {route.source for route in known.routes})[0] is not None:
            return known, True
    return settings, False


class MissingRoutesWatch:
    """Counts the pending messages of topics without a route every 30 s or so, in a thread. A context manager.

    A topic has the alert NO_ROUTE as long as it has pending messages.

    Args:
        routes: the missing routes, by source topic.
        count: returns the number of pending messages of a source topic.
    """

    def __init__(self, routes: Mapping[str, KnownRoute], count: Callable[[str], int], alerts: Alerts) -> None:
        self._topics = list(routes)
        self._count = count
        self._alerts = alerts
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
        """Counts each topic's pending messages now, and begins or ends its alert; a failed count begins it."""
        for topic in self._topics:
            try:
                n = self._count(topic)
            except Exception as error:
                self._alerts.begin(NO_ROUTE, topic, f"without a route; what waits can't be counted: {error}")
                continue
            if n:
                self._alerts.begin(
                    NO_ROUTE,
                    topic,
                    f"without a route, and {n:,} messages wait: put the route back, or end it with "
                    "`delaylake topics purge`",
                )
            else:
                self._alerts.end(NO_ROUTE, topic)

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.monotonic()
            self.check()
            self._stopped.wait(max(_CHECK_SECONDS, _REST * (time.monotonic() - started)))
