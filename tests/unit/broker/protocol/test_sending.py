"""What is not answered is sent again, in order; answers, errors and repetitions are told apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.protocol.building import (
    LargeMessage,
    OutgoingEntry,
    OutgoingMessage,
    batch_entry,
    encoded_property,
    large_message,
    single_entry,
)
from broker.protocol.entries import open_envelope
from broker.protocol.frames import FrameDecoder, ProtocolError
from broker.protocol.sending import REFUSALS, PartlySentError, Sending, is_refusal
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import MessageMetadata, SendError, SendReceipt, ServerError
from tests.support.fuzzing.examples import examples

NONE = (1 << 64) - 1
MAX_BYTES = 5 << 20
SMALL_BYTES = 3_000
CHUNK = 2_400  # bytes that are in one chunk where entries have SMALL_BYTES


def entry(first: int, n: int = 1) -> OutgoingEntry:
    return batch_entry([OutgoingMessage(first + i, b"x") for i in range(n)], b"p", 1)


def receipt(first: int, ledger_id: int = 1) -> SendReceipt:
    return SendReceipt(producer_id=1, sequence_id=first, id={"ledger_id": ledger_id, "entry_id": 0})


def frames(sending: Sending) -> list[bytes]:
    return list(iter(sending.next_frame, b""))


def ids(*frames: bytes) -> list[int]:
    return [frame.command.send.sequence_id for data in frames for frame in FrameDecoder().feed(data)]


def begun(*firsts: int) -> Sending:
    sending = Sending()
    sending.open(1, -1, MAX_BYTES)
    assert frames(sending) == []
    for first in firsts:
        sending.send(entry(first, 2))
        assert ids(*frames(sending)) == [first]
    return sending


def test_receipts_come_in_order_and_say_what_has_arrived() -> None:
    sending = begun(1, 3)
    sending.receipt(receipt(1))
    assert (sending.last_sequence_id, sending.n_pending, sending.repeated_to) == (2, 1, -1)
    sending.receipt(receipt(1))  # once more, as after it was sent again
    sending.receipt(receipt(3, NONE))
    assert (sending.last_sequence_id, sending.n_pending, sending.repeated_to) == (4, 0, 4)
    sending.receipt(receipt(3))
    assert sending.last_sequence_id == 4


def test_a_receipt_that_leaves_one_out_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="answers the sequence id 3, and not 1 before it"):
        begun(1, 3).receipt(receipt(3))
    with pytest.raises(ProtocolError):
        begun(1, 3).fail(SendError(sequence_id=9, error=ServerError.NotAllowedError))


def test_what_is_not_answered_is_sent_again_under_the_new_id_and_the_rest_waits_until_then() -> None:
    sending = begun(1, 3)
    sending.receipt(receipt(1))
    sending.lose()
    assert not sending.is_open
    sending.send(entry(5))
    assert frames(sending) == []
    sending.open(7, 2, MAX_BYTES)
    first, second = frames(sending)
    assert ids(first, second) == [3, 5]
    [again] = FrameDecoder().feed(first)
    assert again.command.send.producer_id == 7
    assert sending.last_sequence_id == 2


@pytest.mark.parametrize("error", sorted(ServerError.values()))
def test_each_error_ends_the_producer_or_refuses_one_entry_or_lets_it_open_again(error: int) -> None:
    sending = begun(1, 3)
    is_to_open = sending.fail(SendError(sequence_id=2, error=error, message=b"why"))
    if error == ServerError.NotAllowedError:
        assert not sending.has_arrived
        [refused] = sending.refused
        assert (refused.entry.sequence_id, str(refused.error)) == (1, "NotAllowedError: why")
        sending.receipt(receipt(3))
        assert (sending.n_pending, sending.last_sequence_id, sending.error) == (0, 4, None)
    elif error in REFUSALS:
        assert sending.error is not None
        assert is_refusal(sending.error)
        assert not sending.is_open
    assert is_to_open == (error not in REFUSALS)


def test_only_refusals_are() -> None:
    assert not is_refusal(DisconnectedError("x"))
    assert not is_refusal(RefusedError(ServerError.ProducerBusy, b""))
    assert is_refusal(RefusedError(ServerError.ProducerFenced, b""))


@pytest.mark.slow
def test_any_answer_is_taken_or_is_an_error_of_the_protocol() -> None:
    chance = random.Random(5)
    good = [receipt(first).SerializeToString() for first in (1, 3, 5)]
    good += [SendError(sequence_id=2, error=error).SerializeToString() for error in (9, 15, 22)]
    for _ in range(5_000):
        sending = begun(1, 3, 5) if chance.random() < 0.5 else opened(large(1, 3), entry(3), large(5, 2))
        for _ in range(6):
            frames(sending)
            data = bytearray(chance.choice(good))
            for _ in range(chance.randint(0, 2)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                if chance.random() < 0.5:
                    sending.receipt(SendReceipt.FromString(bytes(data)))
                else:
                    sending.fail(SendError.FromString(bytes(data)))
            except DecodeError:
                continue
            except ProtocolError:
                break
        assert sending.n_pending <= 3


def large(sequence_id: int, n_chunks: int, **fields: Any) -> LargeMessage:
    return large_message(OutgoingMessage(sequence_id, b"x" * (n_chunks * CHUNK), **fields), b"p", 1)


def opened(*entries: OutgoingEntry | LargeMessage, last_sequence_id: int = -1) -> Sending:
    sending = Sending(b"p")
    for one in entries:
        sending.send(one)
    sending.open(1, last_sequence_id, SMALL_BYTES)
    return sending


def test_chunks_are_sent_one_by_one_after_all_before_and_before_all_after() -> None:
    sending = opened(entry(1), entry(2), large(3, 3), large(4, 0), large(5, 2), entry(6))
    assert ids(*frames(sending)) == [1, 2]
    sending.receipt(receipt(1))
    assert frames(sending) == []
    sending.receipt(receipt(2))
    for _ in range(3):
        assert ids(*frames(sending)) == [3]
        assert sending.last_sequence_id == 2
        sending.receipt(receipt(3))
    assert sending.last_sequence_id == 3
    assert ids(*frames(sending)) == [4]
    sending.receipt(receipt(4))
    for _ in range(2):
        assert ids(*frames(sending)) == [5]
        sending.receipt(receipt(5))
    assert ids(*frames(sending)) == [6]
    sending.receipt(receipt(6))
    assert (sending.has_arrived, sending.n_answers) == (True, 9)


def test_after_a_lost_connection_all_chunks_come_again_under_another_uuid() -> None:
    sending = opened(large(7, 3), entry(8))
    uuids = []
    for producer_id in (1, 2, 3):
        [frame] = FrameDecoder().feed(sending.next_frame())
        metadata = open_envelope(frame.entry).metadata
        assert (metadata.chunk_id, metadata.n_chunks, frame.command.send.is_chunk) == (0, 3, True)
        uuids.append(metadata.uuid)
        sending.receipt(receipt(7))
        assert sending.next_frame()
        sending.lose()
        assert sending.next_frame() == b""
        sending.open(producer_id + 1, 6, SMALL_BYTES)
    assert len(set(uuids)) == 3
    assert (sending.n_pending, sending.error) == (2, None)


def test_a_broker_that_counts_some_chunks_as_the_message_ends_the_producer() -> None:
    sending = opened(entry(6), large(7, 3))
    frames(sending)
    sending.receipt(receipt(6))
    frames(sending)
    sending.lose()
    sending.open(2, 7, SMALL_BYTES)
    assert isinstance(sending.error, PartlySentError)
    assert (sending.last_sequence_id, sending.is_open, sending.next_frame()) == (6, False, b"")


def test_what_the_broker_had_before_the_producer_began_is_not_sent_in_chunks_again() -> None:
    sending = opened(large(7, 3), entry(8), large(9, 2), last_sequence_id=8)
    assert ids(*frames(sending)) == [8]  # the broker drops it
    sending.receipt(receipt(8, NONE))
    assert ids(*frames(sending)) == [9]
    assert (sending.repeated_to, sending.n_pending) == (8, 1)


def test_what_no_chunk_has_room_for_is_refused_alone() -> None:
    sending = opened(large(1, 1, properties=[encoded_property("large", "x" * 1_000)]), entry(2))
    assert ids(*frames(sending)) == [2]
    [refused] = sending.refused
    assert (refused.entry.sequence_id, "too large" in str(refused.error)) == (1, True)
    assert not sending.has_arrived


def test_a_chunk_that_is_refused_refuses_its_message_alone() -> None:
    sending = opened(large(1, 3), entry(2))
    frames(sending)
    sending.receipt(receipt(1))
    frames(sending)
    assert not sending.fail(SendError(sequence_id=1, error=ServerError.NotAllowedError))
    assert [one.entry.sequence_id for one in sending.refused] == [1]
    assert ids(*frames(sending)) == [2]


def test_a_broker_whose_deduplication_drops_chunks_is_named() -> None:
    sending = opened(large(1, 3))
    frames(sending)
    sending.receipt(receipt(1, NONE))
    assert sending.error is not None
    assert is_refusal(sending.error)
    assert "3.0.2" in str(sending.error)
    assert frames(sending) == []


def test_a_message_whose_last_chunk_is_dropped_has_not_arrived() -> None:
    """Of two chunks, a broker whose deduplication drops chunks drops the last one only."""
    sending = opened(large(1, 2))
    frames(sending)
    sending.receipt(receipt(1))
    assert ids(*frames(sending)) == [1]
    sending.receipt(receipt(1, NONE))
    assert sending.error is not None
    assert "3.0.2" in str(sending.error)
    assert (sending.n_pending, sending.last_sequence_id, sending.has_arrived) == (1, -1, False)


class Lost(RuleBasedStateMachine):
    """A producer and a broker with deduplication, between which the connection is lost at any time.

    Nothing is lost, nothing comes twice, all comes in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sending = Sending()
        self.to_broker: list[bytes] = []
        self.answers: list[SendReceipt] = []
        self.arrived: list[int] = []
        self.sent = 0
        self.producer_id = 0

    @rule(n=st.integers(1, 3))
    def send(self, n: int) -> None:
        self.sending.send(entry(self.sent + 1, n))
        self.sent += n
        self.to_broker += frames(self.sending)

    @precondition(lambda self: self.sending.is_open and self.to_broker)
    @rule()
    def broker_takes_one(self) -> None:
        [frame] = FrameDecoder().feed(self.to_broker.pop(0))
        send = frame.command.send
        is_new = send.sequence_id > (self.arrived[-1] if self.arrived else -1)
        if is_new:
            self.arrived += range(send.sequence_id, send.highest_sequence_id + 1)
        self.answers.append(receipt(send.sequence_id, 1 if is_new else NONE))

    @precondition(lambda self: self.sending.is_open and self.answers)
    @rule()
    def an_answer_comes(self) -> None:
        self.sending.receipt(self.answers.pop(0))

    @rule()
    def lose(self) -> None:
        self.sending.lose()
        self.to_broker, self.answers = [], []

    @precondition(lambda self: not self.sending.is_open)
    @rule()
    def open(self) -> None:
        self.producer_id += 1
        self.sending.open(self.producer_id, self.arrived[-1] if self.arrived else -1, MAX_BYTES)
        self.to_broker = frames(self.sending)

    @invariant()
    def all_in_order_once(self) -> None:
        assert self.arrived == list(range(1, len(self.arrived) + 1))
        assert self.sending.last_sequence_id <= len(self.arrived) or not self.arrived
        if self.sending.n_pending == 0:
            assert len(self.arrived) == self.sent


class LostInChunks(RuleBasedStateMachine):
    """The same with messages in chunks, and a broker that loads the topic again at any time while nobody is connected.

    Its deduplication looks at the last chunk alone, but takes the topic's last entry for all when it loads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sending = Sending(b"p")
        self.pending: list[OutgoingEntry | LargeMessage] = []  # of the sender, until they have arrived
        self.to_broker: list[bytes] = []
        self.answers: list[SendReceipt] = []
        self.stored: list[tuple[int, int, MessageMetadata]] = []  # number of the name, sequence id, metadata
        self.last = -1
        self.sent = self.producer_id = self.names = 0

    @rule(size=st.sampled_from([1, 1, CHUNK, 2 * CHUNK, 5 * CHUNK]))
    def send(self, size: int) -> None:
        self.sent += 1
        message = OutgoingMessage(self.sent, b"x" * size)
        made = large_message(message, b"p", 1) if size > 1 else single_entry(message, b"p", 1)
        self.pending.append(made)
        if self.sending.error is None:
            self.sending.send(made)
            self.to_broker += frames(self.sending)

    @precondition(lambda self: self.sending.is_open and self.to_broker)
    @rule()
    def broker_takes_one(self) -> None:
        [frame] = FrameDecoder().feed(self.to_broker.pop(0))
        send, envelope = frame.command.send, open_envelope(frame.entry)
        assert len(frame.entry) <= SMALL_BYTES
        assert send.is_chunk == envelope.is_chunk
        is_checked = not send.is_chunk or envelope.metadata.chunk_id == envelope.metadata.n_chunks - 1
        is_new = not is_checked or send.sequence_id > self.last
        if is_new:
            self.stored.append((self.names, send.sequence_id, envelope.metadata))
            self.last = send.sequence_id if is_checked else self.last
        self.answers.append(receipt(send.sequence_id, 1 if is_new else NONE))

    @precondition(lambda self: self.sending.is_open and self.answers)
    @rule()
    def an_answer_comes(self) -> None:
        self.sending.receipt(self.answers.pop(0))
        self.to_broker += frames(self.sending)

    @rule(loads=st.booleans())
    def lose(self, loads: bool) -> None:
        self.sending.lose()
        self.to_broker, self.answers = [], []
        of_name = [sequence_id for name, sequence_id, _ in self.stored if name == self.names]
        if loads and of_name:
            self.last = of_name[-1]

    @precondition(lambda self: not self.sending.is_open)
    @rule()
    def open(self) -> None:
        self.producer_id += 1
        self.sending.open(self.producer_id, self.last, SMALL_BYTES)
        if self.sending.error is not None:  # what has not arrived is sent under another name
            assert isinstance(self.sending.error, PartlySentError)
            arrived = self.arrived()
            self.pending = [one for one in self.pending if one.sequence_id not in arrived]
            self.sending, self.names, self.last = Sending(b"p"), self.names + 1, -1
            self.sending.open(self.producer_id, -1, SMALL_BYTES)
            for one in self.pending:
                self.sending.send(one)
        self.to_broker = frames(self.sending)

    def arrived(self) -> list[int]:
        """What a consumer gets that does not take a chunk twice."""
        found, begun = [], dict[bytes, int]()
        for _, sequence_id, metadata in self.stored:
            if metadata.n_chunks:
                assert begun.get(metadata.uuid, 0) == metadata.chunk_id
                begun[metadata.uuid] = metadata.chunk_id + 1
            if metadata.chunk_id == metadata.n_chunks - 1 or not metadata.n_chunks:
                found.append(sequence_id)
        return found

    @invariant()
    def all_in_order_once(self) -> None:
        arrived = self.arrived()
        assert arrived == list(range(1, len(arrived) + 1))
        assert self.sending.last_sequence_id <= len(arrived)
        if self.sending.has_arrived and self.sending.error is None:
            assert len(arrived) == self.sent


TestLost = Lost.TestCase
TestLostInChunks = pytest.mark.slow(LostInChunks.TestCase)
TestLostInChunks.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
TestLost.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
