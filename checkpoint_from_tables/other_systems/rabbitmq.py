"""Reads RabbitMQ: messages that wait in a queue, with the header `x-delay` or a TTL of their own."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from checkpoint_from_tables.other_systems.item import Item, SourceError, item, rejected_item
from checkpoint_from_tables.other_systems.redis_server import text
from conf.errors import one_line
from tracker.properties import RESERVED_PREFIX

if TYPE_CHECKING:
    from pika.spec import Basic, BasicProperties

_DELAY = "x-delay"

# A `timestamp` from here on is in ms: as seconds it would be in the year 5138 or later.
_MILLIS_FROM = 100_000_000_000

# Headers with which a quorum queue counts how often it has given out a message.
_COUNTS = ("x-delivery-count", "x-acquired-count")


class RabbitMQ:
    """The messages of queues. None is acknowledged, so RabbitMQ puts all of them back at the end.

    Args:
        url: such as amqp://user:password@host:5672/vhost.
        queues: at least one.

    Raises:
        SourceError: pika is not installed, there is no queue, or the URL is wrong.
    """

    def __init__(self, url: str, queues: Collection[str]) -> None:
        try:
            import pika
        except ImportError:
            raise SourceError("pika is not installed: pip install -e '.[rabbitmq]'") from None
        if not queues:
            raise SourceError("--queue: name the queues in which messages wait")
        try:
            self._parameters = pika.URLParameters(url)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._parameters = None
        if self._parameters is None or not url.startswith(("amqp://", "amqps://")):
            raise SourceError("--url: it is none of RabbitMQ's, as amqp://user:password@host:5672/vhost") from None
        self._parameters.heartbeat = 0  # an import may take long between two reads
        self._queues = queues
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the messages that have a delay, queue by queue.

        Raises:
            SourceError: RabbitMQ does not answer, or refuses.
        """
        import pika

        try:
            connection = pika.BlockingConnection(self._parameters)
            try:
                for queue in self._queues:
                    yield from self._of(connection.channel(), queue)
            finally:
                if connection.is_open:
                    with suppress(ValueError, OverflowError):  # it reads what can't be decoded once more
                        connection.close()  # now RabbitMQ puts back the messages
        except (pika.exceptions.AMQPError, OSError) as error:
            reason = one_line(error) or type(error).__name__
            raise SourceError(f"RabbitMQ can't be read: {reason}") from None

    def _of(self, channel: Any, queue: str) -> Iterator[Item]:
        seen: Counter[str] = Counter()
        now = time.time_ns() // 1_000_000
        while True:
            try:
                method, properties, body = channel.basic_get(queue, auto_ack=False)
            except (ValueError, OverflowError) as error:  # such as a time in a header, in ms where seconds belong
                reason = f"a message in {queue} has a header that pika can't decode"
                raise SourceError(f"RabbitMQ can't be read: {reason}: {one_line(error)}") from None
            if method is None:
                return
            digest = _digest(method, properties, body)
            seen[digest] += 1
            # Several messages may be equal, so the id has a count, too.
            found = message(f"rabbitmq:{queue}:{digest}:{seen[digest]}", method, properties, body, now)
            if found is None:
                self.left["without x-delay and expiration"] += 1
            else:
                yield found


def message(id: str, method: Basic.GetOk, about: BasicProperties, body: bytes, now: int) -> Item | None:
    """Returns a message as an item; None: it has no delay.

    The delay counts from the publication, if publisher or RabbitMQ have noted its time, else from now.

    Args:
        id: as of `Item`.
        method: has exchange and routing key.
        about: headers and properties.
        body: the payload.
        now: ms since the epoch.
    """
    headers = about.headers or {}
    delay = headers.get(_DELAY, about.expiration)
    if delay is None:
        return None
    millis = _whole_millis(delay)
    if millis is None:
        return rejected_item(id, f"its delay {delay!s:.40} is no number of milliseconds", body)
    if millis < 0:  # with that the plugin marks a message that it has delayed
        return item(id, None, body, _properties(method, about))
    return item(id, _published(about, now) + millis, body, _properties(method, about))


def _whole_millis(delay: object) -> int | None:
    """Reads a delay, which may be a fraction, as the plugin does; None: it is no number."""
    try:
        number = math.nan if isinstance(delay, bool) else float(str(delay))
    except ValueError:
        return None
    return math.ceil(number) if math.isfinite(number) else None


def _published(about: BasicProperties, now: int) -> int:
    """Returns when a message was published, ms since the epoch; `now` if nobody has noted it."""
    at = (about.headers or {}).get("timestamp_in_ms")
    if isinstance(at, int) and not isinstance(at, bool) and at > 0:
        return at
    seconds = about.timestamp
    if isinstance(seconds, datetime):
        return round(seconds.timestamp() * 1000)
    if not seconds:  # some publishers give 0 for none
        return now
    return int(seconds) if seconds >= _MILLIS_FROM else int(seconds) * 1000  # some publishers give ms


def _properties(method: Basic.GetOk, about: BasicProperties) -> dict[str, object]:
    """Returns the properties of a message: its headers with plain values, and RabbitMQ's own fields."""
    headers = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in _with_text_names(about.headers or {}).items()
        if isinstance(value, str | int | float)
        and name not in (_DELAY, *_COUNTS)
        and not name.startswith(RESERVED_PREFIX)
    }
    own = {
        "exchange": method.exchange,
        "routingKey": method.routing_key,
        "contentType": about.content_type,
        "contentEncoding": about.content_encoding,
        "correlationId": about.correlation_id,
        "messageId": about.message_id,
        "type": about.type,
    }
    return headers | {name: text(value) if isinstance(value, bytes) else value for name, value in own.items()}


def _with_text_names(value: Any) -> Any:
    """Returns headers, or a value of one, with text for names that are no UTF-8, of which pika makes bytes."""
    if isinstance(value, dict):
        return {n if isinstance(n, str) else text(n): _with_text_names(part) for n, part in value.items()}
    return [_with_text_names(part) for part in value] if isinstance(value, list) else value


def _digest(method: Basic.GetOk, about: BasicProperties, body: bytes) -> str:
    """Returns a hash of the whole message, which is the same each time that it is read."""
    headers = {n: value for n, value in _with_text_names(about.headers or {}).items() if n not in _COUNTS}
    fields = {name: value for name, value in (vars(about) | {"headers": headers or None}).items() if value is not None}
    whole = json.dumps([method.exchange, method.routing_key, fields], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode(errors="backslashreplace") + b"\0" + body).hexdigest()
