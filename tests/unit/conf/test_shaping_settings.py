"""The settings of shaped release: what is allowed, what is not, and how the line names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.settings import Settings, SettingsError, load_settings
from warehouse.routes.known_routes import KnownRoutes, changes, known_routes

SOURCE = "persistent://public/default/orders"


def settings_with(tmp_path: Path, **subscription: Any) -> Settings:
    file = tmp_path / "delaylake.yaml"
    file.write_text(yaml.safe_dump({"routes": [{"source": SOURCE, "subscriptions": [{"name": "s", **subscription}]}]}))
    return load_settings(file)


def test_a_rate_has_a_burst_of_a_second_and_is_for_the_subscription(tmp_path: Path) -> None:
    rate = settings_with(tmp_path, rate={"messages_per_second": 2.5}).routes[0].subscriptions[0].rate
    assert rate is not None
    assert (rate.most_at_once, rate.per) == (3, "subscription")


def test_a_time_of_day_without_quotes_is_read_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "delaylake.yaml"
    windows = "[{from: 22:30, to: 06:00}]"
    file.write_text(f"routes: [{{source: {SOURCE}, subscriptions: [{{name: s, windows: {windows}}}]}}]")
    settings = load_settings(file)
    window = settings.routes[0].subscriptions[0].windows[0]
    assert (window.start, window.end) == ("22:30", "06:00")
    assert Settings.model_validate_json(settings.model_dump_json()).routes == settings.routes


@pytest.mark.parametrize(("read", "time"), [(0, "00:00"), (60, "01:00"), (1_440, "24:00")])
def test_a_number_of_base_60_is_a_time_of_day(tmp_path: Path, read: int, time: str) -> None:
    name = "from" if read < 1_440 else "to"
    window = settings_with(tmp_path, windows=[{name: read}]).routes[0].subscriptions[0].windows[0]
    assert time in (window.start, window.end)


@pytest.mark.parametrize(
    ("subscription", "said"),
    [
        ({"rate": {}}, "rate.messages_per_second: field required"),
        (
            {"rate": {"messages_per_second": 0}},
            "rate.messages_per_second = 0: input should be greater than or equal to 0.00001",
        ),
        ({"rate": {"messages_per_second": 1e-6}}, "rate.messages_per_second = 1e-06: input"),
        ({"rate": {"messages_per_second": float("nan")}}, "rate.messages_per_second"),
        ({"rate": {"messages_per_second": 1, "burst": 0}}, "rate.burst = 0"),
        ({"rate": {"messages_per_second": 1, "per": "topic"}}, "rate.per = 'topic'"),
        ({"rate": {"messages_per_second": 1, "per_key": True}}, "rate.per_key = True: no such setting"),
        ({"windows": [{"days": ["Caturday"]}]}, "windows.0.days.0 = 'Caturday': must be a day of the week"),
        ({"windows": [{"days": []}]}, "windows.0.days"),
        ({"windows": [{"from": "25:00"}]}, "windows.0.from = '25:00': must be a time of day"),
        ({"windows": [{"to": "24:30"}]}, "windows.0.to = '24:30': must be a time of day"),
        ({"windows": [{"from": 8, "to": 20}]}, "windows.0.from = 8: must be a time of day"),
        ({"windows": [{"to": 59}]}, "windows.0.to = 59: must be a time of day"),
        ({"windows": [{"to": 1_441}]}, "windows.0.to = 1441: must be a time of day"),
        ({"windows": [{"to": True}]}, "windows.0.to = True: must be a time of day"),
        ({"windows": [{"from": "08:00", "to": "08:00"}]}, "windows.0: from and to must differ"),
        (
            {"windows": [{"time_zone": "Mars/Base"}]},
            "windows.0.time_zone = 'Mars/Base': must be the name",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, subscription: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings_with(tmp_path, **subscription)
    assert f"subscriptions.0.{said}" in str(error.value)


def test_an_offset_records_a_rule_and_is_as_before_where_there_is_none(tmp_path: Path) -> None:
    plain = known_routes(settings_with(tmp_path))
    assert plain.to_json()[SOURCE]["subscriptions"] == [["s", "Shared", f"{SOURCE}-s", False]]
    assert plain.shaping == plain.subscriptions.shaping == {}
    shaped = known_routes(settings_with(tmp_path, rate={"messages_per_second": 5}))
    assert KnownRoutes.from_json(shaped.to_json()).shaping == shaped.shaping
    assert list(shaped.subscriptions.shaping[SOURCE]) == [0]
    assert changes(plain, shaped) == [f"{SOURCE}: subscription s has another rate, or other windows"]
