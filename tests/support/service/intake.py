"""A Pulsar client without a broker for an intake, and the settings and offsets with which it begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pulsar

from broker.position import START, Position
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.protocol.session import DisconnectedError
from conf.settings import PulsarSettings, Settings
from streaming.checkpoint.offset import Offset
from warehouse.routes.known_routes import known_routes

ORDERS, OTHER = "persistent://public/default/orders", "persistent://public/default/other"
CONTROL = "persistent://public/default/delaylake-control"
POSITIONS = {ORDERS: "1:5", OTHER: "2:7", CONTROL: "3:1"}


class Consumer(EntryConsumer):
    """Of a topic with a few entries."""

    def __init__(self, messages: Sequence[ReceivedEntry] = ()) -> None:
        self._messages = deque(messages)
        self.acknowledged: list[tuple[int, int]] = []
        self.end = START  # the topic's last entry
        self._closed = threading.Event()
        self._share = None

    @property
    def max_message_bytes(self) -> int:
        return 5 << 20

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        if not self._messages:
            self._closed.wait(min(timeout_seconds, 0.02))
        return self._messages.popleft() if self._messages else None

    def publish(self, messages: Sequence[ReceivedEntry]) -> None:
        self._messages.extend(messages)

    def acknowledge(self, last: Position) -> None:
        self.acknowledged.append(last)

    def last_entry(self) -> Position:
        if self._closed.is_set():
            raise DisconnectedError("closed")
        return self.end

    def close(self) -> None:
        self._closed.set()


class Client:
    def __init__(self) -> None:
        self.consumers: dict[str, Consumer] = {}
        self.forbidden: set[str] = set()  # topics that can't be looked up
        self.partitions: dict[str, int] = {}

    def subscribe(self, name: str, *_: Any, **__: Any) -> Consumer:
        return self.consumers.setdefault(name, Consumer())

    def get_topic_partitions(self, topic: str) -> list[str]:
        if topic in self.forbidden:
            raise pulsar.AuthorizationError(f"no rights on {topic}")
        n = self.partitions.get(topic, 0)
        return [f"{topic}-partition-{i}" for i in range(n)] if n else [topic]

    def close(self) -> None: ...


def settings(**routes: list[str]) -> Settings:
    return Settings(
        replicated="all",  # nobody answers where messages are from
        pulsar=PulsarSettings(admin_url="http://127.0.0.1:1"),  # no broker, also where one runs on this machine
        routes=[  # type: ignore[arg-type]
            {"source": f"persistent://public/default/{topic}", "subscriptions": [{"name": name} for name in names]}
            for topic, names in routes.items()
        ],
    )


def offset(before: Settings, **values: Any) -> Offset:
    return Offset(tick=4, run_id="before", positions=POSITIONS, routes=known_routes(before).to_json(), **values)
