"""The settings of retries: what is allowed, how the line names what is not, and what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conf.settings import SettingsError
from tests.unit.conf.test_shaping_settings import SOURCE, settings_with
from tracker.subscriptions import DEFAULT_BACKOFF, Backoff
from warehouse.routes.known_routes import KnownRoutes, changes, known_routes


def test_durations_are_read_and_what_is_not_said_is_as_by_default(tmp_path: Path) -> None:
    routes = known_routes(settings_with(tmp_path, backoff={"first": "90s", "max": "2h", "attempts": 0}))
    expected = Backoff(90_000, DEFAULT_BACKOFF.factor, 7_200_000, DEFAULT_BACKOFF.jitter, 0)
    assert KnownRoutes.from_json(routes.to_json()).subscriptions.backoff(SOURCE, 0) == expected
    assert KnownRoutes.from_json(routes.to_json()).attempts == {SOURCE: {"s": 0}}
    assert known_routes(settings_with(tmp_path)).subscriptions.backoff(SOURCE, 0) == DEFAULT_BACKOFF


def test_a_start_says_that_it_was_edited(tmp_path: Path) -> None:
    before = known_routes(settings_with(tmp_path))
    now = before.updated_to(settings_with(tmp_path, backoff={"attempts": 2}))
    assert changes(before, now) == [f"{SOURCE}: subscription s has another backoff"]
    assert changes(now, now) == []


@pytest.mark.parametrize(
    ("backoff", "said"),
    [
        ({"first": "soon"}, "backoff.first = 'soon': "),
        ({"first": 0}, "backoff.first = 0: "),
        ({"max": "400d"}, "backoff.max = '400d': "),
        ({"first": "2h"}, "backoff: first must not be above max"),
        ({"factor": 0.5}, "backoff.factor = 0.5: input should be greater than or equal to 1"),
        ({"factor": float("nan")}, "backoff.factor"),
        ({"jitter": 1.5}, "backoff.jitter = 1.5: input should be less than or equal to 1"),
        ({"attempts": -1}, "backoff.attempts = -1: input should be greater than or equal to 0"),
        ({"attempts": 2.5}, "backoff.attempts = 2.5: "),
        ({"retries": 3}, "backoff.retries = 3: no such setting"),
        ([1], "backoff"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, backoff: Any, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings_with(tmp_path, backoff=backoff)
    assert f"subscriptions.0.{said}" in str(error.value)
