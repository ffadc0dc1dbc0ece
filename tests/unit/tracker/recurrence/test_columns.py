"""The next occurrences of many messages, found in columns, are those that each one's rule gives by itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import batches
from tracker.due_time import BadScheduleError
from tracker.messages import concat
from tracker.recurrence.columns import NEVER, Recurrences, first_of
from tracker.recurrence.recurrence import Misfire, Recurrence

NOW = 1_790_000_000_123
DAY = 86_400_000
RULES = [
    "@every 10s", "@every 7m", "0 9 * * *", "*/20 2 * * *", "15 * * * * *", "30 2 L * *",
    "FREQ=DAILY;BYHOUR=2;BYMINUTE=30", "FREQ=SECONDLY;INTERVAL=45", "FREQ=WEEKLY;COUNT=3", "FREQ=DAILY;UNTIL=20271101",
]  # fmt: skip
TIMES = st.integers(-3 * DAY, 400 * DAY)
SCHEDULES = st.fixed_dictionaries(
    {"repeat": st.sampled_from(RULES)},
    optional={
        "timeZone": st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe"]),
        "repeatUntil": TIMES.map(lambda after: str(NOW + after)),
        "repeatTimes": st.integers(1, 5).map(str),
        "misfire": st.sampled_from([str(misfire) for misfire in Misfire]),
        "deliverAt": st.one_of(TIMES.map(lambda after: str(NOW + after)), st.sampled_from([f"+{NOW}", "-0", "007"])),
        "deliverAfter": st.integers(0, DAY).map(str),
        "colour": st.just("red"),
    },
)
MESSAGES = st.lists(st.tuples(SCHEDULES, TIMES, st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12)


def is_taken(properties: dict[str, str], days: int) -> bool:
    try:
        first_of(properties, NOW - DAY * days)
    except BadScheduleError:
        return False
    return True


@pytest.mark.slow
@effort(max_examples=examples(200), deadline=None)
@given(messages=MESSAGES, first=st.integers(0, 3))
def test_columns_say_what_each_rule_says(messages: list[tuple[dict[str, str], int, int, int]], first: int) -> None:
    messages = [one for one in messages if is_taken(one[0], one[3])]
    published = [NOW - DAY * days for *_, days in messages]
    rows = concat(
        batches([(1, i, -1, 1, 0)], publish_time=published[i], properties=list(given_.items()), occurrence=1)
        for i, (given_, *_) in enumerate(messages)
    )
    rows, messages, published = rows.slice(first), messages[first:], published[first:]
    recurrences = Recurrences(rows)
    numbers = np.array([number for *_, number, _ in messages], np.int64)
    after = np.array([NOW + after for _, after, *_ in messages], np.int64)
    found = recurrences.following(numbers, after).tolist()
    skips = recurrences.have_misfire(Misfire.SKIP).tolist()
    assert len(recurrences) == len(found) == rows.num_rows
    for i, (properties, *_) in enumerate(messages):
        rule = Recurrence.of_properties(properties)
        assert rule is not None
        start = first_of(properties, published[i])
        expected = rule.next_occurrence(int(numbers[i]), int(after[i]), start, int(after[i]))
        assert found[i] == (NEVER if expected is None else expected[1]), properties
        assert skips[i] == (rule.misfire is Misfire.SKIP)
        assert recurrences.one(i) == (rule, start)


def test_no_messages_have_no_next_occurrences() -> None:
    none = Recurrences(
        pa.table({"properties": batches([]).column("properties"), "publish_time": pa.array([], pa.int64())})
    )
    assert none.following(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
