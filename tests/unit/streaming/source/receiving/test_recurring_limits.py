"""What a topic's recurring messages may be, and that costly rules do not keep a receiver's thread busy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conf.errors import DelayLakeError
from conf.settings import TrackerSettings
from streaming.source.receiving.recurring import Recurring
from tests.support.servers.fake_pulsar import FakeConsumer, one
from tests.support.service.receiver_harness import TOPIC, Harness
from tests.support.warehouse.schedule_tables import TOPIC as SCHEDULES_TOPIC
from tests.support.warehouse.schedule_tables import ScheduleTables
from tracker.due_time import BadScheduleError

MINUTE = {"repeat": "@every 1m"}


def recurring(counts: list[int], **limits: int) -> Recurring:
    """Limits of a topic whose recurring messages are counted as given, one count after another."""

    def count() -> int:
        if not counts:
            raise DelayLakeError("no tables")
        return counts.pop(0)

    return Recurring(TOPIC, TrackerSettings.model_validate(limits), count)


@pytest.mark.parametrize(
    ("repeat", "is_taken"),
    [
        ("@every 59s", False),
        ("@every 60s", True),
        ("* * * * *", True),
        ("0,30 * * * * *", False),
        ("59 0 12 * * *", True),
        ("0,59 0,23 * * *", True),  # 23:59 and 00:00
        ("30 59 23 * * *", True),
        ("0,30 59 23 * * *", False),
        ("FREQ=SECONDLY;INTERVAL=60", True),
        ("FREQ=SECONDLY;INTERVAL=59", False),
        ("FREQ=SECONDLY", False),
        ("FREQ=SECONDLY;BYSECOND=7", True),
        ("FREQ=SECONDLY;INTERVAL=7;BYSECOND=7", True),
        ("FREQ=MINUTELY", True),
        ("FREQ=MINUTELY;BYSECOND=1,2", False),
        ("FREQ=HOURLY;BYMINUTE=0,1", True),
        ("FREQ=HOURLY;BYMINUTE=0,1;BYSECOND=0,59", False),
        ("FREQ=DAILY;BYHOUR=9;BYMINUTE=0;BYSECOND=0,30", False),
        ("FREQ=DAILY", True),
    ],
)
def test_a_rule_of_more_often_than_the_setting_is_rejected(repeat: str, is_taken: bool) -> None:
    limits = recurring([0], min_repeat_millis=60_000)
    if is_taken:
        assert limits.first({"repeat": repeat}, 7) > 7
    else:
        with pytest.raises(BadScheduleError, match="repeat is more often than once in 60000 ms"):
            limits.first({"repeat": repeat}, 7)


def test_a_topic_has_no_more_recurring_messages_than_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counts = [1, 2, 4, 3]
    limits = recurring(counts, max_recurring_messages=4)
    for _ in range(3):
        limits.first(MINUTE, 7)
    with pytest.raises(
        BadScheduleError, match=r"the topic has 4 recurring messages, and tracker\.max_recurring_messages is 4"
    ):
        limits.first(MINUTE, 7)
    assert counts == [2, 4, 3]  # they were counted once
    now += 11  # two of them have ended
    limits.first(MINUTE, 7)
    limits.first(MINUTE, 7)
    now += 11
    with pytest.raises(BadScheduleError):
        limits.first(MINUTE, 7)
    assert counts == [3]


def test_none_is_rejected_because_they_can_t_be_counted() -> None:
    limits = recurring([], max_recurring_messages=1)
    assert limits.first(MINUTE, 7) == 60_007


@pytest.mark.slow
def test_they_are_counted_in_the_tables(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    for entry in (1, 2):
        tables.came(entry)
    tracker = tables.settings.tracker.model_copy(update={"max_recurring_messages": 3})
    limits = Recurring.of(tables.settings.model_copy(update={"tracker": tracker}), SCHEDULES_TOPIC)
    limits.first(MINUTE, 7)
    with pytest.raises(BadScheduleError, match="the topic has 3 recurring messages"):
        limits.first(MINUTE, 7)


def test_without_a_limit_they_are_not_counted() -> None:
    limits = recurring([], max_recurring_messages=0)
    assert [limits.first(MINUTE, 7) for _ in range(3)] == [60_007] * 3


def never(n: int) -> str:
    return f"FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30;BYHOUR={n % 24};BYMINUTE={n // 24}"


def test_a_rule_that_never_occurs_costs_a_topic_little_however_often_it_comes() -> None:
    harness = Harness(recurring=recurring([], max_recurring_messages=0))
    harness.receiver.receive(FakeConsumer([*one(0, props={"repeat": "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"})]))
    began = time.process_time()
    script = [m for n in range(1, 500) for m in one(n, props={"repeat": "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"})]
    harness.receive(script)
    assert time.process_time() - began < 1  # 2 ms each; before they were searched for 20 ms each
    rows = harness.take().to_pylist()
    assert {row["reason"] for row in rows} == {"repeat never occurs: 'FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30'"}
    assert len(rows) == 500


def test_a_receiver_pauses_after_costly_rules_and_takes_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(recurring=recurring([], max_recurring_messages=0))
    pauses: list[float] = []
    monkeypatch.setattr(harness.receiver._stopped, "wait", pauses.append)
    costs = iter([0.0, 0.004] * 10_000)  # each rule takes 4 ms
    total = 0.0

    def spent() -> float:
        nonlocal total
        total += next(costs)
        return total

    monkeypatch.setattr(time, "thread_time", spent)
    harness.receive([m for n in range(9) for m in one(n, props={"repeat": never(n)})])
    assert [round(pause, 3) for pause in pauses] == [0.046] * 3  # after three of them each, four times what they took
    assert harness.take().num_rows == 9
    harness.receive([m for n in range(9, 18) for m in one(n)])
    assert len(pauses) == 3
