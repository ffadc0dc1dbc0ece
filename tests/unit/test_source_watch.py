"""What the watch over the source topics calls standing still, with a broker and a receiver made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from conf.settings import Settings
from streaming.broker_side import BrokerSide
from streaming.continuity import Gap
from streaming.not_seen import find_not_seen
from streaming.position import Position, SourceTopic
from streaming.pulsar_client import AdminClient, BrokerEntry, NoAnswerError, TopicLedgers
from streaming.receiver import Receiver
from streaming.source_watch import SourceWatch
from streaming.standing import STANDING_MILLIS
from streaming.tables import Tables
from streaming.troubles import STANDING, Troubles

ORDERS = "persistent://public/default/orders"
LAST = Position(7, 3)


@dataclass
class FakeReceiver:
    """A receiver that has had all up to entry 7:3 of a topic that ends with 7:5."""

    source: SourceTopic = field(default_factory=lambda: SourceTopic(ORDERS, ORDERS, -1))
    last_cut: Position = LAST
    last_received: Position = LAST
    problem: str | None = None
    waiting: int = 0
    is_idle: bool = False

    def acknowledge_again(self, end: Position) -> None: ...

    def end(self) -> Position:
        return Position(7, 5)


@dataclass
class FakeAdmin:
    """A broker's admin API, by which these entries are no messages."""

    parts: set[int]
    url: str = "http://broker"
    not_told: frozenset[int] = frozenset()

    def backlog(self, topic: str, subscription: str) -> int:
        return 2

    def internal_stats(self, topic: str) -> TopicLedgers:
        return TopicLedgers({7: 6}, {}, {}, Position(7, 5))

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry:
        if entry_id in self.not_told:
            raise NoAnswerError("no answer")
        is_no_message = entry_id in self.parts
        return BrokerEntry(1, 1, None, None, {}, False, is_first_chunk=False, is_no_message=is_no_message)

    def close(self) -> None: ...


class Watched:
    def __init__(self, folder: Path) -> None:
        self.receiver = FakeReceiver()
        self.troubles = Troubles()
        settings = Settings(warehouse=str(folder))
        receivers = [cast("Receiver", self.receiver)]
        self.watch = SourceWatch(settings, self.troubles, lambda: receivers, lambda: None, Tables(str(folder)))

    def look(self, *parts: int) -> list[str]:
        """The texts of what stands after a minute, where these entries are no messages."""
        self.watch._admin.close()
        self.watch._admin = cast("Any", FakeAdmin(set(parts)))
        for now in (0, STANDING_MILLIS):
            self.watch.look(now)
        return [t.text for t in self.troubles.current() if t.kind == STANDING]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.watch.stop()


def test_a_topic_that_ends_with_a_part_of_a_chunked_message_does_not_stand(watched: Watched) -> None:
    assert watched.look(4, 5) == []


@pytest.mark.parametrize("parts", [(), (5,), (4,)])
def test_a_message_among_the_parts_waits(watched: Watched, parts: tuple[int, ...]) -> None:
    assert watched.look(*parts) == ["messages wait, and none was taken in: the broker hands over none"]


def test_what_has_come_in_and_is_in_no_batch_waits(watched: Watched) -> None:
    watched.receiver.waiting = 3
    watched.receiver.last_received = Position(7, 5)
    assert watched.look(4, 5) == ["messages wait, and none was taken in: they have come in, and no batch takes them"]


def test_an_entry_of_which_the_broker_tells_nothing_is_put_aside_and_may_begin_a_chunked_message() -> None:
    admin = cast("AdminClient", FakeAdmin({2}, not_told=frozenset({3, 4})))
    source = SourceTopic(ORDERS, ORDERS, -1)
    found = find_not_seen(admin, source, Gap(Position(7, 1), Position(7, 5)), lambda _: None)
    assert found.rows["entry_id"].to_pylist() == [3, 4]
    assert all("the broker does not tell what it is" in reason for reason in found.rows["reason"].to_pylist())
    assert found.passed == 1
    assert BrokerSide(admin, "delaylake").is_first_chunk(ORDERS, Position(7, 3))
