"""The settings' routes, in the terms of the tracker."""

from __future__ import annotations

from conf.settings import Settings
from tracker.commands import Routes, SubscriptionRule


def command_routes(settings: Settings) -> Routes:
    """For each source topic its subscriptions, as far as commands are concerned."""
    return {
        route.source: [SubscriptionRule(s.name, s.type.is_cumulative) for s in route.subscriptions]
        for route in settings.routes
    }


def subscription_names(settings: Settings) -> dict[str, list[str]]:
    """For each source topic the names of its subscriptions, in the order of their bits."""
    return {route.source: [s.name for s in route.subscriptions] for route in settings.routes}
