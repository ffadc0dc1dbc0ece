"""What is computed by time zones of another version than the program has."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from zoneinfo import ZoneInfo, reset_tzpath

import numpy as np
import pytest

from conf.time_zones import TimeZones, packaged, time_zone, using
from conf.times import parse_zone, time_text
from tests.support.tracker.recurring import recurring
from tests.support.tracker.time_zones import other_version
from tracker.recurrence.columns import Recurrences
from tracker.recurrence.recurrence import Recurrence
from tracker.shaping.token_bucket import OpenTime, OpenWindow

HOUR = 3_600_000
DAY = 24 * HOUR


def test_times_are_shown_by_the_zones_that_they_are_computed_with(tmp_path: Path) -> None:
    machines = tmp_path / "Africa" / "Casablanca"
    machines.parent.mkdir()
    machines.write_bytes(resources.files("tzdata").joinpath("zoneinfo/Asia/Kathmandu").read_bytes())
    ZoneInfo.clear_cache()
    reset_tzpath((str(tmp_path),))
    try:
        assert ZoneInfo("Africa/Casablanca").utcoffset(datetime(2026, 11, 27)) == timedelta(hours=5, minutes=45)
        found = Recurrence("0 9 * * *", "Africa/Casablanca").first(1_790_000_000_000, None)
        assert found is not None
        assert "T09:00:00" in time_text(found, parse_zone("Africa/Casablanca"))
    finally:
        reset_tzpath()
        ZoneInfo.clear_cache()


def test_packed_they_are_the_same() -> None:
    copy = TimeZones.unpack(packaged().pack())
    assert copy.pack() == packaged().pack()
    for name in ("UTC", "America/Argentina/Buenos_Aires", "Australia/Lord_Howe"):
        for month in range(1, 13):
            at = datetime(2027, month, 1, tzinfo=UTC)
            assert at.astimezone(copy.zone(name)).isoformat() == at.astimezone(packaged().zone(name)).isoformat()
    with pytest.raises(KeyError):
        copy.zone("Europe/Nowhere")


def test_rules_and_windows_go_by_those_that_are_used_and_then_by_the_program_s_again(tmp_path: Path) -> None:
    other = TimeZones.read(other_version(tmp_path, 5 * 3600))
    window = OpenWindow((0, 1, 2, 3, 4, 5, 6), 12 * 60, 13 * 60, "Europe/Berlin")

    def noon() -> list[int]:
        """When it is noon first in 1970, hours of UTC, by each of those that ask for a time zone."""
        rule = Recurrence("0 12 * * *", "Europe/Berlin")
        # Cron and RRULE: the latter's first occurrence is looked up for each message.
        rows = [recurring(0, 0, repeat, timeZone="Europe/Berlin") for repeat in ("0 12 * * *", "FREQ=DAILY;BYHOUR=12")]
        found = [Recurrences(of).following(np.array([1]), np.array([0]))[0] for of in rows]
        opens = OpenTime([window], 0.0).to_real(OpenTime([window], 0.0).to_open(np.array([0.0])))
        assert time_zone("UTC").key == "UTC"
        return [at // HOUR for at in (rule.following(0, 0), *map(int, found), int(opens[0])) if at is not None]

    assert noon() == [11] * 4
    with using(other):
        assert noon() == [7] * 4
        with using(None):
            assert noon() == [11] * 4
    assert noon() == [11] * 4


def test_where_no_file_can_be_opened_any_more_schedules_go_on_and_new_ones_are_taken_in() -> None:
    program = """
import resource
from tracker.recurrence.columns import accepted_first, stored

resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
try:
    open("/dev/null")
except OSError:
    rule = {"repeat": "0 9 * * *"}
    print(accepted_first({**rule, "timeZone": "Antarctica/Troll"}, 0, 0))
    print(stored({**rule, "timeZone": "Asia/Kolkata"}, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(9 * HOUR), str(3 * HOUR + HOUR // 2)]  # UTC in 1970, and UTC+5:30
