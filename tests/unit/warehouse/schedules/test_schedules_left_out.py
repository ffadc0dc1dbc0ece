"""A subscription that is added later does not get the schedules that have begun: the start says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.warehouse.schedule_tables import DAY, NINE, TOPIC, ScheduleTables
from warehouse.routes.known_routes import KnownRoutes, known_routes
from warehouse.schedules.schedules import schedules_left_out

pytestmark = pytest.mark.slow


def said(tables: ScheduleTables, *names: str) -> list[str]:
    """What is said when the settings have these subscriptions; they had a and b."""
    before = known_routes(tables.settings)
    route = {"source": TOPIC, "subscriptions": [{"name": name} for name in names]}
    settings = type(tables.settings).model_validate(tables.settings.model_dump() | {"routes": [route]})
    return schedules_left_out(settings, before, before.updated_to(settings))


def test_schedules_that_have_begun_are_counted_for_new_subscriptions(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    assert said(tables, "a", "b", "c") == []
    for entry in range(4):
        tables.came(entry)  # the first one's first occurrence is still to come
    tables.delivered("a", 1, 1, NINE)
    tables.delivered("b", 2, 1, NINE)
    tables.waits("b", 2, 2, NINE + DAY, sequence=1)
    tables.came(4, repeatTimes="1")
    for name in ("a", "b"):
        tables.delivered(name, 4, 1, NINE)  # it is over
    line = f"{TOPIC}: c gets nothing of 2 schedules that have begun, unless ended and sent anew"
    assert said(tables, "a", "b", "c") == [line]
    assert said(tables, "c", "d") == [line.replace("c gets", "c and d get")]
    assert said(tables, "a") == []


def test_without_tables_or_other_subscriptions_there_is_nothing_to_say(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    assert schedules_left_out(tables.settings, KnownRoutes({}), known_routes(tables.settings)) == []
    elsewhere = tables.settings.model_copy(update={"warehouse": f"file:{tmp_path}/none"})
    before = KnownRoutes({}).updated_to(elsewhere)
    route = elsewhere.routes[0]
    later = route.model_copy(
        update={"subscriptions": (*route.subscriptions, route.subscriptions[0].model_copy(update={"name": "c"}))}
    )
    settings = elsewhere.model_copy(update={"routes": (later,)})
    assert schedules_left_out(settings, before, before.updated_to(settings)) == []
