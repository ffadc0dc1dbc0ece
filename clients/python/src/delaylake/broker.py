"""Sends messages to Pulsar, and commands where there is no admin API. Needs the extra `pulsar`."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from delaylake.commands import SKIP, Command
from delaylake.errors import DelayLakeError, Forbidden, Invalid, NoAnswer, NotFound, Unavailable
from delaylake.message_ids import MessageId, Outcome
from delaylake.threads import in_thread

if TYPE_CHECKING:
    import pulsar

    from delaylake.control import ControlRequest
    from delaylake.payloads import PulsarSchema
    from delaylake.scheduled import Scheduled
    from delaylake.wire.delaylake_pb2 import ControlOutcome

CONTROL_TOPIC = "persistent://public/default/delaylake-control"
OUTCOME_TOPIC = "persistent://public/default/delaylake-outcomes"

_POLL_MILLIS = 300
_CONNECT_SECONDS = 10.0  # for one of the broker's addresses
_ISSUED_BY = "delaylake-client"

_ROUTE_SECONDS = 2.0  # that a topic's first message waits to learn whether a route has the topic
_ROUTE_AGAIN_SECONDS = 60.0  # after which it is asked again where no job has answered
_NOBODY = "-"  # a subscription that no topic has, so that the question changes nothing
_NO_ROUTE = "no route has the topic"  # the job's reason

# Without an initial sequence id Pulsar's client counts from 0 again when a partition is added to the topic, and the
# broker drops its messages as repeated. The client takes 0 for none.
_FIRST_SEQUENCE_ID = 1


class Broker:
    """A connection to Pulsar. Thread-safe.

    It is made at the first call, not before, since one that was made before a fork would hang in the child.

    Args:
        url: `pulsar://host:6650` or `pulsar+ssl://host:6651`.
        timeout_seconds: time for connecting, and for the broker to take a message.
        options: further parameters of `pulsar.Client`.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None,
        timeout_seconds: float,
        control_topic: str,
        outcome_topic: str,
        options: dict[str, Any],
    ) -> None:
        try:
            import pulsar  # noqa: F401
        except ImportError:
            raise DelayLakeError(
                "pip install './clients/python[pulsar]' in the project's folder to use a broker"
            ) from None
        self._url = url
        self._token = token
        self._timeout_seconds = timeout_seconds
        self.control_topic = control_topic
        self._outcome_topic = outcome_topic
        self._options = options
        self._lock = threading.Lock()
        self._client: pulsar.Client | None = None
        # By topic and definition of the schema; not done while it connects.
        self._producers: dict[tuple[str, str], Future[pulsar.Producer]] = {}
        self._waiting: dict[str, list[_Answer]] = {}  # by request id
        self._asked_again: dict[str, float] = {}  # by topic: when it is asked next whether it has a route
        # By topic: the last question, if no answer came in time.
        self._unanswered: dict[str, Future[list[Outcome]]] = {}
        self._doubted: set[str] = set()  # topics that had no route when the job answered last
        self._reading: threading.Thread | None = None
        self._stopped = threading.Event()
        self._process = 0  # id of the process that has connected; 0: none
        self._at_exit: Callable[[], None] | None = None

    def close(self) -> None:
        """Sends what is waiting to be sent, and ends the connection."""
        self._stopped.set()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._process not in (0, os.getpid()):
            return  # the connection is that of the process that this one was forked from
        if self._reading is not None:
            self._reading.join()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        concurrent.futures.wait(list(self._producers.values()), _CONNECT_SECONDS)
        for answer in [answer for answers in list(self._waiting.values()) for answer in answers]:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.outcomes.set_exception(NoAnswer("the client was closed", request_id=answer.command.request_id))

    def schedule(self, message: Scheduled, deadline: float) -> Future[MessageId]:
        """Sends a message, after waiting for the connection.

        Args:
            deadline: time by the monotonic clock, in seconds, after which nothing is sent.

        Returns:
            a future of the message's id. Its errors are those below, and NoAnswer if the message may have arrived.

        Raises:
            ValueError: the message's schema is only named.
            Unavailable, NotFound, Forbidden: the broker can't be reached, or takes no messages for this topic.
            NotFound: no route has the topic.
            Invalid: the topic does not take the message's schema.
        """
        if isinstance(message.schema, str):
            raise ValueError(f"over a broker schema is one of pulsar.schema, as JsonSchema(Order): {message.schema!r}")
        self._check_route(message.topic, deadline)
        sent: Future[MessageId] = Future()

        def answered(result: Any, message_id: Any) -> None:
            # In a thread of Pulsar's client, which an exception would hang.
            with contextlib.suppress(Exception):
                if result.name != "Ok":
                    sent.set_exception(_error(result.name, message.topic, True, message.request_id))
                else:
                    position = message_id.ledger_id(), message_id.entry_id(), message_id.partition()
                    sent.set_result(MessageId(*position, message_id.batch_index(), deliver_at=message.deliver_at))

        self._producer(message.topic, deadline, schema=message.schema).send_async(
            message.payload,
            answered,
            properties=message.properties,
            partition_key=message.key,
            ordering_key=message.ordering_key,
            event_timestamp=message.event_time or None,
        )
        return sent

    def send(self, command: Command, deadline: float) -> Future[list[Outcome]]:
        """Publishes a command on the control topic.

        Args:
            deadline: as in `schedule`.

        Returns:
            a future of the command's outcomes, or of the error of the gravest one.

        Raises:
            ValueError: the command names no subscription, or `*`.
            Unavailable, NotFound, Forbidden: as in `schedule`.
        """
        if command.subscription in (None, "*"):
            raise ValueError("name a subscription: without an admin API it is not known which the topic has")
        producer = self._producer(self.control_topic, deadline, command.request_id)
        request = control_request(command)
        answer = _Answer(command, request, time.monotonic() + self._timeout_seconds / 2)
        self._waiting.setdefault(command.request_id, []).append(answer)
        answer.outcomes.add_done_callback(lambda _: self._forget(answer))

        def answered(result: Any, _: Any) -> None:
            with contextlib.suppress(Exception):
                if result.name != "Ok":
                    answer.outcomes.set_exception(_error(result.name, self.control_topic, True, command.request_id))

        producer.send_async(request.command.SerializeToString(), answered)
        return answer.outcomes

    def _check_route(self, topic: str, deadline: float) -> None:
        """Asks the job whether a route has a topic, for its first message.

        Nothing is known where no job runs, or the control topic is not open to this client. An answer that comes after
        the message was sent is for the topic's next messages.

        Raises:
            NotFound: no route has the topic, so nobody would read its messages.
        """
        now = time.monotonic()
        if self._asked_again.get(topic, 0.0) > now:
            return
        longest = self._timeout_seconds / 2 if topic in self._doubted else _ROUTE_SECONDS
        # A topic for which no job has answered yet is asked for, but not waited for, once more.
        until = now if topic in self._unanswered else min(deadline, now + longest)
        self._doubted.discard(topic)
        self._asked_again[topic] = now + _ROUTE_AGAIN_SECONDS
        if before := self._unanswered.pop(topic, None):
            before.cancel()
        question = Command(SKIP, topic, None, _NOBODY, 0, uuid.uuid4().hex, schedule_key=uuid.uuid4().hex)
        try:
            answer = self.send(question, min(deadline, now + longest))
        except (DelayLakeError, RuntimeError):
            return
        concurrent.futures.wait([answer], max(until - time.monotonic(), 0))
        if not answer.done():
            self._unanswered[topic] = answer
        answer.add_done_callback(lambda answered: self._note_route(topic, answered))
        if topic in self._doubted:
            raise NotFound(f"{_NO_ROUTE} {topic}")

    def _note_route(self, topic: str, answer: Future[list[Outcome]]) -> None:
        """Notes whether a route has a topic, if the job has answered that: it finds no such subscription, or topic."""
        error = None if answer.cancelled() else answer.exception()
        if not isinstance(error, NotFound):
            return
        self._unanswered.pop(topic, None)
        if _NO_ROUTE in str(error):
            self._asked_again.pop(topic, None)
            self._doubted.add(topic)
        else:
            self._asked_again[topic] = math.inf
            self._doubted.discard(topic)

    def _connected(self) -> pulsar.Client:
        import pulsar

        if self._stopped.is_set():
            raise RuntimeError("the client is closed")
        if self._client is None:
            given: dict[str, Any] = {
                "logger": pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
                "operation_timeout_seconds": max(1, int(self._timeout_seconds)),
                "connection_timeout_ms": max(1, int(min(self._timeout_seconds, _CONNECT_SECONDS) * 1000)),
            }
            if self._token is not None:
                given["authentication"] = pulsar.AuthenticationToken(self._token)
            if self._url.startswith("pulsar+ssl:"):
                given["tls_validate_hostname"] = True
            self._client = pulsar.Client(self._url, **{**given, **self._options})
            self._process = os.getpid()
            self._close_at_exit()
        return self._client

    def _close_at_exit(self) -> None:
        """Ends the threads of Pulsar's client before Python exits: it would abort the program otherwise."""
        reference = weakref.ref(self)

        def close() -> None:
            if (broker := reference()) is not None:
                broker.close()

        self._at_exit = close
        atexit.register(close)

    def _producer(
        self, topic: str, deadline: float, request_id: str = "", schema: PulsarSchema | None = None
    ) -> pulsar.Producer:
        """Returns the producer of a topic and schema; waits until the deadline while it connects."""
        import pulsar

        if self._process not in (0, os.getpid()):
            raise RuntimeError("the client was connected to the broker before a fork: make one in each process")
        with self._lock:
            kind = topic, "" if schema is None else _definition(schema)
            connecting = self._producers.get(kind)
            if connecting is None or (connecting.done() and connecting.exception() is not None):
                connecting = self._producers[kind] = in_thread(partial(self._connect, topic, schema))
        try:
            producer = connecting.result(max(deadline - time.monotonic(), 0))
        except concurrent.futures.TimeoutError:
            raise self.not_in_time(topic, request_id) from None
        except pulsar.PulsarException as error:
            raise _error(type(error).__name__, f"{topic} at {self._url}", request_id=request_id) from error
        if time.monotonic() > deadline:  # the caller may already have got an error that says that nothing was sent
            raise self.not_in_time(topic, request_id)
        return producer

    def not_in_time(self, topic: str, request_id: str = "") -> Unavailable:
        """Returns the error for a call whose time is over."""
        if not self._is_connected(topic):
            return Unavailable(f"{topic}: the broker {self._url} does not answer", request_id=request_id)
        if topic == self.control_topic:
            return NoAnswer("no answer (does the job run?)", request_id=request_id)
        return NoAnswer(f"{topic}: the broker has not confirmed the message", request_id=request_id)

    def _is_connected(self, topic: str) -> bool:
        """Whether anything could be sent to a topic yet."""
        tried = [connecting for (name, _), connecting in list(self._producers.items()) if name == topic]
        return any(connecting.done() and connecting.exception() is None for connecting in tried)

    def _connect(self, topic: str, schema: PulsarSchema | None = None) -> pulsar.Producer:
        import pulsar

        with self._lock:
            client = self._connected()
        if topic == self.control_topic:
            self._read_outcomes(client)
        return client.create_producer(
            topic,
            send_timeout_millis=max(1, int(self._timeout_seconds * 1000)),
            block_if_queue_full=True,
            initial_sequence_id=_FIRST_SEQUENCE_ID,
            schema=_of_encoded(schema) if schema is not None else pulsar.schema.BytesSchema(),
        )

    def _read_outcomes(self, client: pulsar.Client) -> None:
        """Reads the outcome topic from now on, in a thread."""
        import pulsar

        if self._reading is not None:
            return
        reader = client.create_reader(self._outcome_topic, pulsar.MessageId.latest)
        reading = threading.Thread(target=self._read, args=(reader,), name="delaylake-outcomes", daemon=True)
        reading.start()
        self._reading = reading

    def _read(self, reader: pulsar.Reader) -> None:
        import pulsar

        from delaylake.wire.delaylake_pb2 import ControlOutcome

        looked_at = time.monotonic()
        while not self._stopped.is_set():
            if time.monotonic() - looked_at > _POLL_MILLIS / 1000:
                looked_at = time.monotonic()
                self._send_again(looked_at)
            try:
                message = reader.read_next(_POLL_MILLIS)
            except pulsar.Timeout:
                continue
            except pulsar.PulsarException:
                self._stopped.wait(_POLL_MILLIS / 1000)
                continue
            if answers := list(self._waiting.get(message.partition_key(), ())):
                outcome = ControlOutcome.FromString(message.data())
                for answer in answers:
                    answer.take(outcome)

    def _send_again(self, now: float) -> None:
        """Publishes commands once more whose outcomes the reader may have missed, as when the broker unloads the topic.

        The job answers a repeated request id as it did the first time.
        """
        for answers in list(self._waiting.values()):
            for answer in list(answers):
                if now >= answer.repeat_at and answer.request.repeat():
                    with contextlib.suppress(Exception):
                        producer = self._producer(self.control_topic, now + self._timeout_seconds)
                        producer.send_async(answer.request.command.SerializeToString(), None)

    def _forget(self, answer: _Answer) -> None:
        others = self._waiting.get(answer.command.request_id, [])
        if answer in others:
            others.remove(answer)
        if not others:
            self._waiting.pop(answer.command.request_id, None)


class _Answer:
    """The answer to a command: its outcomes come one by one."""

    def __init__(self, command: Command, request: ControlRequest, repeat_at: float) -> None:
        self.command = command
        self.request = request
        self.repeat_at = repeat_at  # by the monotonic clock, in seconds
        self.outcomes: Future[list[Outcome]] = Future()
        self._received: list[Outcome] = []

    def take(self, published: ControlOutcome) -> None:
        for one in self.request.take(published):
            position = one.message.ledger_id, one.message.entry_id, one.message.batch_index
            self._received.append(replace(one, message=self.command.message_id_at(*position)))
        if self.request.is_answered:
            self._settle()

    def _settle(self) -> None:
        with contextlib.suppress(Exception):  # nobody waits any more
            try:
                self.command.check(self._received)
                self.outcomes.set_result(self._received)
            except DelayLakeError as error:
                self.outcomes.set_exception(error)


def _definition(schema: PulsarSchema) -> str:
    """Returns a text that is another one for each schema."""
    info = schema.schema_info()
    return f"{info.schema_type().name} {info.name()} {info.schema()}"


def _of_encoded(schema: PulsarSchema) -> pulsar.schema.Schema:
    """Returns a schema for payloads that the given one has encoded already."""
    import pulsar

    encoded = pulsar.schema.BytesSchema()
    encoded._schema_info = schema.schema_info()
    return encoded


def control_request(command: Command) -> ControlRequest:
    """Returns the request that a command is on the control topic."""
    from delaylake.control import RequestFactory

    names = [command.subscription] if command.subscription else []
    made = RequestFactory(_ISSUED_BY, command.topic, names, request_id=command.request_id)
    operation, fields = command.control_operation
    return next(made.make(operation, command.named, **fields))


_KINDS: dict[str, type[DelayLakeError]] = {
    "TopicNotFound": NotFound,
    "AuthenticationError": Forbidden,
    "AuthorizationError": Forbidden,
    "MessageTooBig": Invalid,
    "IncompatibleSchema": Invalid,
    "InvalidTopicName": Invalid,
    "NotAllowedError": Invalid,  # such as a partition that the topic does not have
}


_MAY_BE_SENT = ("Timeout", "AlreadyClosed")


def _error(name: str, topic: str, was_sent: bool = False, request_id: str = "") -> DelayLakeError:
    """Returns the error for a result of Pulsar's client."""
    unknown = NoAnswer if was_sent and name in _MAY_BE_SENT else Unavailable
    return _KINDS.get(name, unknown)(f"{topic}: {name}", request_id=request_id)
