"""What a line knows of messages that an earlier run may have sent in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.position import START, Position
from broker.protocol.building import large_message
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.outgoing import delivered
from streaming.release.task import process_clients, producers
from streaming.release.task.connections import Connections
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.send_plan import Plan
from streaming.release.task.planning.sending_order import by_time
from streaming.release.task.producer_line import Large, Line
from tests.support.servers.fake_destinations import FakeBrokers, FakeProducer
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.packing import pack

DUE = 1_700_000_000_000
PUT_OFF = 3_600_000
BODY = bytes(100_000)
KEY = ("1:0:-1:-1", "", "")


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> FakeBrokers:
    brokers = FakeBrokers()
    monkeypatch.setattr(process_clients, "brokers", lambda settings, number=0: brokers)
    monkeypatch.setattr(process_clients, "new_brokers", lambda settings: brokers)
    return brokers


def lines(
    folder: Path, how: Attempt, topic: str = TOPIC, subscription: str = "a", **columns: Any
) -> tuple[Plan, list[Line]]:
    """The plan and the lines of a release with one large message."""
    settings = Settings(
        checkpoint=f"file:{folder}",
        routes=[{"source": topic, "subscriptions": [{"name": subscription, "destination": f"{TOPIC}-a"}]}],  # type: ignore[arg-type]
    )
    rows = release_rows(messages([(1, 0, DUE)], topic=topic, payload=BODY, **columns), sending='{"lanes": 1}')
    plan = plan_release(settings, Assignment("app", 0, 1, 1, pack(rows)), how)
    return plan, producers.lines_of(settings, how, by_time([plan]), Connections(settings, ()))


def test_what_has_arrived_is_read_from_when_a_message_was_due_however_much_it_is_put_off_now(
    brokers: FakeBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def before_time(admin: object, topic: str, time: int) -> Position:
        asked.append(time)
        return START

    monkeypatch.setattr(producers, "before_time", before_time)
    plan, [line] = lines(tmp_path, Attempt(put_off={(1, 1): {(TOPIC, 0): PUT_OFF}}))
    assert plan.sends.at.tolist() == [DUE + PUT_OFF]
    assert line.read_arrived_if_unclear is not None
    line.read_arrived_if_unclear()
    [since] = asked
    assert DUE - 600_000 < since < DUE


@pytest.mark.parametrize("dead_letter_of", [None, "s" * 3_000])
def test_a_large_message_has_at_most_as_many_bytes_as_its_line_says(
    brokers: FakeBrokers, tmp_path: Path, dead_letter_of: str | None
) -> None:
    """With names and reasons that have more bytes than all else that is added."""
    retry = {"attempt": 9, "retry_reasons": '["no"]' * 1_000, "properties": [("a", "b" * 500)] * 20}
    plan, [line] = lines(tmp_path, Attempt(), f"{TOPIC}{'t' * 3_000}", "s" * 3_000, **retry)
    [(sequence_id, large)] = line.large.items()
    message = delivered(plan.columns, 0, DUE, sequence_id, dead_letter_of)
    built = large_message(message, line.key.encode(), DUE, b"8 bytes!")
    assert built.is_one_entry(large.n_bytes)


def test_what_goes_to_a_rejects_topic_is_never_in_chunks(brokers: FakeBrokers, tmp_path: Path) -> None:
    _, [rejects] = lines(tmp_path, Attempt(), reason="no time")
    assert rejects.topic == f"{TOPIC}-rejects"
    assert rejects.large == {}


@pytest.mark.parametrize("n_bytes", [2 << 20, 6 << 20])
@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_last_message_may_be_in_part_if_a_smaller_limit_had_it_cut_into_chunks(
    brokers: FakeBrokers, n_bytes: int, has_arrived: bool
) -> None:
    """The broker's limit may have been raised since it was sent."""
    line = Line(
        "topic",
        "producer",
        lambda: FakeProducer(brokers, "topic", b"p", 7),  # type: ignore[arg-type, return-value]
        1.0,
        max_id=9,
        ids=[7],
        read_arrived_if_unclear=lambda: frozenset([KEY] if has_arrived else ()),
        large={7: Large(n_bytes, KEY)},
        max_entry_bytes=5 << 20,
    )
    line._open()
    assert line.is_partly_sent != has_arrived
    assert line.arrived_to == (7 if has_arrived else -1)
