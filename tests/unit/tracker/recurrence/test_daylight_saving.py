"""Gaps and overlaps of daylight saving: as Vixie cron has them, in each change of thirteen zones from 2026 to 2028."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
from croniter import croniter

from conf.time_zones import time_zone
from tests.unit.tracker.recurrence import vixie
from tracker.recurrence.recurrence import Recurrence

pytestmark = pytest.mark.slow

ZONES = [
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/New_York",
    "America/Nuuk",
    "America/Santiago",
    "America/St_Johns",
    "Asia/Beirut",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Europe/London",
    "Pacific/Chatham",
]
EXPRESSIONS = [
    "30 2 * * *",
    "0 2 * * *",
    "15,45 0-3 * * *",
    "*/20 * * * *",
    "0 * * * *",
    "5 */2 * * *",
    "30 1 * * *",
    "0 0 * * *",
    "30 0 * * *",
    "* 2 * * *",
    "0 */3 * * *",
    "30 1,2,3 * * *",
]
QUARTER = timedelta(minutes=15)


class Change(NamedTuple):
    at: datetime
    forward: bool


@cache
def changes(zone_name: str) -> list[Change]:
    zone, start = time_zone(zone_name), datetime(2026, 1, 1, tzinfo=UTC)

    def offset(at: datetime) -> timedelta:
        return at.astimezone(zone).utcoffset() or timedelta()

    found = []
    for day, next_day in pairwise(start + timedelta(days=n) for n in range(3 * 365 + 2)):
        if offset(day) != offset(next_day):
            at = next(at for n in range(1, 97) if offset(at := day + n * QUARTER) != offset(day))
            found.append(Change(at, offset(next_day) > offset(day)))
    return found


def occurrences(expression: str, zone_name: str, start: datetime, end: datetime) -> list[datetime]:
    rule = Recurrence(expression, zone_name)
    at, found = int(start.timestamp()) * 1_000, []
    while (at := rule.following(at, 0) or 0) <= end.timestamp() * 1_000:
        found.append(datetime.fromtimestamp(at / 1_000, UTC))
    return found


def by_croniter(expression: str, zone_name: str, start: datetime, end: datetime) -> list[datetime]:
    times = croniter(expression, start.astimezone(time_zone(zone_name)))
    found = []
    while (at := times.get_next(datetime).astimezone(UTC)) <= end:
        found.append(at)
    return found


@pytest.mark.parametrize("zone_name", ZONES)
def test_around_each_change_a_schedule_recurs_when_cron_would_run_a_job(zone_name: str) -> None:
    around = timedelta(hours=5)
    for change in changes(zone_name):
        for expression in EXPRESSIONS:
            start, end = change.at - around, change.at + around
            by_cron = vixie.runs(expression, time_zone(zone_name), start, end)
            assert occurrences(expression, zone_name, start, end) == by_cron, (expression, change)


@pytest.mark.parametrize("zone_name", ZONES)
def test_croniter_says_the_same_but_for_what_vixie_cron_does_otherwise(zone_name: str) -> None:
    around = timedelta(hours=5)
    for change in changes(zone_name):
        for expression in EXPRESSIONS:
            ours = occurrences(expression, zone_name, change.at - around, change.at + around)
            theirs = by_croniter(expression, zone_name, change.at - around, change.at + around)
            only_ours, only_theirs = set(ours) - set(theirs), set(theirs) - set(ours)
            wildcard = any(field.startswith("*") for field in expression.split()[:2])
            if change.forward and wildcard:
                # croniter makes up for the gap at its end; cron only for jobs that run at certain times.
                assert not only_ours
                assert only_theirs <= {change.at}
            elif not change.forward and not wildcard:
                # croniter runs them in both passes; cron only in the first.
                assert not only_ours
                assert only_theirs <= second_pass(change, zone_name)
            elif not change.forward:
                # croniter overlooks the second pass where it does not last an hour; cron goes by what the clock shows.
                assert not only_theirs
                assert only_ours <= second_pass(change, zone_name)
            else:
                assert ours == theirs


def second_pass(change: Change, zone_name: str) -> set[datetime]:
    zone = time_zone(zone_name)
    minutes = (change.at + timedelta(minutes=n) for n in range(180))
    return {at for at in minutes if at.astimezone(zone).fold == 1}


@pytest.mark.parametrize("zone_name", ZONES)
def test_away_from_changes_croniter_says_the_same(zone_name: str) -> None:
    near = [(c.at - timedelta(hours=12), c.at + timedelta(hours=12)) for c in changes(zone_name)]
    for expression in [
        "17 5 * * *",
        "0 9 * * MON-FRI",
        "30 23 1,15 * *",
        "5 4 31 * *",
        "0 12 29 2 *",
        "45 */8 * * SUN",
    ]:
        start, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2029, 1, 1, tzinfo=UTC)
        ours = occurrences(expression, zone_name, start, end)
        theirs = by_croniter(expression, zone_name, start, end)
        plain = [[at for at in times if not any(a < at < b for a, b in near)] for times in (ours, theirs)]
        assert plain[0] == plain[1]
        assert plain[0]


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [
        # Europe/Berlin: 2027-03-28 has no 02:00 to 03:00, 2027-10-31 has it twice.
        ("30 2 * * *", ["03-28 03:00+02", "10-31 02:30+02"]),
        ("0 30 2 * * *", ["03-28 03:00+02", "10-31 02:30+02"]),
        ("30 * * * *", ["03-28 01:30+01", "03-28 03:30+02", "10-31 01:30+02", "10-31 02:30+02", "10-31 02:30+01"]),
        ("FREQ=DAILY;BYHOUR=2;BYMINUTE=30;BYSECOND=0", ["03-28 03:00+02", "10-31 02:30+02"]),
        (
            "FREQ=HOURLY;BYMINUTE=30;BYSECOND=0",
            ["03-28 01:30+01", "03-28 03:30+02", "10-31 02:30+02", "10-31 02:30+01"],
        ),
        (
            "FREQ=MINUTELY;INTERVAL=30;BYSECOND=0",
            ["03-28 01:30+01", "03-28 03:00+02", "10-31 02:00+01", "10-31 02:30+01"],
        ),
    ],
)
def test_the_table_of_the_docs(repeat: str, expected: list[str]) -> None:
    zone, rule = time_zone("Europe/Berlin"), Recurrence(repeat, "Europe/Berlin")
    start = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp()) * 1_000
    found = []
    for day in (datetime(2027, 3, 28), datetime(2027, 10, 31)):
        at = int(day.replace(tzinfo=zone).timestamp()) * 1_000
        while (at := rule.following(at, start) or 0) < (day.replace(tzinfo=zone).timestamp() + 14_400) * 1_000:
            found.append(datetime.fromtimestamp(at / 1_000, zone).strftime("%m-%d %H:%M%z").removesuffix("00"))
    assert set(expected) <= set(found)
    if len(expected) == 2:
        assert found == expected


def test_time_zones_are_those_of_the_locked_package_and_not_the_machine_s() -> None:
    import tzdata

    from conf.time_zones import TIME_ZONE_DATA_VERSION

    assert tzdata.IANA_VERSION == TIME_ZONE_DATA_VERSION
    assert time_zone("Europe/Berlin").key == "Europe/Berlin"
    for name in ("Europe/Nowhere", "../UTC", "", "Europe", "/etc/localtime"):
        with pytest.raises(KeyError):
            time_zone(name)
