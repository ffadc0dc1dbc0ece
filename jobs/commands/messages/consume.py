"""`delaylake consume`: prints what arrives at destinations, and how late it is."""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import tzinfo
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import printable
from conf.times import time_text
from jobs.commands.messages.produce import CONNECT_TIMEOUT_SECONDS, client_error
from jobs.options import Output, OutputOption, global_options
from jobs.parsers import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pulsar

    from conf.settings import PulsarSettings, Settings

_SINCE_MILLIS = 60_000
_POLL_SECONDS = 0.2  # a signal is handled only between two calls
_MAX_WAITING = 1_000  # messages that are received and not printed


@dataclass(frozen=True)
class Arrived:
    """A message at a destination, as `--output json` prints it.

    Attributes:
        topic: where it arrived.
        subscription: for whom, if the settings name it.
        messageId: the source message's id, ledger:entry:partition:batchIndex; None: the job has not sent it.
        deliverAt: when it was due, ms since the epoch.
        arrivedAt: when it was received; of one that was there before, when it was sent to the destination; ms.
        latenessMillis: arrivedAt - deliverAt.
        payload, payloadBase64: the payload as text, or where it is none.
    """

    topic: str
    subscription: str | None
    messageId: str | None
    deliverAt: int | None
    arrivedAt: int
    latenessMillis: int | None
    key: str | None
    properties: dict[str, str]
    payload: str | None
    payloadBase64: str | None


def consume(
    context: typer.Context,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC",
            help="A source topic, for what its subscriptions get; or any other topic, as a destination.",
            show_default=False,
        ),
    ],
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription",
            "-s",
            help="Of a source topic, the one subscription. Of another topic, Pulsar's subscription to receive and "
            "acknowledge by; without it nothing is acknowledged.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=1, help="End after so many messages.", show_default=False),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Begin with what has arrived within it, as far as the broker keeps that. Default 1m; 0s: nothing.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print each message that arrives, with its lateness, until SIGINT or SIGTERM.

    A line has when it arrived, how late, the source message's id, its key and its payload.
    """
    options = global_options(context)
    destinations = _destinations(options.settings, topic, subscription)
    own = None if None not in destinations.values() else subscription
    log_file = "/dev/stderr" if options.verbose else os.devnull
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    since = _SINCE_MILLIS if since is None else since
    with _Arrivals(options.settings.pulsar, destinations, own, since, log_file) as arrivals:
        n = 0
        while n != count and not stopped:
            if (received := arrivals.next(_POLL_SECONDS)) is None:
                continue
            arrived, acknowledge = received
            n += 1
            try:
                print(_json(arrived) if output is Output.JSON else _text(arrived, options.zone), flush=True)
            except BrokenPipeError:  # as of `consume ... | head`
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what is flushed at the end goes nowhere
                return
            acknowledge()


def _destinations(settings: Settings, topic: str, subscription: str | None) -> dict[str, str | None]:
    """Returns the topics to read, each with the name of its subscription in the settings; None: it has none there.

    Raises:
        typer.BadParameter: the topic's route has no such subscription.
    """
    from tracker.commands.decode import full_name, resolve_topic

    routes = {route.source: route.subscriptions for route in settings.routes}
    source, _ = resolve_topic(topic, routes)
    if source is None:
        return {full_name(topic): None}
    found: dict[str, str | None] = {
        s.destination: s.name for s in routes[source] if subscription is None or s.name == subscription
    }
    if not found:
        names = ", ".join(s.name for s in routes[source])
        raise typer.BadParameter(f"{source} has no subscription {subscription}: there are {names}")
    return found


class _Arrivals:
    """What arrives at topics. A context manager.

    Args:
        settings: the `pulsar` section.
        destinations: the topics, each with the name of its subscription in the settings.
        subscription: Pulsar's subscription to acknowledge by; None: nothing is acknowledged.
        since: begins with what was published so many ms ago.
        log_file: the file for the client's errors.

    Raises:
        PulsarError: the broker can't be reached, or refuses.
    """

    def __init__(
        self,
        settings: PulsarSettings,
        destinations: Mapping[str, str | None],
        subscription: str | None,
        since: int,
        log_file: str,
    ) -> None:
        import pulsar

        from broker.client import connect

        self._waiting: queue.Queue[tuple[Arrived, Callable[[], None]]] = queue.Queue(_MAX_WAITING)
        self._is_open = True
        self._started_at = time.time_ns() // 1_000_000
        self._client = connect(settings, log_file=log_file, operation_timeout_seconds=CONNECT_TIMEOUT_SECONDS)
        topic = ""
        try:
            for topic, name in destinations.items():
                if subscription is None:
                    reader = self._client.create_reader(
                        topic, pulsar.MessageId.latest, reader_listener=self._listener(topic, name, False)
                    )
                    reader.seek(self._started_at - since)
                else:
                    self._client.subscribe(
                        topic,
                        subscription,
                        consumer_type=pulsar.ConsumerType.Shared,
                        initial_position=pulsar.InitialPosition.Earliest,
                        message_listener=self._listener(topic, name, True),
                    )
        except pulsar.PulsarException as error:
            self._client.close()
            raise client_error(f"can't read {topic}", settings, error) from error

    def __enter__(self) -> _Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._client.close()

    def next(self, seconds: float) -> tuple[Arrived, Callable[[], None]] | None:
        """Returns the next message, and what acknowledges it; None: none came in the time."""
        with suppress(queue.Empty):
            return self._waiting.get(timeout=seconds)
        return None

    def _listener(self, topic: str, name: str | None, is_consumer: bool) -> Any:
        def receive(source: Any, message: pulsar.Message) -> None:  # called by the client's threads
            arrived = _arrived(message, topic, name, self._started_at)
            acknowledge = partial(source.acknowledge, message) if is_consumer else lambda: None
            while self._is_open:
                with suppress(queue.Full):
                    return self._waiting.put((arrived, acknowledge), timeout=_POLL_SECONDS)

        return receive


def _arrived(message: pulsar.Message, topic: str, subscription: str | None, started_at: int) -> Arrived:
    """Returns a message as it is printed.

    Args:
        started_at: what was sent to the topic before this time, ms since the epoch, arrived when it was sent.
    """
    from tracker.properties import DELIVER_AT, MESSAGE_ID

    sent_at = message.publish_timestamp()
    arrived_at = time.time_ns() // 1_000_000 if sent_at >= started_at else sent_at
    properties: dict[str, str] = {}
    key = None
    with suppress(UnicodeDecodeError):  # others may have written them
        properties, key = dict(message.properties()), message.partition_key() or None
    due = properties.get(DELIVER_AT, "")
    deliver_at = int(due) if due.isascii() and due.isdecimal() and len(due) < 19 else None
    text, data = None, message.data()
    with suppress(UnicodeDecodeError):
        text = data.decode()
    return Arrived(
        topic=topic,
        subscription=subscription,
        messageId=properties.get(MESSAGE_ID),
        deliverAt=deliver_at,
        arrivedAt=arrived_at,
        latenessMillis=None if deliver_at is None else arrived_at - deliver_at,
        key=key,
        properties=properties,
        payload=text,
        payloadBase64=base64.b64encode(data).decode() if text is None else None,
    )


def _json(arrived: Arrived) -> str:
    values = asdict(arrived)
    del values["payload" if arrived.payload is None else "payloadBase64"]
    return json.dumps(values)


def _text(arrived: Arrived, zone: tzinfo | None) -> str:
    late = "-" if arrived.latenessMillis is None else f"{arrived.latenessMillis:+,} ms"
    payload = arrived.payload if arrived.payload is not None else f"base64:{arrived.payloadBase64}"
    shown = [
        time_text(arrived.arrivedAt, zone),
        f"{late:>9}",
        arrived.subscription or "-",
        arrived.messageId or "-",
        arrived.key or "-",
        payload,
    ]
    return "  ".join(printable(part) for part in shown)
