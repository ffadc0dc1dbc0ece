"""Which messages the broker is asked about for Pulsar's own delays, how often, and what is told of them."""

from __future__ import annotations

import time
from typing import Any, cast

import pyarrow as pa
import pytest

from broker.client import NoAnswerError
from broker.position import SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import BrokerEntry
from status.troubles import NATIVE_DELAY, Troubles
from streaming.source.watch import native_delays
from streaming.source.watch.native_delays import NativeDelays
from tests.support.tracker.messages import messages
from tracker.messages import with_columns

ORDERS = SourceTopic("persistent://public/default/orders-partition-1", "persistent://public/default/orders", 1)
SECOND, HOUR = 1_000, 3_600_000


class Desk:
    """A broker whose producers delay as many seconds as `delays` says, and what asks it."""

    def __init__(self, **delays: int) -> None:
        self.delays = delays
        self.properties: dict[str, str] = {}
        self.entries: dict[int, str] = {}
        self.asked: list[str] = []
        self.troubles = Troubles()
        self.watch = NativeDelays(self.troubles)

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry:
        assert (topic, ledger_id) == (ORDERS.name, 7)
        producer = self.entries[entry_id]
        self.asked.append(producer)
        if producer == "silent":
            raise NoAnswerError("no answer")
        seconds = self.delays.get(producer)
        due = None if seconds is None else 1_000_000 + seconds * SECOND
        return BrokerEntry(1, 1_000_000, producer, None, self.properties, False, False, False, deliver_at=due)

    def come(self, now: int, *producers: str, **columns: Any) -> list[str]:
        """Lets a message of each producer come in, and asks; returns the producers that were asked about."""
        first = len(self.entries)
        self.entries |= {first + i: producer for i, producer in enumerate(producers)}
        places = [(7, first + i, 1_000_000) for i in range(len(producers))]
        rows = messages(places, **{"publish_time": 1_000_000} | columns)
        rows = with_columns(rows, producer_name=pa.array(producers))
        self.watch.came_in(ORDERS, rows, now)
        self.asked.clear()
        self.watch.ask(cast("AdminClient", self), now)
        return list(self.asked)

    def told(self) -> list[tuple[str, str]]:
        return [(one.name, one.text) for one in self.troubles.current() if one.kind == NATIVE_DELAY]


def test_producer_and_topic_are_named_and_no_more_when_it_is_over() -> None:
    desk = Desk(late=3_600)
    assert desk.come(SECOND, "late", "fine") == ["late", "fine"]
    [(topic, text)] = desk.told()
    assert topic == ORDERS.topic
    assert text.endswith("come at once: of producer late (as 7:0, 3,600 s early)")
    desk.delays.clear()
    desk.come(HOUR, "late")
    assert len(desk.told()) == 1
    desk.come(HOUR + 20 * SECOND, "late")
    assert desk.told() == []


def test_a_producer_is_asked_about_less_and_less_often() -> None:
    desk = Desk()
    asked = [n for n in range(1, 86_400) if desk.come(n * SECOND, "p")]
    assert asked[:4] == [1, 11, 31, 71]
    assert len(asked) < 86_400 / 600 + 10


def test_what_has_a_time_of_its_own_or_may_have_none_is_not_asked_about_or_not_told() -> None:
    desk = Desk(p=60)
    assert desk.come(1 * SECOND, "p", publish_time=999_999) == []  # due later
    assert desk.come(2 * SECOND, "p", reason="wrong") == []
    desk.properties = {"deliverAt": "1"}
    assert desk.come(3 * SECOND, "p") == ["p"]
    assert desk.told() == []


def test_without_an_answer_the_others_are_asked_about_later() -> None:
    desk = Desk(late=60)
    assert desk.come(SECOND, "silent", "late") == ["silent"]
    assert desk.come(3 * SECOND, "silent", "late") == ["late"]
    assert len(desk.told()) == 1


def test_ten_times_as_many_producers_as_are_remembered_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_delays, "_MOST_PRODUCERS", 100)
    monkeypatch.setattr(native_delays, "_MOST_WAITING", 50)
    desk = Desk(**{f"p{n}": 60 for n in range(1_000)})
    for n in range(1, 101):
        assert len(desk.come(n * SECOND, *(f"p{10 * n - i}" for i in range(1, 11)))) == 10
    assert len(desk.watch._next) == 100
    assert desk.come(200 * SECOND, *(f"q{i}" for i in range(500))) == [f"q{i}" for i in range(10)]
    assert len(desk.watch._waiting) == 40
    [(_, text)] = desk.told()
    assert len(text) < 400
    assert text.endswith(" and 100 more")


@pytest.mark.slow
def test_a_look_at_rows_takes_no_time() -> None:
    rows = messages([(7, i, 1_000_000) for i in range(4_000)], publish_time=1_000_000)
    rows = with_columns(rows, producer_name=pa.array([f"p{i % 3}" for i in range(4_000)]))
    watch = NativeDelays(Troubles())
    started = time.perf_counter()
    for n in range(50):
        watch.came_in(ORDERS, rows, (n + 1) * SECOND)
    assert (time.perf_counter() - started) / 50 < 0.02  # seconds; about a millisecond
