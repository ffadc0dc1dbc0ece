"""The setting `order` of a subscription: what is allowed, what the checkpoint keeps of it, and what a start says."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.settings import SettingsError
from tests.unit.conf.test_shaping_settings import SOURCE, settings_with
from warehouse.routes.known_routes import KnownRoutes, changes, known_routes


@pytest.mark.parametrize("order", ["Key", "keys", True, None, ["key"]])
def test_what_is_wrong_is_named(tmp_path: Path, order: object) -> None:
    with pytest.raises(SettingsError, match=r"routes\.0\.subscriptions\.0\.order = .*'none' or 'key'"):
        settings_with(tmp_path, order=order)


def test_without_it_a_checkpoint_is_as_before_and_with_it_knows_who_has_it(tmp_path: Path) -> None:
    off, on = (known_routes(settings_with(tmp_path, **how)) for how in ({}, {"order": "key"}))
    assert off.to_json() == known_routes(settings_with(tmp_path, order="none")).to_json()
    assert "in_order" not in off.to_json()[SOURCE]
    assert KnownRoutes.from_json(on.to_json()).subscriptions.in_order == {SOURCE: 1}
    assert KnownRoutes.from_json(off.to_json()).subscriptions.in_order == {}


def test_a_start_says_that_it_was_switched(tmp_path: Path) -> None:
    off, on = settings_with(tmp_path), settings_with(tmp_path, order="key")
    routes = known_routes(off)
    assert changes(routes, routes.updated_to(on)) == [
        f"{SOURCE}: subscription s gets the messages of a key in order, from what is handed out next"
    ]
    routes = routes.updated_to(on)
    assert changes(routes, routes.updated_to(off)) == [
        f"{SOURCE}: subscription s gets the messages of a key in no order any more, from what is handed out next"
    ]
    assert changes(routes, routes.updated_to(on)) == []
