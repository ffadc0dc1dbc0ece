"""What is not answered is sent again, in order; answers, errors and repetitions are told apart."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.protocol.building import OutgoingEntry, OutgoingMessage, batch_entry
from broker.protocol.frames import FrameDecoder, ProtocolError
from broker.protocol.sending import REFUSALS, Sending, is_refusal
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import SendError, SendReceipt, ServerError
from tests.support.fuzzing.examples import examples

NONE = (1 << 64) - 1


def entry(first: int, n: int = 1) -> OutgoingEntry:
    return batch_entry([OutgoingMessage(first + i, b"x") for i in range(n)], b"p", 1)


def receipt(first: int, ledger_id: int = 1) -> SendReceipt:
    return SendReceipt(producer_id=1, sequence_id=first, id={"ledger_id": ledger_id, "entry_id": 0})


def ids(*frames: bytes) -> list[int]:
    return [frame.command.send.sequence_id for data in frames for frame in FrameDecoder().feed(data)]


def begun(*firsts: int) -> Sending:
    sending = Sending()
    assert list(sending.open(1, -1)) == []
    for first in firsts:
        assert ids(sending.send(entry(first, 2))) == [first]
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
    assert sending.send(entry(5)) == b""
    frames = list(sending.open(7, 2))
    assert ids(*frames) == [3, 5]
    [again] = FrameDecoder().feed(frames[0])
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
        sending = begun(1, 3, 5)
        for _ in range(3):
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
        frame = self.sending.send(entry(self.sent + 1, n))
        self.sent += n
        if frame:
            self.to_broker.append(frame)

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
        self.to_broker = list(self.sending.open(self.producer_id, self.arrived[-1] if self.arrived else -1))

    @invariant()
    def all_in_order_once(self) -> None:
        assert self.arrived == list(range(1, len(self.arrived) + 1))
        assert self.sending.last_sequence_id <= len(self.arrived) or not self.arrived
        if self.sending.n_pending == 0:
            assert len(self.arrived) == self.sent


TestLost = Lost.TestCase
TestLost.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
