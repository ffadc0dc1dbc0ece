"""An RRULE's times are those of a second reading of RFC 5545, from 2024 to 2060; and no rule is costly to compute."""

from __future__ import annotations

import random
import time
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import pytest

from tests.support.fuzzing.examples import examples
from tests.unit.tracker.recurrence.rfc5545 import occurrences
from tracker.recurrence.recurrence import Recurrence
from tracker.recurrence.rrule import FREQUENCIES, parse

START = datetime(2024, 1, 1, 9, 30)
LAST = date(2060, 12, 31)
WEEKDAYS = ["MO", "TU", "WE", "TH", "FR", "SA", "SU"]


def millis(at: datetime) -> int:
    return int(at.replace(tzinfo=UTC).timestamp()) * 1_000


def ours(repeat: str, start: datetime, last: date = LAST) -> list[datetime]:
    """The times of a rule after its DTSTART."""
    rule, first = Recurrence(repeat), millis(start)
    found: list[datetime] = []
    at = rule.following(first, first)
    while at is not None and (shown := datetime.fromtimestamp(at / 1_000, UTC).replace(tzinfo=None)).date() <= last:
        found.append(shown)
        at = rule.following(at, first)
    return found


def by_the_rfc(repeat: str, start: datetime, last: date = LAST) -> list[datetime]:
    return [at for at in occurrences(parse(repeat), start, last) if at > start]


@pytest.mark.parametrize(
    ("repeat", "first"),
    [
        ("FREQ=YEARLY;BYWEEKNO=53;BYDAY=FR;WKST=SU", date(2032, 1, 2)),  # 2026 has no week 53 of weeks from Sunday
        ("FREQ=YEARLY;BYWEEKNO=53;BYDAY=FR", date(2027, 1, 1)),
        ("FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU", date(2026, 11, 2)),
        ("FREQ=MONTHLY;BYMONTH=3;BYDAY=1MO,47TU", date(2027, 3, 1)),
        ("FREQ=YEARLY;BYDAY=53TH", date(2026, 12, 31)),
        ("FREQ=YEARLY;BYDAY=-53TH", date(2032, 1, 1)),
        ("FREQ=YEARLY;BYYEARDAY=366", date(2028, 12, 31)),
        ("FREQ=YEARLY;BYYEARDAY=-366", date(2028, 1, 1)),
    ],
)
def test_the_first_right_date_is_chosen(repeat: str, first: date) -> None:
    start = datetime(2026, 6, 1, 9)
    found = Recurrence(repeat).following(millis(start), millis(start))
    assert found == millis(datetime(first.year, first.month, first.day, 9))
    assert by_the_rfc(repeat, start)[0].date() == first


@pytest.mark.slow
@pytest.mark.parametrize("week_start", WEEKDAYS)
def test_each_week_number_is_that_of_the_rfc(week_start: str) -> None:
    for number in (1, 2, 20, 52, 53, -1, -2, -52, -53):
        repeat = f"FREQ=YEARLY;BYWEEKNO={number};BYDAY={','.join(WEEKDAYS)};WKST={week_start}"
        assert ours(repeat, START) == by_the_rfc(repeat, START), repeat


@pytest.mark.slow
def test_each_ordinal_of_a_weekday_is_that_of_the_rfc() -> None:
    for i, number in enumerate((*range(1, 6), 12, 27, 51, 52, 53, -1, -2, -4, -5, -6, -52, -53)):
        for rule in ("FREQ=YEARLY;BYDAY={}", "FREQ=YEARLY;BYMONTH=2,11;BYDAY=1MO,{}", "FREQ=MONTHLY;BYDAY=-1SU,{}"):
            repeat = rule.format(f"{number}{WEEKDAYS[i % 7]}")
            assert ours(repeat, START) == by_the_rfc(repeat, START), repeat


@pytest.mark.slow
@pytest.mark.parametrize("week_start", WEEKDAYS)
def test_a_week_that_goes_on_in_the_next_year_is_one_period(week_start: str) -> None:
    for interval in (1, 3):
        repeat = f"FREQ=WEEKLY;INTERVAL={interval};BYDAY=SU,WE,TH,FR;BYSETPOS=1,3,-3;WKST={week_start}"
        assert ours(repeat, START) == by_the_rfc(repeat, START)


def random_rule(pick: random.Random) -> str:
    frequency = pick.choice(["YEARLY", "YEARLY", "MONTHLY", "WEEKLY", "DAILY"])

    def numbers(least: int, greatest: int, from_end: bool = False) -> str:
        chosen = {pick.choice([-1, 1] if from_end else [1]) * pick.randint(least, greatest) for _ in range(3)}
        return ",".join(map(str, chosen))

    def weekdays() -> str:
        return ",".join(pick.sample(WEEKDAYS, pick.randint(1, 4)))

    def numbered() -> str:
        most = pick.choice([5, 53])
        return ",".join(f"{pick.choice(['', '-'])}{pick.randint(1, most)}{pick.choice(WEEKDAYS)}" for _ in range(3))

    parts = {"BYMONTH": numbers(1, 12), "BYDAY": weekdays()}
    if frequency in ("YEARLY", "MONTHLY", "DAILY"):
        parts["BYMONTHDAY"] = numbers(1, 31, from_end=True)
    if frequency in ("YEARLY", "MONTHLY") and pick.random() < 0.5:
        parts["BYDAY"] = numbered()
    if frequency == "YEARLY":
        parts["BYYEARDAY"] = numbers(1, 366, from_end=True)
        parts["BYWEEKNO"] = numbers(1, 53, from_end=True)
    parts["BYHOUR"], parts["BYMINUTE"], parts["BYSECOND"] = numbers(0, 23), numbers(0, 59), numbers(0, 59)
    names = pick.sample(sorted(parts), pick.randint(0, 3))
    if "BYWEEKNO" in names and "BYDAY" in names:
        parts["BYDAY"] = weekdays()
    rule = [f"FREQ={frequency}", *(f"{name}={parts[name]}" for name in names)]
    if names and pick.random() < 0.4:
        rule.append(f"BYSETPOS={numbers(1, pick.choice([3, 40, 366]), from_end=True)}")
    if pick.random() < 0.4:
        rule.append(f"INTERVAL={pick.choice([2, 3, 5, 12, 13])}")
    return ";".join([*rule, f"WKST={pick.choice(WEEKDAYS)}"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_rules_of_days_mean_what_the_rfc_says(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(examples(15)):
        repeat = random_rule(pick)
        start = START + timedelta(days=pick.randint(0, 900), seconds=pick.randint(0, 86_399))
        last = LAST if "FREQ=YEARLY" in repeat or "FREQ=MONTHLY" in repeat else date(2028, 12, 31)
        expected = by_the_rfc(repeat, start, last)[:300]
        found = ours(repeat, start, last if len(expected) < 300 else expected[-1].date())[: len(expected)]
        assert found == expected, (repeat, start)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_rules_of_hours_minutes_and_seconds_mean_what_a_walk_over_all_of_them_finds(seed: int) -> None:
    pick = random.Random(seed)
    start = datetime(2026, 2, 20, 22, 58, 57)
    for _ in range(examples(12)):
        frequency, unit, days = pick.choice([("HOURLY", 3_600, 200), ("MINUTELY", 60, 30), ("SECONDLY", 1, 2)])
        interval = pick.choice([1, 2, 7, 59, 61, 1_441, 9_999])
        rule = {"BYHOUR": (0, 23), "BYMINUTE": (0, 59), "BYSECOND": (0, 59)}
        chosen = {name: sorted({pick.randint(*rule[name]) for _ in range(9)}) for name in pick.sample(sorted(rule), 2)}
        parts = [f"{name}={','.join(map(str, values))}" for name, values in chosen.items()]
        repeat = ";".join([f"FREQ={frequency}", f"INTERVAL={interval}", *parts])
        read = parse(repeat)
        seconds = read.by_second or ((start.second,) if unit > 1 else tuple(range(60)))
        minutes = read.by_minute or ((start.minute,) if unit > 60 else tuple(range(60)))
        hours = (start.replace(minute=0, second=0) + timedelta(hours=n) for n in range(24 * days))
        times = (hour.replace(minute=m, second=s) for hour in hours for m in minutes for s in seconds)
        unit_of_start = millis(start) // 1_000 // unit
        expected = [
            at
            for at in times
            if at > start
            and (not read.by_hour or at.hour in read.by_hour)
            and (millis(at) // 1_000 // unit - unit_of_start) % interval == 0
        ][:50]
        found = ours(repeat, start, (start + timedelta(days=days)).date())[:50]
        assert found[: len(expected)] == expected, repeat


COSTLY = [
    "FREQ=MINUTELY;INTERVAL=9999;BYYEARDAY=123;BYHOUR=1",
    "FREQ=SECONDLY;INTERVAL=86399;BYHOUR=3;BYMINUTE=0;BYSECOND=0",
    "FREQ=SECONDLY;INTERVAL=86400;BYHOUR=3;BYMINUTE=0;BYSECOND=0",
    "FREQ=SECONDLY;INTERVAL=999983;BYHOUR=3;BYMINUTE=0;BYSECOND=0;BYYEARDAY=366",
    "FREQ=SECONDLY;INTERVAL=999999999999999999",
    "FREQ=MINUTELY;INTERVAL=1441;BYMONTH=2;BYMONTHDAY=29;BYHOUR=7;BYDAY=MO",
    "FREQ=HOURLY;INTERVAL=23;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO;BYHOUR=3",
    "FREQ=HOURLY;INTERVAL=24;BYHOUR=3",
    "FREQ=DAILY;INTERVAL=7;BYDAY=TU",
    "FREQ=DAILY;INTERVAL=999999999999999999",
    "FREQ=DAILY;INTERVAL=364;BYMONTH=2;BYMONTHDAY=29",
    "FREQ=DAILY;BYSETPOS=366;BYHOUR=1,2",
    "FREQ=WEEKLY;INTERVAL=53;BYMONTH=2;BYDAY=MO,TU,WE;BYSETPOS=3",
    "FREQ=WEEKLY;BYSETPOS=-366;BYDAY=MO,TU,WE,TH,FR,SA,SU;BYHOUR=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
    "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR,SA,SU;BYSETPOS=366,-366,365,-365,364,-364",
    "FREQ=MONTHLY;INTERVAL=12;BYDAY=MO,TU,WE,TH,FR,SA,SU;BYSETPOS=32,-366",
    "FREQ=MONTHLY;INTERVAL=11;BYMONTHDAY=31;BYMONTH=2,3;BYDAY=5MO",
    "FREQ=YEARLY;INTERVAL=9999;BYMONTH=2;BYMONTHDAY=29",
    "FREQ=YEARLY;BYWEEKNO=53;BYYEARDAY=1;BYDAY=FR;WKST=TH",
    "FREQ=YEARLY;BYMONTHDAY=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20;BYSETPOS=366",
    "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
    f"FREQ=DAILY;BYSECOND={','.join(map(str, range(60)))};BYMINUTE={','.join(map(str, range(60)))}",
]


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"])
@pytest.mark.parametrize("repeat", COSTLY)
def test_no_occurrence_of_any_rule_takes_5_ms_in_any_zone(repeat: str, zone: str) -> None:
    taken = []
    for day in range(3):
        start = millis(START) + day * 86_400_000 + 1
        began = time.process_time()
        rule = Recurrence(repeat, zone)
        at: int | None = start
        for _ in range(3):
            if at is not None:
                found = rule.following(at, start)
                taken.append(time.process_time() - began)
                began = time.process_time()
                assert found is None or found > at
                at = found
    assert sorted(taken)[len(taken) // 2] < 0.005


def test_occurrences_of_a_rare_rule_are_in_order_in_a_zone_whose_clock_changes() -> None:
    rule = Recurrence("FREQ=MINUTELY;INTERVAL=9999;BYYEARDAY=123;BYHOUR=1", "Europe/Berlin")
    at, found = millis(START), [millis(START)]
    while (at := rule.following(at, found[0]) or 0) and len(found) < 6:
        found.append(at)
    assert len(found) > 3
    assert all(before < after for before, after in pairwise(found))
    assert {datetime.fromtimestamp(at / 1_000, UTC).hour for at in found[1:]} == {23}  # 01:xx of Berlin's summer time


@pytest.mark.parametrize("frequency", FREQUENCIES)
def test_after_the_last_time_there_is_none(frequency: str) -> None:
    rule = Recurrence(f"FREQ={frequency};INTERVAL=7")
    end = millis(datetime(9999, 12, 31, 23, 59, 59))
    for zone in ("UTC", "Europe/Berlin"):
        assert Recurrence(rule.repeat, zone).following(end, millis(START)) is None
