"""Windows: when they are open, by the calendar of their time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.shaping import DAYS, Window
from tracker.shaping.token_bucket import OpenTime, OpenWindow, ShapingRule, rule_of

EVERY_DAY = tuple(range(7))
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Pacific/Auckland", "Asia/Kolkata"]

windows = st.builds(
    lambda days, start, length, zone: OpenWindow(tuple(sorted(days)), start, start + length, zone),
    st.sets(st.integers(0, 6), min_size=1),
    st.integers(0, 1_439),
    st.integers(1, 1_440),
    st.sampled_from(ZONES),
)


def millis(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def is_open(window: OpenWindow, time: int) -> bool:
    """Whether a window is open, by the clock on the wall: not within an hour of one that is set forward or back."""
    local = datetime.fromtimestamp(time / 1000, ZoneInfo(window.time_zone)).replace(tzinfo=None)
    for back in (0, 1):
        day = (local - timedelta(days=back)).date()
        minute = (local - datetime(day.year, day.month, day.day)).total_seconds() / 60
        if day.weekday() in window.days and window.start <= minute < window.end:
            return True
    return False


@given(st.lists(windows, min_size=1, max_size=3), st.integers(0, 365 * 24 * 60))
def test_it_is_open_when_the_clock_on_the_wall_says_so(chosen: list[OpenWindow], minute: int) -> None:
    time = millis("2026-01-01T00:00") + minute * 60_000 + 1
    for zone in ZONES:  # not on a day on which clocks change, nor the one after
        offsets = {datetime.fromtimestamp(time / 1000 + days * 86_400, ZoneInfo(zone)).utcoffset() for days in (-2, 2)}
        if len(offsets) > 1:
            return
    opened = OpenTime(chosen, time)
    assert opened.is_open(np.array([float(time)]))[0] == any(is_open(window, time) for window in chosen)


@given(st.lists(windows, max_size=3), st.lists(st.integers(0, 40 * 24 * 3600), min_size=1, max_size=20).map(sorted))
def test_open_time_and_real_time_are_made_of_each_other(chosen: list[OpenWindow], seconds: list[int]) -> None:
    times = np.array(seconds) * 1000.0 + millis("2026-03-01T00:00")
    opened = OpenTime(chosen, times[0])
    opens = opened.to_open(times)
    assert (np.diff(opens) >= 0).all()
    assert (np.diff(opens) <= np.diff(times)).all()
    back = opened.to_real(opens)
    assert opened.is_open(back).all()
    was_open = opened.is_open(times)
    assert np.allclose(back[was_open], times[was_open])
    assert (back >= times - 1e-3).all()
    # However far back the counting begins, as much time is open between two times.
    assert np.allclose(np.diff(OpenTime(chosen, times[0] - 30 * 86_400_000).to_open(times)), np.diff(opens))


@pytest.mark.parametrize(("day", "hours"), [("2026-03-28", 7), ("2026-03-29", 7), ("2026-10-24", 9), ("2026-06-01", 8)])
def test_a_night_is_an_hour_shorter_or_longer_when_clocks_change(day: str, hours: int) -> None:
    night = OpenTime([OpenWindow(EVERY_DAY, 22 * 60, 30 * 60, "Europe/Berlin")], millis(day))
    evening = millis(f"{day}T22:00", "Europe/Berlin")
    opens = night.to_open(np.array([evening, evening + 12 * 3_600_000], float))
    if day != "2026-03-29":  # the night before was short, this one is not
        assert opens[1] - opens[0] == hours * 3_600_000
    morning = datetime.fromisoformat(day) + timedelta(days=1, hours=6)
    end = millis(morning.isoformat(), "Europe/Berlin")
    assert night.is_open(np.array([end - 1.0, float(end)])).tolist() == [True, False]


@pytest.mark.parametrize("day", ["2026-06-01", "9990-06-01", "9999-12-31"])
def test_after_a_hundred_years_and_after_the_last_one_it_is_open(day: str) -> None:
    opened = OpenTime([OpenWindow((0,), 600, 660, "Pacific/Auckland")], millis(day))
    hours = np.array([1.0, 20_000.0, 1e8]) * 3_600_000
    places = opened.to_real(hours)
    assert (np.diff(places) > 0).all()
    assert np.allclose(opened.to_open(places), hours)
    assert places[2] - places[1] < 100 * 366 * 86_400_000.0 + hours[2]


def test_a_window_that_no_day_has_is_open_after_all_of_them() -> None:
    opened = OpenTime([OpenWindow((), 600, 660, "UTC")], millis("2026-06-01"))
    assert opened.to_real(np.array([0.0]))[0] > millis("2126-01-01T00:00")


def test_windows_that_overlap_are_one() -> None:
    opened = OpenTime([OpenWindow((0,), 600, 720, "UTC"), OpenWindow((0,), 660, 780, "UTC")], millis("2026-06-01"))
    monday = np.array([millis("2026-06-01T10:00"), millis("2026-06-01T14:00")], float)
    assert np.diff(opened.to_open(monday))[0] == 3 * 3_600_000


def test_a_rule_is_read_as_it_was_written() -> None:
    window = Window.model_validate({"days": ["sun", "Mon"], "from": "22:00", "to": "06:00", "time_zone": "Asia/Tokyo"})
    text = rule_of(None, [window])
    assert text is not None
    assert ShapingRule.from_json(text) == ShapingRule(
        None, 1, False, (OpenWindow((0, 6), 22 * 60, 30 * 60, "Asia/Tokyo"),)
    )
    assert rule_of(None, []) is None
    assert Window().days == DAYS
    assert datetime.fromtimestamp(0, UTC).weekday() == 3
