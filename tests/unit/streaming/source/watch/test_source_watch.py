"""What the watch over the source topics calls standing still, with a broker and a receiver made by hand."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from broker.client import NoAnswerError, PulsarError
from broker.entries.continuity import CameEntry, Gap
from broker.position import START, Position, SourceTopic
from broker.protocol.consumer import ReceivedEntry
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from broker.pulsar_admin.topic_questions import Cursor
from conf.settings import Settings
from status.alerts import INTERNAL_ERROR, NOT_SEEN, STANDING, Alerts
from streaming.source.receiving.receiver import Limits, Receiver, ReceiverEvents, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from streaming.source.watch import source_watch, undecided_gaps
from streaming.source.watch.beginnings import Beginning
from streaming.source.watch.source_watch import SourceWatch
from streaming.source.watch.stalled_topics import STANDING_MILLIS
from streaming.source.watch.undecided_gaps import UndecidedGaps
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer, chunk, one
from tests.support.service.harness import wait_until
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables
from warehouse.schemas import REJECTS, SCHEMAS
from warehouse.unseen_entries import find_not_seen

ORDERS = "persistent://public/default/orders"
ALERTS = "persistent://public/default/alerts"
LAST = Position(7, 3)


@dataclass
class FakeReceiver:
    """A receiver that has had all up to entry 7:3 of a topic that ends with 7:5."""

    source: SourceTopic = field(default_factory=lambda: SourceTopic(ORDERS, ORDERS, -1))
    last_in_batch: Position = LAST
    last_received: Position = LAST
    problem: str | None = None
    waiting: int = 0
    is_idle: bool = False
    waits_for_turn: bool = False
    n_turns: int = 0
    n_connections: int = 1

    def connect_again(self) -> None:
        self.n_connections += 1

    def acknowledge_again(self, end: Position) -> None: ...

    def topic_end(self) -> Position:
        return Position(7, 5)


@dataclass
class FakeAdmin:
    """A broker's admin API, by which these entries are no messages."""

    parts: set[int]
    url: str = "http://broker"
    not_told: frozenset[int] = frozenset()
    failures: dict[str, dict[int, Exception]] = field(default_factory=dict)  # by topic and entry
    asked: list[int] = field(default_factory=list)
    ledgers: dict[int, int] = field(default_factory=lambda: {7: 6})

    def backlog(self, topic: str, subscription: str) -> int:
        return 2

    def has_room(self, topic: str, subscription: str) -> bool:
        return False

    def internal_stats(self, topic: str) -> TopicLedgers:
        return TopicLedgers(self.ledgers, {}, {}, Position(7, 5))

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry:
        self.asked.append(entry_id)
        if (error := self.failures.get(topic, {}).get(entry_id)) is not None:
            raise error
        if entry_id in self.not_told:
            raise NoAnswerError("no answer")
        is_no_message = entry_id in self.parts
        return BrokerEntry(1, 1, None, None, {}, False, is_no_message=is_no_message)

    def entry(self, topic: str, ledger_id: int, entry_id: int) -> tuple[dict[str, str], bytes]:
        return {}, b"bytes"

    def message_index(self, topic: str, ledger_id: int, entry_id: int) -> int:
        return 25 + entry_id

    def close(self) -> None: ...


class Watched:
    def __init__(self, folder: Path) -> None:
        self.receiver = FakeReceiver()
        self.troubles = Alerts()
        settings = Settings(warehouse=str(folder), checkpoint=str(folder / "checkpoint"))
        receivers = [cast("Receiver", self.receiver)]
        self.watch = SourceWatch(settings, self.troubles, lambda: receivers, lambda: None, Tables(str(folder)))

        self.watch.follow(self.receiver.source, START)
        self.folder, self.tables = folder, Tables(str(folder))
        self.answer_with(FakeAdmin(set()))

    def answer_with(self, admin: FakeAdmin) -> None:
        self.watch._admin.close()
        self.watch._admin = cast("Any", admin)

    def add(self, topic: str, *entries: int) -> None:
        """Notes that these entries of a topic did not come, each a gap."""
        source = SourceTopic(topic, topic, -1)
        self.watch._add(source, [Gap(Position(7, entry - 1), Position(7, entry + 1)) for entry in entries])

    def rejected(self) -> list[tuple[str, int]]:
        rows = self.tables.query("rejects", "SELECT topic, entry_id FROM rejects ORDER BY topic, entry_id")
        return list(zip(rows["topic"].to_pylist(), rows["entry_id"].to_pylist(), strict=True))

    def not_seen(self) -> list[str]:
        return [trouble.text for trouble in self.troubles.current() if trouble.kind == NOT_SEEN]

    def look(self, *parts: int) -> list[str]:
        """The texts of what stands after a minute, where these entries are no messages."""
        self.answer_with(FakeAdmin(set(parts)))
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


def test_who_waits_for_its_turn_is_not_cut_off_and_stands_when_nobody_has_turns(watched: Watched) -> None:
    watched.receiver.waits_for_turn = True
    texts = []
    for look in range(6):
        watched.receiver.n_turns += look < 3
        watched.watch.look(look * STANDING_MILLIS)
        texts.append([t.text for t in watched.troubles.current() if t.kind == STANDING])
    assert texts[:4] == [[], [], [], []]
    assert texts[5] == [
        "messages wait, and none was taken in: all receivers together hold as many bytes as they may, "
        "and no batch takes them"
    ]


def test_a_receiver_that_the_broker_takes_for_full_in_two_looks_connects_again(watched: Watched) -> None:
    receiver, watch = watched.receiver, watched.watch
    receiver.is_idle = True
    watch.look(0)
    assert receiver.n_connections == 1, "an entry may be on its way"
    receiver.last_received = Position(7, 4)
    watch.look(10_000)
    assert receiver.n_connections == 1, "it has come"
    watch.look(20_000)
    assert receiver.n_connections == 2
    watch.look(30_000)
    assert receiver.n_connections == 2, "the new consumer has a while, too"
    receiver.is_idle = False
    watch.look(40_000)
    receiver.is_idle = True
    watch.look(50_000)
    assert receiver.n_connections == 2, "it had something to do in between"


def test_an_entry_of_which_the_broker_tells_nothing_is_put_aside() -> None:
    admin = cast("AdminClient", FakeAdmin({2}, not_told=frozenset({3, 4})))
    source = SourceTopic(ORDERS, ORDERS, -1)
    found = find_not_seen(admin, source, Gap(Position(7, 1), Position(7, 5)), lambda _: None)
    assert found.rows["entry_id"].to_pylist() == [3, 4]
    assert all("the broker does not describe it" in reason for reason in found.rows["reason"].to_pylist())
    assert found.passed == 1


@pytest.mark.parametrize("error", [ValueError("odd"), PulsarError("the broker is away")])
def test_a_gap_that_cannot_be_decided_stays_and_holds_up_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(source_watch, "_GAPS_AT_ONCE", 4)
    watched.tables.create()
    admin = FakeAdmin({9}, failures={ORDERS: {1: error, 2: error}})
    watched.answer_with(admin)
    watched.add(ORDERS, 1, 2, 3, 4)
    watched.add(ALERTS, 1, 9)
    for _ in range(4):
        watched.watch.decide_gaps()
    assert watched.rejected() == [(ALERTS, 1), (ORDERS, 3), (ORDERS, 4)]
    [alert, order] = sorted(watched.not_seen())
    assert alert.startswith("1 entry was not seen")
    assert f"why is not known yet: {error}" in order
    admin.failures = {}
    watched.watch.decide_gaps()
    assert watched.rejected() == [(ALERTS, 1), *((ORDERS, n) for n in (1, 2, 3, 4))]
    admin.asked = []
    watched.watch.decide_gaps()
    assert not admin.asked


def test_what_was_trimmed_is_counted_when_the_index_of_the_entry_before_it_is_durable(watched: Watched) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), ledgers={10: 6}))
    source = SourceTopic(ORDERS, ORDERS, -1)
    watched.watch._add(source, [Gap(Position(7, 3), Position(10, 0), None, 25)])
    watched.watch.decide_gaps()
    [text] = watched.not_seen()
    assert text.endswith("why is not known yet: 7:3 is not durable yet")
    entry = {"topic": ORDERS, "partition": -1, "ledger_id": 7, "entry_id": 3, "batch_size": 2, "first_index": 8}
    watched.tables.append("entries", pa.Table.from_pylist([entry], schema=SCHEMAS["entries"]), {})
    watched.watch.decide_gaps()
    [reason] = watched.tables.query("rejects", "SELECT reason FROM rejects")["reason"].to_pylist()
    assert reason == "not seen: 15 messages by their indexes; the broker no longer has it"
    assert watched.rejected() == [(ORDERS, 4)]


def test_what_was_trimmed_is_not_counted_where_a_later_entry_is_durable_and_the_one_before_is_not_known(
    watched: Watched,
) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), ledgers={10: 6}))
    entry = {"topic": ORDERS, "partition": -1, "ledger_id": 10, "entry_id": 0, "batch_size": 1, "first_index": 25}
    watched.tables.append("entries", pa.Table.from_pylist([entry], schema=SCHEMAS["entries"]), {})
    watched.watch._add(SourceTopic(ORDERS, ORDERS, -1), [Gap(Position(7, 3), Position(10, 0), None, 25)])
    watched.watch.decide_gaps()
    assert watched.rejected() == []
    assert watched.not_seen() == []


def test_what_was_trimmed_at_the_end_of_a_topic_is_counted_although_nothing_comes_after_it(watched: Watched) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), ledgers={10: 6}))
    source = SourceTopic(ORDERS, ORDERS, -1)
    watched.watch.follow(source, Position(7, 2))([CameEntry(Position(7, 3), 2, 8)])
    watched.watch.passed(source, Position(10, 5))
    watched.watch.decide_gaps()
    reasons = watched.tables.query("rejects", "SELECT reason FROM rejects ORDER BY ledger_id")["reason"].to_pylist()
    assert reasons[0] == "not seen: 15 messages by their indexes; the broker no longer has it"
    assert watched.rejected() == [(ORDERS, n) for n in (0, 1, 2, 3, 4, 4, 5)]


def test_what_was_trimmed_at_the_end_after_an_entry_of_an_earlier_run_is_counted_when_that_is_durable(
    watched: Watched,
) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), ledgers={10: 6}))
    source = SourceTopic(ORDERS, ORDERS, -1)
    watched.watch.follow(source, Position(7, 3))
    watched.watch.passed(source, Position(10, 5))
    watched.watch.decide_gaps()
    [text] = watched.not_seen()
    assert text.endswith("why is not known yet: 7:3 is not durable yet")
    watched.watch.stop()
    following = Watched(watched.folder)
    following.answer_with(FakeAdmin(set(), ledgers={10: 6, 11: 0}))
    following.watch.follow(source, Position(7, 3))
    entry = {"topic": ORDERS, "partition": -1, "ledger_id": 7, "entry_id": 3, "batch_size": 2, "first_index": 8}
    watched.tables.append("entries", pa.Table.from_pylist([entry], schema=SCHEMAS["entries"]), {})
    following.watch.decide_gaps()
    following.watch.stop()
    reasons = watched.tables.query("rejects", "SELECT reason FROM rejects ORDER BY ledger_id")["reason"].to_pylist()
    assert reasons[0] == "not seen: 15 messages by their indexes; the broker no longer has it"
    assert watched.rejected() == [(ORDERS, n) for n in (0, 1, 2, 3, 4, 4, 5)]


@pytest.mark.parametrize("how", ["durable", "asked", "beginning", "not read"])
def test_a_gap_at_the_end_is_decided_where_the_entry_before_it_was_never_seen(watched: Watched, how: str) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), ledgers={10: 6}))
    source, watch = SourceTopic(ORDERS, ORDERS, -1), watched.watch
    gap = Gap(Position(7, 3), Position(10, 6))
    if how == "asked":  # it ended a gap itself
        watch.follow(source, Position(7, 1))
        watch._ends_asked[ORDERS] = Position(7, 3)
        watch.passed(source, Position(10, 5))
    elif how == "beginning":
        watch._beginnings.keep(ORDERS, Beginning(Position(7, 3), None))
        watch.begin(source)
        watch.passed(source, Position(10, 5))
    else:  # it was skipped at the end of an earlier run
        if how == "not read":
            del watch._continuity[ORDERS]
        else:
            watch.follow(source, Position(7, 3))
        watch._add(source, [gap])
        watch.decide_gaps()
        assert watched.rejected() == []
        watch.durable_through({ORDERS: "7:3"} if how == "durable" else {ALERTS: "8:0"})
    assert [open_gap.after for _, open_gap in watch._gaps.all()] == [Position(7, 3)]
    watch.decide_gaps()
    assert watched.rejected() == [(ORDERS, n) for n in range(6)]
    assert not watch._gaps.all()


def test_gaps_that_cannot_be_written_down_stay(watched: Watched) -> None:
    watched.add(ORDERS, 1)
    watched.watch.decide_gaps()
    [text] = watched.not_seen()
    assert "why is not known yet" in text
    watched.tables.create()
    watched.watch.decide_gaps()
    assert watched.rejected() == [(ORDERS, 1)]


def test_a_trouble_ends_with_the_last_gap_that_turns_out_to_be_no_message(watched: Watched) -> None:
    admin = FakeAdmin({1, 2}, failures={ORDERS: {2: PulsarError("away")}})
    watched.answer_with(admin)
    watched.add(ORDERS, 1, 2)
    watched.watch.decide_gaps()
    assert len(watched.not_seen()) == 1
    admin.failures = {}
    watched.watch.decide_gaps()
    assert watched.not_seen() == []


def test_a_gap_that_is_not_decided_before_a_stop_is_by_the_next_run(watched: Watched) -> None:
    watched.tables.create()
    watched.answer_with(FakeAdmin(set(), failures={ORDERS: {1: PulsarError("away")}}))
    watched.add(ORDERS, 1)
    watched.add(ALERTS, 2)
    watched.watch.decide_gaps()
    watched.add(ALERTS, 4)  # not asked about at all
    watched.watch.stop()
    following = Watched(watched.folder)
    following.watch.decide_gaps()
    following.watch.stop()
    assert watched.rejected() == [(ALERTS, 2), (ALERTS, 4), (ORDERS, 1)]
    last = Watched(watched.folder)
    last.answer_with(admin := FakeAdmin(set()))
    last.watch.decide_gaps()
    last.watch.stop()
    assert not admin.asked


class Followed:
    """A receiver of `ORDERS` whose entries the watch follows, from entry 7:3 on; the broker describes none of them."""

    def __init__(self, watched: Watched, after: Position = LAST) -> None:
        self.watched = watched
        watched.tables.create()
        watched.answer_with(FakeAdmin(set(), not_told=frozenset(range(20))))
        source = SourceTopic(ORDERS, ORDERS, -1)
        broker: Any = FakeBroker()
        broker.cursor_of = lambda: Cursor(after, self.end.next, self.end, {7: self.end.entry_id + 1})
        nobody: Any = None
        self.receiver = Receiver(
            source,
            TopicAccess(nobody, broker),
            after,
            Limits(1_000, 1 << 20),
            Acceptance(0, 1_000),
            ReceiverEvents(
                on_entries=watched.watch.follow(source, after),
                on_passed=functools.partial(watched.watch.passed, source),
            ),
        )

    def receive(self, *entries: list[ReceivedEntry], end: Position | None = None) -> None:
        """Receives entries, the last of the topic or those up to `end`, until the receiver takes the topic for read."""
        came = [entry for some in entries for entry in some]
        self.end = end or came[-1].position
        consumer: Any = FakeConsumer(came, self.end)
        self.receiver.wait_for(self.end, 0)
        for _ in range(3):
            self.receiver.receive(consumer)

    def rejected(self) -> list[int]:
        self.watched.watch.decide_gaps()
        return [entry for _, entry in self.watched.rejected()]


def test_chunks_that_came_are_not_missing_although_the_broker_can_describe_none_of_them(watched: Watched) -> None:
    followed = Followed(watched)
    chunks = [chunk(n, "a", n - 4, 3, 7) for n in (4, 5)]
    followed.receive(*chunks, one(6, 7), chunk(7, "b", 0, 3, 7), chunk(8, "a", 2, 3, 7))
    followed.receive(chunk(9, "b", 1, 3, 7), chunk(10, "b", 2, 3, 7), one(11, 7))
    assert followed.rejected() == []
    assert not cast("Any", watched.watch._admin).asked


def test_what_is_missing_between_chunks_is_named(watched: Watched) -> None:
    followed = Followed(watched)
    followed.receive(chunk(4, "a", 0, 2, 7), chunk(6, "a", 1, 2, 7), chunk(7, "b", 0, 2, 7), one(9, 7))
    assert followed.rejected() == [5, 8]


def test_the_last_chunk_of_a_message_whose_first_never_came_is_named(watched: Watched) -> None:
    followed = Followed(watched)
    followed.receive(chunk(4, "a", 1, 3, 7), chunk(5, "a", 2, 3, 7), one(6, 7))
    assert followed.rejected() == [5]


def test_chunks_at_the_end_of_a_topic_are_not_missing_and_it_does_not_stand(watched: Watched) -> None:
    followed = Followed(watched)
    followed.receive(chunk(4, "a", 0, 3, 7), chunk(5, "a", 1, 3, 7))
    assert followed.receiver.read_to == Position(7, 5)
    assert followed.rejected() == []
    for now in (0, STANDING_MILLIS):
        watched.watch.look(now)
    assert [t.text for t in watched.troubles.current() if t.kind == STANDING] == []


def test_chunks_that_come_again_to_a_next_run_are_not_missing_there(tmp_path: Path) -> None:
    first = Watched(tmp_path)
    before = Followed(first)
    before.receive(chunk(4, "a", 0, 2, 7), one(6, 7))  # the entry 7:5 did not come, and nobody has asked yet
    first.watch.stop()
    second = Watched(tmp_path)
    after = Followed(second, after=Position(7, 6))
    after.receive(chunk(4, "a", 0, 2, 7), one(6, 7), chunk(7, "b", 0, 2, 7), chunk(8, "a", 1, 2, 7))
    after.receive(chunk(9, "b", 1, 2, 7))
    assert after.rejected() == [5]
    second.watch.stop()


def test_entries_that_were_passed_over_at_the_end_before_a_stop_are_found_by_the_next_run(watched: Watched) -> None:
    followed = Followed(watched)
    assert not followed.receiver.wait_for(Position(7, 9), 0)
    followed.receive(end=Position(7, 5))
    assert followed.receiver.take_into_batch(100, 1 << 20)[0] == Position(7, 9)
    watched.watch.stop()
    following = Watched(watched.folder)
    following.watch.follow(SourceTopic(ORDERS, ORDERS, -1), Position(7, 9))
    following.watch.decide_gaps()
    following.watch.stop()
    assert watched.rejected() == [(ORDERS, 4), (ORDERS, 5)]


def test_gaps_beyond_a_number_are_not_kept_and_a_damaged_file_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undecided_gaps, "_MAX_STORED", 3)
    settings = Settings(checkpoint=str(tmp_path))
    source = SourceTopic(ORDERS, ORDERS, -1)
    added = [(source, Gap(Position(7, n), Position(7, n + 2), n, None)) for n in range(5)]
    gaps = UndecidedGaps(settings)
    for gap in added:
        gaps.add([gap])
    assert gaps.first(9) == added
    assert UndecidedGaps(settings).first(9) == added[:3]
    gaps.remove(added[:1], added[1:2])
    assert gaps.first(9) == [*added[2:], added[1]]
    assert UndecidedGaps(settings).first(9) == added[2:]
    (tmp_path / undecided_gaps.GAPS_FILE).write_text("[[")
    assert not UndecidedGaps(settings)


def test_gaps_that_cannot_be_written_down_now_are_later(tmp_path: Path) -> None:
    settings = Settings(checkpoint=str(tmp_path))
    gaps = UndecidedGaps(settings)
    (tmp_path / "query").write_text("in the way")
    added = (SourceTopic(ORDERS, ORDERS, -1), Gap(Position(7, 1), Position(7, 3)))
    gaps.add([added])
    assert gaps.first(9) == [added]
    (tmp_path / "query").unlink()
    gaps.write()
    assert UndecidedGaps(settings).first(9) == [added]


def test_the_watch_of_a_job_that_was_overtaken_before_it_began_writes_nothing(tmp_path: Path) -> None:
    first, source = Tables(str(tmp_path)), Tables(str(tmp_path))
    first.create()
    first.take_over(1)
    source.join(1)
    Tables(str(tmp_path)).take_over(2)
    watch = SourceWatch(Settings(warehouse=str(tmp_path)), Alerts(), lambda: [], lambda: None, source)
    watch.start()
    watch.stop()
    with pytest.raises(FencedError):
        source.append("rejects", REJECTS.empty_table(), {})


def test_the_watch_tells_of_an_error_that_nobody_expected_until_it_has_looked(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_watch, "_LOOK_SECONDS", 0.01)
    errors: list[Exception] = [OSError("no disk"), TypeError("a bug")]
    is_over = threading.Event()

    def look(now: int) -> None:
        if errors:
            raise errors.pop(0)
        is_over.wait(30)

    monkeypatch.setattr(watched.watch, "look", look)
    watched.watch.start()
    [alert] = wait_until(watched.troubles.current, 30, "the alert")
    assert (alert.kind, alert.name, alert.count) == (INTERNAL_ERROR, "watching the source topics", 1)
    assert "TypeError: a bug" in alert.text
    is_over.set()
    wait_until(lambda: not watched.troubles.current(), 30, "it is over")
