"""Several producers in one task: what one of them does never holds up the others, and is not lost nor doubled."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.client import NoAnswerError
from broker.protocol.building import OutgoingEntry, OutgoingMessage
from broker.protocol.producer import EntryTooLargeError
from broker.protocol.sending import RefusedEntry
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from streaming.release.task import send_on_time as send_on_time_module
from streaming.release.task.producer_line import Line
from streaming.release.task.send_on_time import send_on_time
from streaming.release.task.shared_paces import Pace
from tests.support.service.harness import wait_until
from warehouse.delta.fencing import PauseWatch

PATIENCE_SECONDS = 0.3


def refusal(error: int) -> RefusedError:
    return RefusedError(error, b"no")


@dataclass
class Topic:
    """A topic with deduplication, and what is wrong with it."""

    refuses: Exception | None = None  # what making a producer answers
    hangs: threading.Event | None = None  # making a producer takes until it is set
    silent_after: int | None = None  # so many messages are taken, then nothing is answered any more
    terminated_after: int | None = None  # so many are taken, then the topic is terminated
    quota_ends_at: int | None = None  # from this sequence id on a quota is exceeded
    too_big: frozenset[int] = frozenset()
    not_allowed: frozenset[int] = frozenset()  # sequence ids that a policy does not allow
    last_id: int = -1
    entries: list[int] = field(default_factory=list)
    steals: int | None = None  # after the first message somebody else publishes with this sequence id
    n_open: int = 0  # producers
    full: threading.Event = field(default_factory=threading.Event)  # set when it has 20 messages
    producers: list[FakeProducer] = field(default_factory=list)

    def create(self) -> Any:
        if self.hangs is not None and not self.hangs.wait(60):
            raise AssertionError("nothing has set it")
        if self.refuses is not None:
            raise self.refuses
        self.n_open += 1
        self.producers.append(FakeProducer(self))
        return self.producers[-1]


class FakeProducer:
    name, schema_version = b"p", b""

    def __init__(self, topic: Topic) -> None:
        self.topic, self.last_sequence_id = topic, topic.last_id
        self.is_open = True
        self.error: Exception | None = None
        self.repeated_to = -1
        self.n_pending = self.n_answers = 0
        self.max_message_bytes = 5 << 20
        self.is_in_chunks = False
        self.refused: list[RefusedEntry] = []

    def send(self, entry: OutgoingEntry, is_more: bool = False) -> None:
        if entry.sequence_id in self.topic.too_big:
            raise EntryTooLargeError("too large")
        self._take(entry)

    def flush(self) -> None:
        pass

    @property
    def has_arrived(self) -> bool:
        return not self.n_pending and not self.refused

    def _take(self, entry: OutgoingEntry) -> None:
        topic = self.topic
        self.n_pending += 1
        if self.error is not None or (topic.silent_after is not None and len(topic.entries) >= topic.silent_after):
            return
        if topic.terminated_after is not None and len(topic.entries) >= topic.terminated_after:
            self.error = topic.refuses = refusal(ServerError.TopicTerminatedError)
            return
        if topic.quota_ends_at is not None and entry.sequence_id >= topic.quota_ends_at:
            self.error = refusal(ServerError.ProducerBlockedQuotaExceededException)
            return
        self.n_pending -= 1
        if entry.sequence_id in topic.not_allowed:
            self.refused.append(RefusedEntry(entry, refusal(ServerError.NotAllowedError)))
            return
        if entry.sequence_id > topic.last_id:
            topic.entries += range(entry.sequence_id, entry.highest_sequence_id + 1)
            if len(topic.entries) == 20:
                topic.full.set()
            topic.last_id = entry.highest_sequence_id
        else:
            self.repeated_to = entry.highest_sequence_id
        self.last_sequence_id = max(self.last_sequence_id, entry.highest_sequence_id)
        if topic.steals is not None:
            topic.last_id = topic.steals

    def take_refused(self) -> list[RefusedEntry]:
        refused, self.refused = self.refused, []
        return refused

    def close(self) -> Callable[[float], None]:
        self.topic.n_open -= 1
        return lambda seconds: None


@dataclass
class Item:
    at: int
    sequence_id: int
    first_id: int
    line: Line
    is_batched: bool = False
    pace: Pace | None = None
    n_places: int = 1


def now() -> int:
    return time.time_ns() // 1_000_000


def lines_to(topics: Sequence[Topic], n: int = 20, **changes: Any) -> tuple[list[Line], list[Item]]:
    """A line to each topic, and `n` messages each, in turns, that are due 1 ms after another."""
    wake = threading.Event()
    begin = now() + 20
    lines = [
        Line(
            f"topic {i}",
            "producer",
            topic.create,
            **{
                "patience_seconds": PATIENCE_SECONDS,
                "max_id": 1_000,
                "ids": [*range(1, n + 1)],
                "wake": wake,
                **changes,
            },
        )
        for i, topic in enumerate(topics)
    ]
    return lines, [Item(begin + i, i + 1, i + 1, line) for i in range(n) for line in lines]


def run(lines: list[Line], items: list[Item], after: Sequence[int] = ()) -> tuple[list[int], dict[int, str]]:
    refused: dict[int, str] = {}

    def build(i: int) -> OutgoingMessage | None:
        is_there = items[i].first_id <= items[i].line.resume_after
        return None if is_there else OutgoingMessage(items[i].sequence_id, b"x")

    for line in lines:
        line.open()
    try:
        sent_at = send_on_time(items, build, refused.__setitem__, lines[0].wake, PauseWatch(lambda: None), after)
    finally:
        for line in lines:
            line.close()
    return sent_at, refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "reason", "is_refused", "n_there"),
    [
        (Topic(refuses=refusal(ServerError.TopicTerminatedError)), "TopicTerminated", True, 0),
        (Topic(refuses=refusal(ServerError.ProducerBlockedQuotaExceededError)), "ProducerBlockedQuota", True, 0),
        (Topic(refuses=refusal(ServerError.AuthorizationError)), "AuthorizationError", True, 0),
        (Topic(refuses=refusal(ServerError.IncompatibleSchema)), "IncompatibleSchema", True, 0),
        (Topic(refuses=refusal(ServerError.ProducerBusy)), "ProducerBusy", False, 0),
        (Topic(refuses=NoAnswerError("no answer")), "no answer", False, 0),
        (Topic(silent_after=0), "not answered", False, 0),
        (Topic(silent_after=7), "not answered", False, 7),
        (Topic(terminated_after=7), "TopicTerminated", True, 7),
        (Topic(quota_ends_at=8), "QuotaExceeded", True, 7),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_one_that_fails_holds_up_no_other(
    trouble: Topic, reason: str, is_refused: bool, n_there: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = [Topic(), Topic()]
    lines, items = lines_to([well[0], trouble, well[1]])
    is_waited_for = not is_refused  # else it fails at once
    failed_at: list[int] = []
    fail = lines[1].fail

    def note_failure(error: str, is_refused: bool = False) -> None:
        failed_at.append(now())
        fail(error, is_refused)

    monkeypatch.setattr(lines[1], "fail", note_failure)
    sent_at, _ = run(lines, items)
    assert [topic.entries for topic in well] == [list(range(1, 21))] * 2
    for item, at in zip(items, sent_at, strict=True):
        assert item.line.has_failed or item.at <= at, "never early"
        assert item.line.has_failed or not is_waited_for or at <= failed_at[0], "nor after the wait for the other"
    assert [line.has_failed for line in lines] == [False, True, False]
    assert reason in lines[1].error
    assert lines[1].is_refused == is_refused
    if n_there is not None:
        assert trouble.entries == list(range(1, n_there + 1))


@pytest.mark.slow
def test_a_producer_that_is_not_made_in_time_holds_up_no_other_and_is_closed_when_it_comes() -> None:
    offline, well = Topic(hangs=threading.Event()), Topic()
    lines, items = lines_to([offline, well])
    lines[1].patience_seconds = 60
    run(lines, items)
    assert [(line.has_failed, line.is_refused) for line in lines] == [(True, False), (False, False)]
    assert "no producer" in lines[0].error
    assert well.entries == list(range(1, 21))
    assert offline.hangs is not None
    offline.hangs.set()
    for thread in threading.enumerate():
        if thread.name.startswith("producer "):
            thread.join(10)
    assert offline.n_open == well.n_open == 0
    assert offline.entries == []


@pytest.mark.slow
def test_reading_what_has_arrived_under_other_names_may_take_longer_than_a_producer() -> None:
    [line], items = lines_to([topic := Topic()])

    def find() -> frozenset[Any]:
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while time.monotonic() < deadline:
            line.look_after()
        return frozenset()

    line.read_arrived_keys = find
    run([line], items)
    assert not line.has_failed
    assert topic.entries == list(range(1, 21))


@pytest.mark.slow
def test_what_is_sent_again_after_a_failure_comes_once() -> None:
    topic = Topic(terminated_after=7)
    run(*lines_to([topic]))
    topic.terminated_after, topic.refuses = None, None
    lines, items = lines_to([topic])
    run(lines, items)
    assert not lines[0].has_failed
    assert topic.entries == list(range(1, 21))


@pytest.mark.slow
def test_what_has_arrived_does_not_come_again_though_the_topic_is_made_anew_and_remembers_nothing() -> None:
    [line], items = lines_to([Topic(terminated_after=7)])
    run([line], items)
    assert line.has_failed
    anew = Topic()
    [again], items = lines_to([anew], resume_after=line.arrived_to)
    run([again], items)
    assert not again.has_failed
    assert anew.entries == list(range(8, 21))


def test_an_id_that_somebody_else_has_published_says_nothing_of_what_has_arrived() -> None:
    [line], items = lines_to([Topic(last_id=5_000)])
    run([line], items)
    assert (line.foreign_id, line.arrived_to) == (5_000, -1)


def test_nothing_is_sent_after_what_was_not_taken() -> None:
    """Else the broker's last sequence id would hide what is missing, and drop it when it is sent again."""
    topic = Topic(quota_ends_at=8)
    run(*lines_to([topic]))
    assert topic.entries == list(range(1, 8))
    topic.quota_ends_at = None
    run(*lines_to([topic]))
    assert topic.entries == list(range(1, 21))


def test_a_producer_that_is_not_made_in_time_wakes_the_task_once_and_not_in_each_round() -> None:
    hangs = threading.Event()
    [line], _ = lines_to([Topic(hangs=hangs)], patience_seconds=0.01)
    line.open()
    wait_until(lambda: bool(line.look_after()) or line.has_failed, 10, "it has no producer")
    assert line.wake.is_set()
    line.wake.clear()
    assert line.look_after() == []
    assert not line.wake.is_set(), "the task would go round and round while another line waits for its answers"
    hangs.set()
    line.close()


def test_a_producer_that_comes_late_sends_what_is_due_by_then_in_order() -> None:
    well = Topic()
    slow = Topic(hangs=well.full)  # for ever, if the other waited for it
    lines, items = lines_to([slow, well], patience_seconds=60)
    sent_at, _ = run(lines, items)
    assert slow.entries == well.entries == list(range(1, 21))
    assert all(at >= item.at for item, at in zip(items, sent_at, strict=True))


def test_producers_of_one_topic_send_what_is_overdue_in_order_though_one_of_them_comes_late() -> None:
    slow, quick = Topic(hangs=threading.Event()), Topic()
    slow.entries = quick.entries  # one topic, under two producers' names
    lines, items = lines_to([slow, quick], n=50, patience_seconds=60)
    for i, item in enumerate(items):
        item.at, item.sequence_id, item.first_id = now() - 1_000, i + 1, i + 1
    for line in lines:
        line.of_topic = lines
    assert slow.hangs is not None
    threading.Timer(0.15, slow.hangs.set).start()
    run(lines, items)
    assert not any(line.has_failed for line in lines)
    assert quick.entries == list(range(1, 101))


def each_after_the_one_before(items: list[Item]) -> list[int]:
    return [-1, *range(len(items) - 1)]


def test_a_message_waits_until_one_of_another_producer_has_arrived() -> None:
    slow, quick = Topic(hangs=threading.Event()), Topic()
    slow.entries = quick.entries  # what came to either, in order
    lines, items = lines_to([slow, quick], n=50, patience_seconds=60)
    for i, item in enumerate(items):
        item.sequence_id, item.first_id = i + 1, i + 1
    assert slow.hangs is not None
    threading.Timer(0.15, slow.hangs.set).start()
    run(lines, items, each_after_the_one_before(items))
    assert not any(line.has_failed for line in lines)
    assert quick.entries == list(range(1, 101))


@pytest.mark.slow
def test_what_waits_for_one_that_has_failed_fails_and_says_that_it_was_behind() -> None:
    lines, items = lines_to([Topic(terminated_after=7), well := Topic(), other := Topic()])
    after = [-1 if i % 3 != 1 else i - 1 for i in range(len(items))]
    run(lines, items, after)
    assert [(line.has_failed, line.is_behind) for line in lines] == [(True, False), (True, True), (False, False)]
    assert well.entries == list(range(1, 8))
    assert other.entries == list(range(1, 21))


def test_what_the_client_refuses_or_has_arrived_before_holds_up_none() -> None:
    lines, items = lines_to([Topic(too_big=frozenset({5}), last_id=3), well := Topic()], resume_after=-1)
    _, refused = run(lines, items, [-1 if i % 2 == 0 else i - 1 for i in range(len(items))])
    assert list(refused) == [8]
    assert not any(line.has_failed for line in lines)
    assert well.entries == list(range(1, 21))


@pytest.mark.slow
def test_one_that_gets_no_producer_holds_up_the_others_to_its_topic_no_longer_than_it_is_waited_for() -> None:
    lines, items = lines_to([Topic(refuses=refusal(ServerError.ProducerBusy)), well := Topic()])
    for line in lines:
        line.of_topic = lines
    run(lines, items)
    assert [line.has_failed for line in lines] == [True, False]
    assert well.entries == list(range(1, 21))


def test_a_batch_goes_whole_also_where_its_producer_comes_late() -> None:
    topic = Topic(hangs=threading.Event())
    lines, _ = lines_to([topic], patience_seconds=60)
    begin = now()
    items = [Item(begin, i + 1, i // 10 * 10 + 1, lines[0], True) for i in range(400)]
    assert topic.hangs is not None
    threading.Timer(0.1, topic.hangs.set).start()
    run(lines, items)
    assert not lines[0].has_failed
    assert topic.entries == list(range(1, 401))


def test_a_message_that_the_client_refuses_is_named_and_the_others_go() -> None:
    topic = Topic(too_big=frozenset({5, 20}))
    lines, items = lines_to([topic])
    _, refused = run(lines, items)
    assert not lines[0].has_failed
    assert [items[i].sequence_id for i in refused] == [5, 20]
    assert all(reason.startswith("MessageTooBig: ") for reason in refused.values())
    assert topic.entries == [i for i in range(1, 20) if i != 5]


def test_a_sequence_id_that_nobody_of_us_used_is_noticed_before_anything_is_dropped() -> None:
    topic = Topic(last_id=5_000_000)
    lines, items = lines_to([topic])
    run(lines, items)
    assert lines[0].foreign_id == 5_000_000
    assert topic.entries == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sequence_id_within_a_release_is_foreign_where_it_is_sent_for_the_first_time(is_first: bool) -> None:
    topic = Topic(last_id=7)
    lines, items = lines_to([topic], is_first_attempt=is_first)
    run(lines, items)
    assert lines[0].foreign_id == (7 if is_first else None)
    assert topic.entries == ([] if is_first else list(range(8, 21)))


@pytest.mark.parametrize("foreign_id", [5_000_000, 900])
def test_somebody_who_publishes_in_between_is_noticed_by_what_the_broker_took_for_a_repetition(foreign_id: int) -> None:
    topic = Topic(steals=foreign_id)
    lines, items = lines_to([topic])
    run(lines, items)
    lines[0].check_repeated()
    assert lines[0].foreign_id == foreign_id
    assert topic.entries == [1]


def test_a_repetition_after_a_lost_answer_is_none_of_it() -> None:
    topic = Topic()
    lines, items = lines_to([topic])
    run(lines, items)
    lines[0].resume_after = -1
    topic.producers[0].repeated_to = 20
    lines[0].check_repeated()
    assert not lines[0].has_failed
    assert len(topic.producers) == 2, "the broker was asked"


def test_what_a_policy_does_not_allow_is_named_alone_and_nobody_waits_for_it() -> None:
    topic, other = Topic(not_allowed=frozenset({5, 20})), Topic()
    lines, items = lines_to([topic, other])
    _, refused = run(lines, items, [-1 if i % 2 == 0 else i - 1 for i in range(len(items))])
    assert not any(line.has_failed for line in lines)
    assert {items[i].sequence_id: why for i, why in refused.items()} == dict.fromkeys([5, 20], "NotAllowedError: no")
    assert topic.entries == [i for i in range(1, 20) if i != 5]
    assert other.entries == list(range(1, 21))


def test_a_batch_that_a_policy_does_not_allow_fails_its_line() -> None:
    topic = Topic(not_allowed=frozenset({1}))
    lines, _ = lines_to([topic])
    run(lines, [Item(now(), i + 1, 1, lines[0], True) for i in range(20)])
    assert (lines[0].error, lines[0].is_refused) == ("NotAllowedError: no", True)


def test_while_a_producer_looks_for_its_broker_nothing_is_given_to_it_and_the_others_go_on() -> None:
    lost, well = Topic(), Topic()
    lines, items = lines_to([lost, well], patience_seconds=60)
    create = lost.create

    def opened_lost() -> Any:
        producer = create()
        producer.is_open = False
        threading.Timer(0.1, setattr, [producer, "is_open", True]).start()
        return producer

    lines[0].create = opened_lost
    sent_at, _ = run(lines, items)
    assert lost.entries == well.entries == list(range(1, 21))
    assert max(sent_at[1::2]) < min(sent_at[::2])


def test_a_turn_does_not_end_between_the_chunks_of_its_first_message() -> None:
    lines, _ = lines_to([Topic()], patience_seconds=60, ends_at=time.monotonic())
    line = lines[0]
    line.open()
    wait_until(lambda: line.producer is not None, 20, "it is open")
    producer = line.producer
    assert isinstance(producer, FakeProducer)
    producer.n_pending, producer.is_in_chunks = 1, True
    line.look_after()
    assert not line.error
    producer.last_sequence_id = 1  # it has arrived, and the next one begins
    line.look_after()
    assert line.is_slow
    assert "19 messages of its turn are left" in line.error


@pytest.mark.slow
def test_a_broker_that_answers_chunk_by_chunk_is_waited_for() -> None:
    lines, _ = lines_to([Topic()], patience_seconds=0.2)
    line = lines[0]
    line.open()
    wait_until(lambda: line.producer is not None, 20, "it is open")
    producer = line.producer
    assert isinstance(producer, FakeProducer)
    producer.n_pending = 1
    ends_at = time.monotonic() + 0.5
    while time.monotonic() < ends_at:
        producer.n_answers += 1
        line.look_after()
    assert not line.error
    while not line.error:
        line.look_after()
    assert "has not answered" in line.error


def test_a_topic_that_is_terminated_when_all_has_arrived_fails_no_line() -> None:
    """Its messages would be rejected later, though they are there."""
    early, late = Topic(), Topic()
    lines, items = lines_to([early, late], patience_seconds=0.05)
    for item in items[1::2]:
        item.at += 300
    watch = threading.Timer(0.15, lambda: setattr(early.producers[0], "error", refusal(15)))
    watch.start()
    run(lines, sorted(items, key=lambda item: item.at))
    watch.join()
    assert [line.error for line in lines] == ["", ""]
    assert early.entries == late.entries == list(range(1, 21))


def test_lines_with_which_nothing_goes_on_are_not_looked_after_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a message of one of hundreds of topics would cost a look at each of the others."""
    topics = [Topic() for _ in range(100)]
    lines, _ = lines_to(topics, n=1, patience_seconds=60)
    for line in lines:
        line.open()
    wait_until(lambda: all(line.producer is not None for line in lines), 20, "they are open")
    n_looks = 0
    look_after = Line.look_after

    def counted(line: Line) -> list[RefusedEntry]:
        nonlocal n_looks
        n_looks += 1
        return look_after(line)

    monkeypatch.setattr(Line, "look_after", counted)
    monkeypatch.setattr(send_on_time_module, "_LOOK_SECONDS", 1e9)
    begin = now() + 20
    items = [Item(begin + i, 1, 1, line) for i, line in enumerate(lines)]
    build = lambda i: OutgoingMessage(1, b"x")  # noqa: E731
    send_on_time(items, build, lambda i, why: None, lines[0].wake, PauseWatch(lambda: None))
    assert all(topic.entries == [1] for topic in topics)
    assert n_looks <= 5 * len(lines)


def test_what_has_failed_while_nothing_went_on_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_on_time_module, "_LOOK_SECONDS", 1e9)
    lines, items = lines_to([Topic(), Topic()], n=2, patience_seconds=60)
    failing = lines[0]
    items[2].at += 300
    items[3].at += 300

    def build(i: int) -> OutgoingMessage:
        return OutgoingMessage(items[i].sequence_id, b"x")

    def end() -> None:
        wait_until(lambda: failing.producer is not None and failing.producer.last_sequence_id == 1, 20, "it is there")
        assert isinstance(failing.producer, FakeProducer)
        failing.producer.error = refusal(ServerError.TopicTerminatedError)

    ending = threading.Thread(target=end)
    ending.start()
    for line in lines:
        line.open()
    send_on_time(items, build, lambda i, why: None, lines[0].wake, PauseWatch(lambda: None))
    ending.join()
    assert [(line.has_failed, line.arrived_to) for line in lines] == [(True, 1), (False, 2)]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_producer_that_is_begun_and_refused_is_made_as_if_it_had_not_been(is_refused: bool) -> None:
    [line], items = lines_to([topic := Topic()], patience_seconds=60)
    error = refusal(ServerError.ServiceNotReady) if is_refused else None

    def begin(on_opened: Any) -> Any:
        producer = topic.create()
        threading.Timer(0.05, on_opened, [producer, error]).start()
        return producer

    line.begin = begin
    run([line], items)
    assert not line.has_failed
    assert topic.entries == list(range(1, 21))
    assert len(topic.producers) == 1 + is_refused


def test_a_producer_that_is_begun_and_not_answered_fails_its_line_and_is_closed() -> None:
    topic, well = Topic(), Topic()
    lines, items = lines_to([topic, well])
    lines[0].begin = lambda on_opened: topic.create()
    run(lines, items)
    assert [line.has_failed for line in lines] == [True, False]
    assert "no producer" in lines[0].error
    assert (topic.n_open, topic.entries) == (0, [])
    assert well.entries == list(range(1, 21))


class LateProducer(FakeProducer):
    """Answers in a thread, a millisecond after another; knows how many bytes were not answered at most."""

    def __init__(self, topic: Topic, wake: threading.Event) -> None:
        super().__init__(topic)
        self._waiting: queue.Queue[OutgoingEntry] = queue.Queue()
        self._wake = wake
        self.n_bytes = self.most_bytes = 0
        threading.Thread(target=self._answer, daemon=True).start()

    def send(self, entry: OutgoingEntry, is_more: bool = False) -> None:
        self.n_pending += 1
        self.n_bytes += SIZE
        self.most_bytes = max(self.most_bytes, self.n_bytes)
        self._waiting.put(entry)

    def _answer(self) -> None:
        while True:
            entry = self._waiting.get()
            time.sleep(0.001)
            self.n_bytes -= SIZE
            self._take(entry)
            self.n_pending -= 1
            self._wake.set()


SIZE = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("not_allowed", [frozenset(), frozenset(range(1, 61)), frozenset([9, 10, 60])], ids=len)
def test_of_large_messages_few_are_in_memory_and_all_arrive(not_allowed: frozenset[int]) -> None:
    topic = Topic(not_allowed=not_allowed)
    [line], items = lines_to([topic], 60, patience_seconds=60)
    producers: list[LateProducer] = []

    def create() -> Any:
        producers.append(LateProducer(topic, line.wake))
        return producers[-1]

    line.create = create
    refused: list[int] = []
    built = most_built = 0

    def build(i: int) -> OutgoingMessage:
        nonlocal built, most_built
        built += 1
        sent = producers[0].last_sequence_id if producers else 0
        most_built = max(most_built, built - max(sent, 0))
        return OutgoingMessage(items[i].sequence_id, bytes(SIZE))

    line.open()
    send_on_time(items, build, lambda i, why: refused.append(i + 1), line.wake, PauseWatch(lambda: None))
    assert topic.entries == [i for i in range(1, 61) if i not in not_allowed]
    assert sorted(refused) == sorted(not_allowed)
    assert 2 * SIZE < producers[0].most_bytes <= 9 * SIZE
    if not not_allowed:
        assert most_built <= 18, "eight that were handed over, eight that are ready, and the next"
