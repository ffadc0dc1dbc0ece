"""Finds schedules that a new subscription does not get, because they had begun when it was added."""

from __future__ import annotations

from conf.settings import Settings
from warehouse.queries.listing import NoTablesError
from warehouse.routes.known_routes import KnownRoutes, as_routes
from warehouse.schedules.schedules import MAX_LIMIT, Schedules


def schedules_left_out(settings: Settings, before: KnownRoutes, after: KnownRoutes) -> list[str]:
    """Returns a line of text for each topic with new subscriptions and schedules that go on without them.

    Args:
        after: the same, updated to the settings.
    """
    lines = []
    for topic, old in before.routes.items():
        known = {s.name for s in old.subscriptions}
        added = [s.name for s in after.routes[topic].left if s.name not in known]
        if added and old.left:
            count = _begun(settings.model_copy(update={"routes": tuple(as_routes({topic: old}))}), topic)
            if count is not None:
                names = " and ".join(added)
                get = "gets" if len(added) == 1 else "get"
                lines.append(f"{topic}: {names} {get} nothing of {count} begun, unless ended and sent anew")
    return lines


def _begun(settings: Settings, topic: str) -> str | None:
    """Returns a text with the number of active schedules that have begun; None: none of the first MAX_LIMIT."""
    try:
        page = Schedules(settings, topic).page(MAX_LIMIT)
    except NoTablesError:
        return None
    n = sum(
        any(one.last is not None or (one.next is not None and one.next.number > 1) for one in schedule.progress)
        for schedule in page.schedules
    )
    if not n:
        return None
    return f"{'at least ' if page.cursor else ''}{n:,} {'schedules that have' if n > 1 else 'schedule that has'}"
