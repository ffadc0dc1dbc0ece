"""When the occurrences of a schedule are: what a `repeat` may be, and what comes after an occurrence."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from dateutil.rrule import rrulestr
from hypothesis import assume, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tracker.due_time import MAX_TIME_MILLIS
from tracker.recurrence.columns import first_of, stored
from tracker.recurrence.recurrence import (
    Misfire,
    Recurrence,
    RecurrenceError,
    _parsed,
    _why_refused,
    recurrence_of,
)

START = int(datetime(2026, 9, 21, 14, 13, 20, 123_000, tzinfo=UTC).timestamp() * 1_000)
DAY = 86_400_000


def shown(at: int | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def some(rule: Recurrence, start: int, n: int) -> list[str | None]:
    found: list[int | None] = [start]
    while len(found) < n and (last := found[-1]) is not None:
        found.append(rule.following(last, start))
    return [shown(at) for at in found]


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [
        ("*/5 * * * *", ["2026-09-21 14:15:00", "2026-09-21 14:20:00"]),
        ("*/20 * * * * *", ["2026-09-21 14:13:40", "2026-09-21 14:14:00"]),
        ("0 9 * * MON-FRI", ["2026-09-22 09:00:00", "2026-09-23 09:00:00"]),
        ("0 0 29 2 *", ["2028-02-29 00:00:00", "2032-02-29 00:00:00"]),
        ("@every 90s", ["2026-09-21 14:14:50", "2026-09-21 14:16:20"]),
        ("@every 1500", ["2026-09-21 14:13:21", "2026-09-21 14:13:23"]),
        ("FREQ=DAILY", ["2026-09-22 14:13:20", "2026-09-23 14:13:20"]),
        (
            "RRULE:FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=9;BYMINUTE=0;BYSECOND=0",
            ["2026-09-25 09:00:00", "2026-10-30 09:00:00"],
        ),
        ("freq=hourly;byminute=0,30;bysecond=0", ["2026-09-21 14:30:00", "2026-09-21 15:00:00"]),
        ("FREQ=YEARLY;BYWEEKNO=1", ["2027-01-04 14:13:20", "2028-01-03 14:13:20"]),
        ("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1", ["2026-09-30 14:13:20", "2026-10-30 14:13:20"]),
    ],
)
def test_the_first_is_after_the_publish_time_and_each_is_after_the_one_before(repeat: str, expected: list[str]) -> None:
    rule = Recurrence(repeat)
    start = rule.first(START, None)
    assert start is not None
    assert some(rule, start, 2) == expected


def test_the_first_is_at_deliver_at_where_that_is_given() -> None:
    rule = Recurrence("0 9 * * *")
    assert rule.first(START, START + 5) == START + 5
    assert shown(rule.following(START + 5, START + 5)) == "2026-09-22 09:00:00"
    assert rule.following(START, START + 5) == START + 5  # there is none before the first


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"repeat": "* * * * *", "repeatUntil": str(START)}, "repeatUntil is before the first occurrence"),
        ({"repeat": "FREQ=DAILY;UNTIL=20200101"}, "repeat has an UNTIL before the first occurrence"),
        (
            {"repeat": "FREQ=DAILY;UNTIL=20200101", "repeatUntil": str(START)},
            "repeat has an UNTIL before the first occurrence",
        ),
        (
            {"repeat": "FREQ=DAILY;UNTIL=20260922T000000Z", "repeatUntil": str(START)},
            "repeatUntil is before the first occurrence",
        ),
        ({"repeat": "@every 2920000d"}, "repeat has no occurrence up to the year 9999, or in 400 years"),
        (
            {"repeat": "@every 2920000d", "repeatUntil": str(START + DAY)},
            "repeatUntil is before the first occurrence",
        ),
    ],
)
def test_what_ends_a_schedule_before_its_first_occurrence_is_named(properties: dict[str, str], said: str) -> None:
    with pytest.raises(RecurrenceError) as error:
        first_of(properties, START)
    assert str(error.value) == said


def test_every_counts_from_the_first_occurrence_and_not_from_the_one_before() -> None:
    rule = Recurrence("@every 90s")
    assert rule.following(START + 90_000 + 7, START) == START + 180_000


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"repeat": ""}, "repeat"),
        ({"repeat": "ö" * 257}, "repeat"),
        ({"repeat": "* * * *"}, "repeat"),
        ({"repeat": "* * * * * * *"}, "repeat"),
        ({"repeat": "61 * * * *"}, "repeat"),
        ({"repeat": "\ud800 * * * *"}, "repeat"),
        ({"repeat": "@daily"}, "repeat"),
        ({"repeat": "@every"}, "repeat"),
        ({"repeat": "@every 0s"}, "repeat"),
        ({"repeat": "@every 999ms"}, "repeat"),
        ({"repeat": "@every 1 day"}, "repeat"),
        ({"repeat": "0 0 30 2 *"}, "repeat"),
        ({"repeat": "* * */20 * 1L"}, "repeat"),
        ({"repeat": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "repeat"),
        ({"repeat": "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"}, "repeat"),
        ({"repeat": "FREQ=SECONDLY;BYMONTH=4;BYMONTHDAY=31"}, "repeat"),
        ({"repeat": "FREQ=MONTHLY;BYDAY=20MO"}, "repeat"),
        ({"repeat": "FREQ=YEARLY;BYWEEKNO=53;BYMONTH=3"}, "repeat"),
        ({"repeat": "FREQ=YEARLY;BYMONTHDAY=1,2,3;BYMONTH=1;BYSETPOS=4"}, "repeat"),
        ({"repeat": "CRON_TZ=Europe/Berlin 0 9 * * *"}, "repeat"),
        ({"repeat": ";"}, "repeat"),
        ({"repeat": "FREQ=DAILY;;COUNT=2"}, "repeat"),
        ({"repeat": "INTERVAL=2"}, "repeat"),
        ({"repeat": "FREQ=FORTNIGHTLY"}, "repeat"),
        ({"repeat": "FREQ=DAILY;BYEASTER=1"}, "repeat"),
        ({"repeat": "FREQ=DAILY;INTERVAL=0"}, "repeat"),
        ({"repeat": "FREQ=DAILY;COUNT=2;UNTIL=20280101"}, "repeat"),
        ({"repeat": "FREQ=DAILY;UNTIL=20281301"}, "repeat"),
        ({"repeat": "FREQ=DAILY;BYDAY=1MO"}, "repeat"),
        ({"repeat": "FREQ=WEEKLY;BYMONTHDAY=3"}, "repeat"),
        ({"repeat": "FREQ=HOURLY;BYSETPOS=1;BYDAY=MO"}, "repeat"),
        ({"repeat": "FREQ=MONTHLY;BYDAY=54MO"}, "repeat"),
        ({"repeat": "FREQ=DAILY;BYHOUR=24"}, "repeat"),
        ({"repeat": "FREQ=DAILY;FREQ=DAILY"}, "repeat"),
        ({"repeat": "DTSTART=20260101;FREQ=DAILY"}, "repeat"),
        ({"repeat": "* * * * *", "timeZone": "Middle/Earth"}, "timeZone"),
        ({"repeat": "* * * * *", "repeatUntil": "tomorrow"}, "repeatUntil"),
        ({"repeat": "* * * * *", "repeatUntil": "-1"}, "repeatUntil"),
        ({"repeat": "* * * * *", "repeatUntil": str(MAX_TIME_MILLIS + 1)}, "repeatUntil"),
        ({"repeat": "* * * * *", "repeatTimes": "0"}, "repeatTimes"),
        ({"repeat": "* * * * *", "repeatTimes": "1.5"}, "repeatTimes"),
        ({"repeat": "* * * * *", "misfire": "twice"}, "misfire"),
    ],
)
def test_what_is_wrong_is_refused_soon_and_named_by_its_property(properties: dict[str, str], name: str) -> None:
    began = time.process_time()
    with pytest.raises(RecurrenceError) as error:
        recurrence_of(properties).check()
    assert time.process_time() - began < 1
    assert error.value.property_name == name
    assert str(error.value) == f"{name} {error.value.reason}"
    assert "\n" not in str(error.value)


@st.composite
def recurrence_rules(draw: st.DrawFn) -> str:
    frequency = draw(st.sampled_from(["YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY"]))

    def numbers(low: int, high: int, from_end: bool = False) -> st.SearchStrategy[str]:
        number = st.integers(low, high) | st.integers(-high, -low) if from_end else st.integers(low, high)
        return st.lists(number, min_size=1, max_size=3, unique=True).map(lambda found: ",".join(map(str, found)))

    weekdays = st.lists(st.sampled_from(["MO", "TU", "WE", "TH", "FR", "SA", "SU"]), min_size=1, max_size=3).map(
        ",".join
    )
    numbered = st.sampled_from(["1MO", "-1FR", "2TU,-2TH", "5WE"])
    parts = {
        "BYMONTH": numbers(1, 12),
        "BYHOUR": numbers(0, 23),
        "BYMINUTE": numbers(0, 59),
        "BYSECOND": numbers(0, 59),
        "BYDAY": numbered if frequency in ("YEARLY", "MONTHLY") and draw(st.booleans()) else weekdays,
        "WKST": st.sampled_from(["MO", "SU"]),
    }
    if frequency != "WEEKLY":
        parts["BYMONTHDAY"] = numbers(1, 31, from_end=True)
    if frequency in ("YEARLY", "HOURLY", "MINUTELY", "SECONDLY"):
        parts["BYYEARDAY"] = numbers(1, 366, from_end=True)
    chosen = draw(st.lists(st.sampled_from(sorted(parts)), unique=True, max_size=3))
    rule = [f"FREQ={frequency}", *(f"{name}={draw(parts[name])}" for name in chosen)]
    interval = draw(st.sampled_from([1, 1, 2, 3, 5]))
    of_time = {"BYHOUR", "BYMINUTE", "BYSECOND"} & set(chosen)
    if interval > 1 and not (
        frequency in ("MINUTELY", "SECONDLY") and of_time
    ):  # of some dateutil says they are invalid
        rule.append(f"INTERVAL={interval}")
    if frequency in ("YEARLY", "MONTHLY", "DAILY") and set(chosen) - {"WKST"} and draw(st.booleans()):
        rule.append(f"BYSETPOS={draw(numbers(1, 4, from_end=True))}")
    return ";".join(rule)


@pytest.mark.parametrize(
    ("repeat", "said"),
    [
        (
            "FREQ=DAILY;BYDAY",
            "repeat is no RRULE that can be read, it has a part that is no NAME=VALUE: 'BYDAY': 'FREQ=DAILY;BYDAY'",
        ),
        ("61 * * * *", "repeat is no cron expression that can be read, it has a bad minute: '61 * * * *'"),
        (
            "CRON_TZ=Europe/Berlin 0 9 * * *",
            "repeat has its time zone before it, which belongs in timeZone: 'CRON_TZ=Europe/Berlin 0 9 * * *'",
        ),
        ("FREQ=MONTHLY;BYDAY=20MO", "repeat never occurs: 'FREQ=MONTHLY;BYDAY=20MO'"),
    ],
)
def test_an_error_says_in_one_sentence_what_is_wrong(repeat: str, said: str) -> None:
    with pytest.raises(RecurrenceError) as error:
        recurrence_of({"repeat": repeat}).check()
    assert str(error.value) == said


@pytest.mark.parametrize("end", [";", "\n", ";\r\n", "; "])
def test_a_line_break_or_semicolon_at_a_rule_s_end_is_taken(end: str) -> None:
    assert some(Recurrence(f"FREQ=DAILY{end}"), START, 2) == some(Recurrence("FREQ=DAILY"), START, 2)
    assert Recurrence(f"RRULE:FREQ=DAILY;COUNT=3{end}").times == 3


def test_what_was_refused_is_remembered_unless_it_is_long() -> None:
    recurrence_of({"repeat": "FREQ=DAILY"})
    for repeat in ("FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30", "61 * * * *"):
        before = None
        for _ in range(2):
            misses = (_parsed.cache_info().misses, _why_refused.cache_info().misses)
            with pytest.raises(RecurrenceError):
                recurrence_of({"repeat": repeat}).check()
            assert before in (None, misses)
            before = (_parsed.cache_info().misses, _why_refused.cache_info().misses)
    size = _parsed.cache_info().currsize
    for name in ("repeat", "timeZone", "misfire"):
        with pytest.raises(RecurrenceError, match=name):
            recurrence_of({"repeat": "@every 9s", name: "x" * 5_000})
    assert _parsed.cache_info().currsize == size


@pytest.mark.parametrize(
    "properties", [{"repeat": "0 9 * * *", "timeZone": "Middle/Earth"}, {"repeat": "FREQ=NEVER"}, {"timeZone": "UTC"}]
)
def test_a_stored_message_whose_rule_can_t_be_read_any_more_has_ended(properties: dict[str, str]) -> None:
    rule, start = stored(properties, START)
    assert rule.why_unreadable is not None
    assert start == START
    assert rule.following(START, start) is None
    assert rule.next_occurrence(1, START, START, START) is None


def test_a_stored_message_whose_rule_has_no_first_occurrence_any_more_begins_when_it_was_published() -> None:
    rule, start = stored({"repeat": "FREQ=MONTHLY;BYDAY=20MO"}, START)
    assert (rule.why_unreadable, start) == (None, START)
    assert rule.following(START, start) is None


@pytest.mark.slow
@effort(max_examples=examples(500))
@given(
    st.lists(
        st.sampled_from(
            [
                "FREQ=",
                "YEARLY",
                "MONTHLY",
                "WEEKLY",
                "SECONDLY",
                ";",
                "BYDAY=",
                "53MO",
                "-53SU",
                "BYWEEKNO=",
                "-53",
                ",",
                "=",
                ";",
                "INTERVAL=",
                "9",
            ]
        )
        | st.sampled_from(
            ["BYSETPOS=", "COUNT=", "UNTIL=", "00010101", "99991231T235959", "Z", "WKST=", "366", "L", "#5"]
        )
        | st.text(max_size=3),
        max_size=12,
    ).map("".join)
    | st.lists(st.text("0123456789*/-,L#MONW ²٣", max_size=5), min_size=5, max_size=6).map(" ".join)
    | st.text(max_size=30).map("@every ".__add__)
    | recurrence_rules(),
    st.sampled_from(["UTC", "Europe/Berlin", "Pacific/Apia", "America/Adak"]),
    st.integers(0, MAX_TIME_MILLIS),
)
def test_whatever_a_rule_is_it_is_refused_or_computed(repeat: str, zone: str, after: int) -> None:
    try:
        rule = recurrence_of({"repeat": repeat, "timeZone": zone})
        rule.check(2_000)
    except RecurrenceError:
        return
    for start in (0, START, after, MAX_TIME_MILLIS):
        found = rule.following(after, start)
        assert found is None or after < found <= MAX_TIME_MILLIS


def test_without_repeat_the_others_mean_nothing() -> None:
    assert Recurrence.of_properties({"timeZone": "Nowhere", "misfire": "twice"}) is None


def test_what_has_been_read_is_kept() -> None:
    properties = {"repeat": "0 9 * * *", "timeZone": "Europe/Berlin", "repeatTimes": "3"}
    assert Recurrence.of_properties(properties) is Recurrence.of_properties(dict(properties))


def test_a_schedule_ends_after_its_times_and_at_its_end() -> None:
    rule = Recurrence("@every 1d", until_millis=START + 2 * DAY, times=3)
    assert rule.next_occurrence(1, START, START, START) == (2, START + DAY)
    assert rule.next_occurrence(2, START + DAY, START, START) == (3, START + 2 * DAY)
    assert rule.next_occurrence(3, START + 2 * DAY, START, START) is None
    assert rule.following(START + 2 * DAY, START) is None
    assert rule.first(START, START + 2 * DAY + 1) is None


def test_a_rule_s_own_count_and_until_end_it_as_well() -> None:
    rule = Recurrence("FREQ=DAILY;COUNT=2")
    assert rule.next_occurrence(1, START, START, START) == (2, START + DAY)
    assert rule.next_occurrence(2, START + DAY, START, START) is None
    for until, days in (("20260922", 1), ("20260923T141320Z", 2), ("20260923T101320", 2), ("20260923T101319", 1)):
        rule = Recurrence(f"FREQ=DAILY;UNTIL={until}", "America/New_York")
        found = START
        for n in range(days):
            assert (found := rule.following(found, START) or 0) == START + (n + 1) * DAY
        assert rule.following(found, START) is None


def test_days_of_missed_occurrences_take_no_time() -> None:
    began = time.process_time()
    now = START + 3_650 * DAY
    for misfire, after in ((Misfire.ONCE, now), (Misfire.SKIP, now), (Misfire.ALL, START)):
        rule = Recurrence("* * * * * *", "Europe/Berlin", misfire=misfire)
        assert rule.next_occurrence(1, START, START, now) == (2, after // 1_000 * 1_000 + 1_000)
    assert time.process_time() - began < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeat",
    [
        "FREQ=SECONDLY;INTERVAL=2;BYSECOND=1,3,5;BYMINUTE=0",
        "FREQ=SECONDLY;INTERVAL=86399;BYHOUR=3;BYMINUTE=0;BYSECOND=0",
        "FREQ=DAILY;INTERVAL=7;BYDAY=TU",
        "FREQ=DAILY;INTERVAL=999999999999999999",
        "FREQ=YEARLY;INTERVAL=9999;BYMONTH=2;BYMONTHDAY=29",
        "FREQ=MINUTELY;INTERVAL=1441;BYMONTH=2;BYMONTHDAY=29;BYHOUR=7",
        f"FREQ=DAILY;BYSECOND={','.join(map(str, range(60)))};BYMINUTE={','.join(map(str, range(60)))}",
    ],
)
def test_no_rule_takes_long_however_long_ago_it_began(repeat: str) -> None:
    rule = Recurrence(repeat)
    began = time.process_time()
    for after in (START, START + 1_000 * DAY, START + 1_000_000 * DAY, MAX_TIME_MILLIS - 1):
        found = rule.following(after, START)
        assert found is None or found > after
        rule.following(START, 0)
    assert time.process_time() - began < 2


RULES = st.sampled_from(
    [
        "*/5 * * * *",
        "*/7 * * * * *",
        "0 */6 * * *",
        "30 2 * * *",
        "@every 90s",
        "@every 1d",
        "FREQ=MINUTELY;INTERVAL=7",
        "FREQ=DAILY;INTERVAL=2",
        "FREQ=DAILY;BYHOUR=1,2,3",
    ]
)


@pytest.mark.slow
@effort(max_examples=examples(200))
@given(
    RULES,
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/Havana"]),
    st.sampled_from(list(Misfire)),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(0, 3 * DAY),
    st.integers(0, 370 * DAY),
    st.lists(st.integers(-DAY // 2, 2 * DAY) | st.integers(-60_000, 600_000), min_size=1, max_size=8),
)
def test_occurrences_follow_each_other_as_a_naive_reading_has_it(
    repeat: str, zone: str, misfire: Misfire, times: int | None, lasts: int | None, offset: int, waits: list[int]
) -> None:
    """The naive one lists all times of the rule, one after another, and goes along it."""
    start = START + offset
    until = None if lasts is None else start + lasts
    rule = Recurrence(repeat, zone, until, times, misfire)
    all_times = [start]
    for _ in range(2_000):
        if (following := rule.following(all_times[-1], start)) is None:
            break
        assert following > all_times[-1]
        all_times.append(following)
    number, place = 1, 0
    for wait in waits:
        now = all_times[place] + wait
        assume(following is None or now < all_times[-1])
        later = [
            n
            for n in range(place + 1, len(all_times))
            if misfire is Misfire.ALL or all_times[n] > max(now, all_times[place])
        ]
        chosen = later[:1]
        expected = (number + 1, all_times[chosen[0]]) if chosen and number != times else None
        assert rule.next_occurrence(number, all_times[place], start, now) == expected
        if expected is None:
            return
        number, place = number + 1, chosen[0]


@pytest.mark.slow
@effort(max_examples=examples(300))
@given(recurrence_rules(), st.integers(0, 1_400 * 86_400))
def test_a_recurrence_rule_means_what_dateutil_says(repeat: str, seconds: int) -> None:
    start = datetime(2026, 1, 1) + timedelta(seconds=seconds)
    end = start + timedelta(days=8 * 366)
    ours: list[datetime] = []
    try:
        rule = Recurrence(repeat)
        rule.check()
    except RecurrenceError as error:
        wrong = error.reason
    else:
        wrong = ""
        first = at = int(start.replace(tzinfo=UTC).timestamp()) * 1_000
        last = end.replace(tzinfo=UTC).timestamp() * 1_000
        while len(ours) < 5 and (at := rule.following(at, first) or 0) and at <= last:
            ours.append(datetime.fromtimestamp(at / 1_000, UTC).replace(tzinfo=None))
    assert not wrong or "never occurs" in wrong
    if not ours and not repeat.startswith(("FREQ=YEARLY", "FREQ=MONTHLY")):
        return  # dateutil would look for minutes, until the year 9999
    try:
        of_dateutil = rrulestr(f"RRULE:{repeat};UNTIL={end:%Y%m%dT%H%M%S}", dtstart=start)
    except ValueError:  # by its interval it matches never
        of_dateutil = ()
    assert ours == [at for at in islice(of_dateutil, 6) if at > start][:5]


def test_a_message_that_is_known_to_recur_but_has_no_rule_is_an_error_that_names_the_property() -> None:
    with pytest.raises(RecurrenceError, match="repeat is missing"):
        recurrence_of({"timeZone": "UTC"})
    assert recurrence_of({"repeat": "@every 90s"}).every_millis == 90_000
