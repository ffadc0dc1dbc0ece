"""The demo's consumers: one on each destination and rejects topic, in threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import pulsar

from broker.client import connect
from jobs.demo.plan import Received

if TYPE_CHECKING:
    from conf.settings import Settings

_RECEIVE_MILLIS = 300
_RECENT = 3_000  # the number of last deliveries whose lateness the progress shows


class SteadyClock:
    """The machine's clock, but one that never goes back.

    Virtual machines set their clock back by some milliseconds. A message sent before that, and received after, would
    seem early.
    """

    def __init__(self) -> None:
        self._origin = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        """Returns the time, ms since the epoch."""
        wall, monotonic = time.time_ns(), time.monotonic_ns()
        self._origin = max(self._origin, wall - monotonic)
        return (monotonic + self._origin) // 1_000_000


class Consumers:
    """Receives all messages that are delivered or rejected, from the beginning of their topics. A context manager.

    Attributes:
        received: all received messages, in no order.
        recent: the last messages received at destinations.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._rejected = {route.source: 0 for route in settings.routes}
        self.received: list[Received] = []
        self.recent: deque[Received] = deque(maxlen=_RECENT)
        self._clock = SteadyClock()
        self._client = connect(settings.pulsar)

    def __enter__(self) -> Self:
        for route in self._settings.routes:
            targets = [(s.destination, s.name) for s in route.subscriptions]
            for destination, subscription in [*targets, (route.rejects_topic, None)]:
                consumer = self._client.subscribe(
                    destination, "demo", initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=2_000
                )
                thread = threading.Thread(target=self._run, args=(consumer, route.source, subscription), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._client.close()

    @property
    def rejected(self) -> int:
        """The number of messages received at rejects topics."""
        return sum(self._rejected.values())

    @property
    def delivered(self) -> int:
        """The number of messages received at destinations."""
        return len(self.received) - self.rejected

    def _run(self, consumer: Any, source: str, subscription: str | None) -> None:
        while not self._stopped.is_set():
            try:
                message = consumer.receive(_RECEIVE_MILLIS)
            except pulsar.Timeout:
                continue
            now = self._clock.now()
            properties = message.properties()
            number = properties.get("n", "")
            received = Received(
                int(number) if number.isdecimal() else -1,
                source,
                subscription,
                message.data(),
                message.partition_key() or None,
                properties,
                message.publish_timestamp(),
                now,
            )
            self.received.append(received)
            if subscription is None:
                self._rejected[source] += 1
            else:
                self.recent.append(received)
            consumer.acknowledge_cumulative(message)
