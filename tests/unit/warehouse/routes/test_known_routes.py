"""Subscriptions keep their numbers whatever becomes of the settings, and what has changed is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from tests.support.tracker.messages import TOPIC
from tracker.schemas import SubscriptionRule
from warehouse.routes.known_routes import KnownRoutes, RoutesError, as_routes, changes, known_routes

OTHER = "persistent://public/default/other"


def settings(*names: str, **others: list[str]) -> Settings:
    """Settings with a route for each topic; a subscription `a!` is exclusive, `a>t` goes to t."""
    routes = {TOPIC: list(names), **others}
    return Settings(
        routes=[  # type: ignore[arg-type]
            {"source": t, "subscriptions": [_subscription(n) for n in names]} for t, names in routes.items() if names
        ]
    )


def _subscription(text: str) -> dict[str, Any]:
    name, _, destination = text.partition(">")
    given = {"name": name.rstrip("!"), "type": "Exclusive" if name.endswith("!") else "Shared"}
    return given | ({"destination": f"persistent://public/default/{destination}"} if destination else {})


def numbers(routes: KnownRoutes, topic: str = TOPIC) -> dict[str, int]:
    return {s.name: i for i, s in enumerate(routes.routes[topic].subscriptions)}


def wanted(routes: KnownRoutes, topic: str = TOPIC) -> set[str]:
    subscriptions = routes.subscriptions
    return {n for i, n in enumerate(subscriptions.names[topic]) if subscriptions.active(topic) >> i & 1}


def test_a_subscription_keeps_its_number_wherever_the_settings_have_it() -> None:
    first = known_routes(settings("a", "b"))
    assert numbers(first) == {"a": 0, "b": 1}
    assert numbers(first.updated_to(settings("b", "a"))) == {"a": 0, "b": 1}
    assert numbers(first.updated_to(settings("a", "new", "b"))) == {"a": 0, "b": 1, "new": 2}


def test_one_that_is_taken_out_gets_nothing_and_has_its_number_again_when_it_is_back() -> None:
    routes = known_routes(settings("a", "b")).updated_to(settings("b"))
    assert wanted(routes) == {"b"}
    assert [(r.name, r.is_removed) for r in routes.command_routes[TOPIC]] == [("a", True), ("b", False)]
    routes = routes.updated_to(settings("c", "b")).updated_to(settings("c", "b", "a"))
    assert numbers(routes) == {"a": 0, "b": 1, "c": 2}
    assert wanted(routes) == {"a", "b", "c"}


def test_a_route_that_is_missing_keeps_its_subscriptions_and_is_named() -> None:
    first = known_routes(settings("a", "b!>x", **{OTHER: ["c"]}))
    gone = first.updated_to(settings(**{OTHER: ["c"]}))
    assert list(gone.missing) == [TOPIC]
    assert gone.subscriptions.without_route == {TOPIC}
    assert wanted(gone) == {"a", "b"}
    [route] = as_routes(gone.missing)
    assert route == settings("a", "b!>x").routes[0]
    back = gone.updated_to(settings("b", "a", **{OTHER: ["c"]}))
    assert not back.missing
    assert numbers(back) == {"a": 0, "b": 1}
    assert sorted(back.reinstated_since(gone)) == [(TOPIC, "a"), (TOPIC, "b")]
    assert back.reinstated_since(back) == []


def test_the_type_is_the_one_of_the_settings_when_the_batch_was_made() -> None:
    routes = known_routes(settings("a!")).updated_to(settings("a"))
    assert routes.command_routes[TOPIC] == [SubscriptionRule("a", False)]
    assert routes.subscriptions.cumulative == {}
    assert routes.updated_to(settings("b", "a!")).subscriptions.cumulative == {TOPIC: 0b01}


def test_a_topic_that_has_had_too_many_subscriptions_is_refused() -> None:
    routes = known_routes(settings(*(f"s{i}" for i in range(40))))
    with pytest.raises(RoutesError, match="rebuild --discard-checkpoint"):
        routes.updated_to(settings(*(f"t{i}" for i in range(24))))
    assert len(routes.updated_to(settings(*(f"t{i}" for i in range(23)))).routes[TOPIC].subscriptions) == 63


def test_what_has_changed_is_a_line_each() -> None:
    before = known_routes(settings("a", "b", "c", **{OTHER: ["x"]}))
    after = before.updated_to(settings("c!", "a>elsewhere", "d"))
    assert changes(before, after) == [
        f"{OTHER}: the route was taken out: it is not read, and what waits is held back",
        f"{TOPIC}: subscription a goes to persistent://public/default/elsewhere, not {TOPIC}-a",
        f"{TOPIC}: subscription b was taken out: it gets nothing more",
        f"{TOPIC}: subscription c has the type Exclusive, not Shared",
        f"{TOPIC}: subscription d was added",
    ]
    again = after.updated_to(settings("b", **{OTHER: ["x"]}))
    lines = changes(after, again)
    assert f"{OTHER}: the route is back" in lines
    assert f"{TOPIC}: subscription b is back" in lines
    assert changes(again, again) == []


NAMES = ["a", "b", "c", "d"]


@pytest.mark.slow
@effort(deadline=None)
@given(st.lists(st.lists(st.sampled_from(NAMES), unique=True, max_size=4), max_size=8))
def test_a_number_means_one_name_forever(history: list[list[str]]) -> None:
    routes = KnownRoutes({})
    seen: dict[str, int] = {}
    for names in history:
        routes = KnownRoutes.from_json(routes.updated_to(settings(*names)).to_json())
        if TOPIC in routes.routes:
            assert seen.items() <= numbers(routes).items()
            seen = numbers(routes)
        if names:
            assert wanted(routes) == set(names)


def test_an_offset_keeps_the_routes_and_how_releases_are_sent() -> None:
    offset = Offset(routes=known_routes(settings("a", "b>x")).to_json())
    again = Offset.from_json(offset.to_json())
    assert again == offset
    assert again.known_routes is not None
    assert again.known_routes.destinations == {TOPIC: [["a", f"{TOPIC}-a"], ["b", "persistent://public/default/x"]]}
    assert '"routes": {"persistent' in again.to_tick().sending


def test_routes_that_are_read_again_are_not_made_again_until_they_change() -> None:
    first, other = known_routes(settings("a>x")).to_json(), known_routes(settings("a>y")).to_json()
    read = KnownRoutes.from_json(first)
    again = KnownRoutes.from_json(json.loads(json.dumps(first)))
    assert again is read
    assert again.destinations is read.destinations
    assert KnownRoutes.from_json(other).to_json() == other
    assert KnownRoutes.from_json(first).to_json() == first
