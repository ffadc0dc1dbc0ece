"""A connection's state: handshake, tokens, signs of life, answers, and permits in bytes."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from broker.protocol.frames import FrameDecoder, ProtocolError, encode
from broker.protocol.session import DisconnectedError, RefusedError, Session, answered
from broker.protocol.wire.pulsar_pb2 import Command


def sent(session: Session) -> list[Command]:
    decoder = FrameDecoder()
    found = [frame.command for frame in decoder.feed(bytes(session.outgoing))]
    session.outgoing.clear()
    return found


def connected(**options: Any) -> Session:
    session = Session(options.get("token"), options.get("proxied_broker"), 0.0)
    sent(session)
    assert list(session.receive(encode(Command.CONNECTED, connected={"max_message_size": 9_000}), 0.0)) == []
    return session


def test_a_connection_begins_with_who_asks_and_takes_the_brokers_largest_message() -> None:
    session = Session(lambda: "secret", "broker-2:6650", 0.0)
    [connect] = sent(session)
    assert (connect.connect.auth_method_name, connect.connect.auth_data) == ("token", b"secret")
    assert connect.connect.proxy_to_broker_url == "broker-2:6650"
    assert connect.connect.feature_flags.supports_broker_entry_metadata
    assert not session.is_connected
    list(session.receive(encode(Command.CONNECTED, connected={"max_message_size": 9_000}), 0.0))
    assert session.is_connected
    assert session.max_message_bytes == 9_000
    with pytest.raises(ProtocolError, match="its largest has 9000"):
        list(session.receive(struct.pack(">II", 90_000, 3), 0.0))


def test_a_broker_that_refuses_says_why() -> None:
    session = Session(None, None, 0.0)
    refusal = encode(Command.ERROR, error={"error": 3, "message": b"Unable to authenticate\nat java.lang..."})
    with pytest.raises(RefusedError, match=r"^AuthenticationError: Unable to authenticate$"):
        list(session.receive(refusal, 0.0))
    with pytest.raises(ProtocolError, match="answers a connection with command"):
        list(Session(None, None, 0.0).receive(encode(Command.SUCCESS, success={}), 0.0))


def test_a_challenge_is_answered_with_the_token_of_that_moment() -> None:
    tokens = iter(["first", "second"])
    session = connected(token=lambda: next(tokens))
    list(session.receive(encode(Command.AUTH_CHALLENGE, auth_challenge={}), 1.0))
    [answer] = sent(session)
    assert answer.auth_response.response.auth_data == b"second"


def test_a_quiet_broker_is_asked_for_a_sign_of_life_and_a_silent_one_is_given_up() -> None:
    session = connected()
    session.tick(29.0)
    assert sent(session) == []
    session.tick(31.0)
    session.tick(36.0)
    assert [command.type for command in sent(session)] == [Command.PING]
    list(session.receive(encode(Command.PONG, pong={}), 40.0))
    session.tick(69.0)
    assert sent(session) == []
    with pytest.raises(DisconnectedError, match="silent for 61 s"):
        session.tick(101.0)
    list(session.receive(encode(Command.PING, ping={}), 102.0))
    assert [command.type for command in sent(session)] == [Command.PONG]


def test_what_is_not_known_is_passed_over_and_what_is_for_others_is_handed_on() -> None:
    session = connected()
    unknown = b"\x08\x1f"  # type 31: the active consumer has changed
    data = struct.pack(">II", 4 + len(unknown), len(unknown)) + unknown
    data += encode(Command.CLOSE_CONSUMER, close_consumer={"consumer_id": 4})
    assert [frame.command.type for frame in session.receive(data, 1.0)] == [Command.CLOSE_CONSUMER]


def test_answers_name_their_request_and_refusals_pulsars_error() -> None:
    answer = answered(Command(type=Command.SUCCESS, success={"request_id": 5}))
    assert answer is not None
    assert answer[0] == 5
    for command, text in (
        (Command(type=Command.ERROR, error={"request_id": 6, "error": 5, "message": b"busy"}), "ConsumerBusy: busy"),
        (Command(type=Command.ACK_ANSWER, ack_answer={"request_id": 6, "error": 1}), "MetadataError"),
        (Command(type=Command.ERROR, error={"request_id": 6, "error": 999}), "error 999"),
    ):
        refused = answered(command)
        assert refused is not None
        assert refused[0] == 6
        assert isinstance(refused[1], RefusedError)
        assert str(refused[1]) == text
    assert answered(Command(type=Command.MESSAGE)) is None
