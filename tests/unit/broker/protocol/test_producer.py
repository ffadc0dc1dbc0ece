"""A producer whose broker goes away, refuses, or is silent: what is not answered is sent again, or it says why not."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from broker.client import NoAnswerError, PulsarError
from broker.protocol import producer
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingEntry, OutgoingMessage, encoded_property, large_message, single_entry
from broker.protocol.frames import encode
from broker.protocol.producer import EntryProducer, EntryTooLargeError
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import Command, ServerError
from conf.settings import PulsarSettings
from tests.support.service.harness import wait_until
from tests.unit.broker.protocol.test_brokers import TOPIC, Server


class Broker(Server):
    """A broker that takes entries, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[int] = []
        self.refuses_producers: list[int] = []  # the errors with which the next ones are refused
        self.refuses_entries: list[int] = []
        self.is_silent = False  # answers neither producers nor entries
        self.pauses: threading.Event | None = None  # reads nothing after an entry until it is set
        self.is_waited_for = 0  # so many producers are told to wait first

    def _answer(self, command: Command) -> bytes:
        if command.type == Command.SEND and self.pauses is not None:
            self.pauses.wait(20)
        if command.type == Command.PRODUCER and not self.is_silent:
            request_id = command.producer.request_id
            if self.refuses_producers:
                error = {"request_id": request_id, "error": self.refuses_producers.pop(0), "message": b"no"}
                return encode(Command.ERROR, error=error)
            answer = {"request_id": request_id, "last_sequence_id": max(self.arrived, default=-1)}
            waits = b""
            if self.is_waited_for:
                self.is_waited_for -= 1
                waits = encode(Command.PRODUCER_ANSWER, producer_answer={"request_id": request_id, "is_ready": False})
            return waits + encode(Command.PRODUCER_ANSWER, producer_answer=answer)
        if command.type == Command.SEND and not self.is_silent:
            ids = {"producer_id": command.send.producer_id, "sequence_id": command.send.sequence_id}
            if self.refuses_entries:
                return encode(Command.SEND_ERROR, send_error={**ids, "error": self.refuses_entries.pop(0)})
            is_new = command.send.sequence_id > max(self.arrived, default=-1)
            if is_new:
                self.arrived.append(command.send.sequence_id)
            ledger = 1 if is_new else (1 << 64) - 1
            receipt = {**ids, "highest_sequence_id": command.send.highest_sequence_id, "id": {"ledger_id": ledger}}
            return encode(Command.SEND_RECEIPT, send_receipt=receipt)
        if command.type == Command.CLOSE_PRODUCER:
            return encode(Command.SUCCESS, success={"request_id": command.close_producer.request_id})
        if command.type == Command.PARTITIONS:
            answer = {"request_id": command.partitions.request_id, "n": 3}
            return encode(Command.PARTITIONS_ANSWER, partitions_answer=answer)
        return super()._answer(command)

    def ends_producers(self) -> None:
        """As when a topic is unloaded."""
        last = self.of(Command.PRODUCER)[-1].producer.producer_id
        self.connections[-1].sendall(encode(Command.CLOSE_PRODUCER, close_producer={"producer_id": last}))


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def brokers(broker: Broker) -> Iterator[Brokers]:
    made = Brokers(PulsarSettings(service_url=broker.url))
    yield made
    made.close()


def entry(sequence_id: int, size: int = 3) -> OutgoingEntry:
    return single_entry(OutgoingMessage(sequence_id, b"x" * size), b"p", 1)


def send(producer: EntryProducer, *sequence_ids: int) -> None:
    for sequence_id in sequence_ids:
        producer.send(entry(sequence_id))
    wait_until(lambda: not producer.n_pending, 10, "all is answered")


def test_it_has_its_name_hears_of_receipts_and_is_closed(broker: Broker, brokers: Brokers) -> None:
    progress: list[int] = []
    broker.arrived = [4]
    broker.is_waited_for = 1
    producer = brokers.produce(TOPIC, "p", on_progress=lambda: progress.append(1))
    assert (producer.last_sequence_id, producer.repeated_to, producer.is_open) == (4, -1, True)
    send(producer, 4, 5)
    assert (producer.last_sequence_id, producer.repeated_to) == (5, 4)
    wait_until(lambda: len(progress) == 2, 5, "it says so")
    producer.close()(5)
    assert broker.of(Command.PRODUCER)[0].producer.producer_name == "p"
    assert broker.of(Command.CLOSE_PRODUCER)
    assert brokers.partitions(TOPIC) == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unloaded", "disconnected"])
def test_what_is_not_answered_is_sent_again_where_the_topic_is_then(broker: Broker, brokers: Brokers, how: str) -> None:
    producer = brokers.produce(TOPIC, "p")
    send(producer, 1)
    broker.is_silent = True
    for sequence_id in (2, 3):
        producer.send(entry(sequence_id))
    wait_until(lambda: len(broker.of(Command.SEND)) == 3, 5, "all is sent")
    broker.is_silent = False
    broker.refuses_producers = [ServerError.ServiceNotReady, ServerError.ProducerBusy]
    if how == "unloaded":
        broker.ends_producers()
    else:
        broker.connections[-1].shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not producer.n_pending, 10, "all is answered")
    assert broker.arrived == [1, 2, 3]
    assert producer.last_sequence_id == 3
    epochs = [command.producer.epoch for command in broker.of(Command.PRODUCER)]
    assert epochs == [0, 1, 1, 1]
    assert len(broker.of(Command.LOOKUP)) == 4


def test_an_error_that_may_pass_has_it_opened_again_and_the_entry_sent_again(broker: Broker, brokers: Brokers) -> None:
    producer = brokers.produce(TOPIC, "p")
    broker.refuses_entries = [ServerError.PersistenceError]
    send(producer, 1)
    assert broker.arrived == [1]
    assert len(broker.of(Command.CLOSE_PRODUCER)) == 1
    assert len(broker.of(Command.PRODUCER)) == 2


def test_an_entry_that_the_topics_policy_does_not_take_is_refused_alone(broker: Broker, brokers: Brokers) -> None:
    producer = brokers.produce(TOPIC, "p")
    broker.refuses_entries = [ServerError.NotAllowedError]
    send(producer, 1, 2)
    assert [one.entry.sequence_id for one in producer.take_refused()] == [1]
    assert producer.take_refused() == []
    assert (broker.arrived, producer.error) == ([2], None)


@pytest.mark.slow
def test_a_producer_that_is_refused_when_it_comes_again_says_why(broker: Broker, brokers: Brokers) -> None:
    producer = brokers.produce(TOPIC, "p")
    broker.refuses_producers = [ServerError.TopicTerminatedError]
    broker.ends_producers()
    wait_until(lambda: producer.error is not None, 5, "it is refused")
    assert str(producer.error) == "TopicTerminatedError: no"
    broker.refuses_entries = [ServerError.ProducerFenced]
    other = brokers.produce(TOPIC, "q")
    other.send(entry(1))
    wait_until(lambda: other.error is not None, 5, "it is fenced")
    assert not other.is_open


def test_one_that_is_refused_at_once_or_not_answered_raises(broker: Broker) -> None:
    brokers = Brokers(PulsarSettings(service_url=broker.url), request_seconds=0.05)
    broker.refuses_producers = [ServerError.ProducerBusy]
    with pytest.raises(RefusedError, match="ProducerBusy: no"):
        brokers.produce(TOPIC, "p")
    broker.is_silent = True
    with pytest.raises(NoAnswerError):
        brokers.produce(TOPIC, "p")
    wait_until(lambda: bool(broker.of(Command.CLOSE_PRODUCER)), 5, "the name is given away again")
    brokers.close()


def test_one_that_is_begun_does_not_wait_and_asks_nobody_for_a_broker_that_is_known(
    broker: Broker, brokers: Brokers
) -> None:
    opened: queue.Queue[tuple[EntryProducer, PulsarError | None]] = queue.Queue()

    def begin() -> EntryProducer | None:
        return brokers.begin_producing(TOPIC, "p", lambda: None, lambda *answer: opened.put(answer))

    assert begin() is None, "nobody knows its broker"
    brokers.produce(TOPIC, "p").close()(5)
    producer = begin()
    assert producer is not None
    assert opened.get(timeout=60) == (producer, None)
    send(producer, 1)
    assert (broker.arrived, producer.last_sequence_id) == ([1], 1)
    assert len(broker.of(Command.LOOKUP)) == 1
    broker.refuses_producers = [ServerError.ServiceNotReady]
    refused = begin()
    one, error = opened.get(timeout=60)
    assert (one, str(error)) == (refused, "ServiceNotReady: no")
    assert not one.is_open


def test_one_that_is_closed_before_the_broker_answers_is_closed_there(broker: Broker, brokers: Brokers) -> None:
    opened: queue.Queue[tuple[EntryProducer, PulsarError | None]] = queue.Queue()
    brokers.produce(TOPIC, "p").close()(5)
    broker.is_silent = True
    producer = brokers.begin_producing(TOPIC, "p", lambda: None, lambda *answer: opened.put(answer))
    assert producer is not None
    assert not producer.is_open
    producer.close()(5)
    assert len(broker.of(Command.CLOSE_PRODUCER)) == 2
    brokers.close()
    one, error = opened.get(timeout=60)
    assert one is producer
    assert isinstance(error, DisconnectedError)
    assert brokers.begin_producing(TOPIC, "p", lambda: None, lambda *_: None) is None


def test_one_that_is_closed_does_not_come_again(
    broker: Broker, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_FIRST_WAIT_SECONDS", 0.01)
    opened = brokers.produce(TOPIC, "p")
    broker.refuses_producers = [ServerError.ServiceNotReady] * 1_000
    broker.ends_producers()
    wait_until(lambda: len(broker.of(Command.PRODUCER)) > 1, 5, "it is opened again")
    opened.close()(1)
    broker.refuses_producers = []
    wait_until(lambda: not opened.is_open, 5, "it is closed")
    brokers.close()
    with pytest.raises(DisconnectedError):
        brokers.produce(TOPIC, "p")


def test_one_that_is_closed_while_it_looks_for_its_broker_again_is_not_opened_there(
    broker: Broker, brokers: Brokers
) -> None:
    opened = brokers.produce(TOPIC, "p")
    found, answers = broker.lookup, threading.Event()
    asked = threading.Event()

    def lookup(command: Command) -> dict[str, object]:
        asked.set()
        answers.wait(20)
        return found(command)

    broker.lookup = lookup
    broker.ends_producers()
    assert asked.wait(20)
    opened.close()(1)
    answers.set()
    wait_until(lambda: not _is_opening(), 20, "it looks for its broker no more")
    assert len(broker.of(Command.PRODUCER)) == 1
    assert not opened.is_open


def _is_opening() -> bool:
    return any(thread.name == f"producer {TOPIC}" for thread in threading.enumerate())


def test_an_entry_that_is_too_large_is_refused_before_it_is_sent(broker: Broker, brokers: Brokers) -> None:
    producer = brokers.produce(TOPIC, "p")
    with pytest.raises(EntryTooLargeError, match="an entry of 52429"):
        producer.send(entry(1, 5 << 20))
    texts = [encoded_property("large", "x" * (3 << 20))]
    with pytest.raises(EntryTooLargeError, match="keys and properties have 31457"):
        producer.send(large_message(OutgoingMessage(1, b"x" * (3 << 20), texts), b"p", 1))
    send(producer, 2)
    assert broker.arrived == [2]


@pytest.mark.slow
def test_a_broker_that_reads_nothing_for_a_while_gets_all_in_order_later(broker: Broker, brokers: Brokers) -> None:
    broker.arrived, broker.pauses = [], threading.Event()
    producer = brokers.produce(TOPIC, "p")
    for sequence_id in range(1, 41):
        producer.send(entry(sequence_id, 1 << 20), is_more=sequence_id % 7 != 0)
    producer.flush()
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.2, "it waits"
    assert len(broker.arrived) < 40
    broker.pauses.set()
    wait_until(lambda: not producer.n_pending, 20, "all is answered")
    assert broker.arrived == list(range(1, 41))
