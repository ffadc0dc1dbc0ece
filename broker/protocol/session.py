"""One connection to a broker, as a state machine: handshake, authentication, keep-alive, requests and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from broker.client import PulsarError
from broker.protocol.frames import PROTOCOL_VERSION, Frame, FrameDecoder, ProtocolError, encode
from broker.protocol.wire.pulsar_pb2 import AuthData, Command, ServerError

_CLIENT_VERSION = "delaylake"
_QUIET_SECONDS = 30.0  # after which the client asks whether the broker is there, as Pulsar's clients do

# The field of each answer that names its request.
_ANSWERS = {
    Command.SUCCESS: "success",
    Command.ERROR: "error",
    Command.LOOKUP_ANSWER: "lookup_answer",
    Command.LAST_MESSAGE_ID: "last_message_id",
    Command.ACK_ANSWER: "ack_answer",
    Command.PRODUCER_ANSWER: "producer_answer",
    Command.PARTITIONS_ANSWER: "partitions_answer",
}


class RefusedError(PulsarError):
    """The broker refuses a request. The text begins with Pulsar's name of the error.

    Attributes:
        error: a `ServerError` of proto/pulsar.proto, or a number that is not known there.
    """

    def __init__(self, error: int, message: bytes) -> None:
        self.error = error
        name = ServerError.Name(error) if error in ServerError.values() else f"error {error}"
        said = message.decode(errors="replace").splitlines()
        super().__init__(f"{name}: {said[0][:300]}" if said else name)


class DisconnectedError(PulsarError):
    """The connection, or a consumer on it, has ended."""


class ClosedError(DisconnectedError):
    """All connections were closed by their owner."""


class Session:
    """The state of a connection. It makes bytes to send, and takes those that have come; it has no socket.

    Args:
        token: reads the token at each use; None: the broker wants none.
        proxied_broker: the URL of the broker to which a proxy shall connect; None: there is no proxy.
        now: a monotonic clock's time, seconds.
    """

    def __init__(self, token: Callable[[], str] | None, proxied_broker: str | None, now: float) -> None:
        self._token = token
        self._decoder = FrameDecoder()
        self._ids = count(1)
        self._heard = now
        self._pinged = False
        self.is_connected = False
        self.outgoing = bytearray()  # to be sent; the caller empties it
        connect: dict[str, Any] = {
            "client_version": _CLIENT_VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "feature_flags": {"supports_auth_refresh": True, "supports_broker_entry_metadata": True},
        }
        if token is not None:
            connect |= {"auth_method_name": "token", "auth_data": token().encode()}
        if proxied_broker is not None:
            connect["proxy_to_broker_url"] = proxied_broker
        self.send(Command.CONNECT, connect=connect)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that the broker sends."""
        return self._decoder.max_message_bytes

    def send(self, kind: Command.Type, **fields: Any) -> None:
        """Puts a command into `outgoing`."""
        self.outgoing += encode(kind, **fields)

    def request(self, kind: Command.Type, name: str, **fields: Any) -> int:
        """Puts a request into `outgoing`; returns its id, which its answer has.

        Args:
            kind: the command's type.
            name: of the command's field.
            fields: of the message in that field, beside the request id.
        """
        request_id = next(self._ids)
        self.send(kind, **{name: {"request_id": request_id, **fields}})
        return request_id

    def receive(self, data: bytes, now: float) -> Iterator[Frame]:
        """Takes bytes from the broker; yields the frames that concern others than the session itself.

        Raises:
            ProtocolError: the bytes are not Pulsar's protocol.
            RefusedError: the broker refuses the connection.
        """
        self._heard, self._pinged = now, False
        for frame in self._decoder.feed(data):
            kind = frame.command.type
            if kind == Command.PING:
                self.send(Command.PONG, pong={})
            elif kind == Command.AUTH_CHALLENGE:
                token = self._token() if self._token is not None else ""
                response = AuthData(auth_method_name="token", auth_data=token.encode())
                self.send(
                    Command.AUTH_RESPONSE,
                    auth_response={
                        "client_version": _CLIENT_VERSION,
                        "response": response,
                        "protocol_version": PROTOCOL_VERSION,
                    },
                )
            elif not self.is_connected:
                self._begin(frame.command)
            elif kind not in (Command.PONG, Command.UNKNOWN):
                yield frame

    def tick(self, now: float) -> None:
        """Asks the broker for a sign of life where it has been quiet.

        Raises:
            DisconnectedError: the broker has given none.
        """
        quiet = now - self._heard
        if quiet > 2 * _QUIET_SECONDS:
            raise DisconnectedError(f"the broker has been silent for {quiet:.0f} s")
        if quiet > _QUIET_SECONDS and not self._pinged:
            self._pinged = True
            if self.is_connected:
                self.send(Command.PING, ping={})

    def _begin(self, command: Command) -> None:
        if command.type == Command.ERROR:
            raise RefusedError(command.error.error, command.error.message)
        if command.type != Command.CONNECTED:
            raise ProtocolError(f"the broker answers a connection with command {command.type}")
        if command.connected.max_message_size > 0:
            self._decoder.max_message_bytes = command.connected.max_message_size
        self.is_connected = True


def answered(command: Command) -> tuple[int, Any] | None:
    """Returns the id of the request that a command answers, and the answer or an error; None: it is no answer."""
    name = _ANSWERS.get(command.type)
    if name is None:
        return None
    answer = getattr(command, name)
    if command.type == Command.PRODUCER_ANSWER and not answer.is_ready:
        return None  # another answer follows
    if command.type == Command.ERROR or (answer.DESCRIPTOR.fields_by_name.get("error") and answer.HasField("error")):
        return answer.request_id, RefusedError(answer.error, answer.message)
    return answer.request_id, answer
