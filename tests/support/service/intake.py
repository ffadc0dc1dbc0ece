"""A Pulsar client without a broker for an intake, and the settings and offsets with which it begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pulsar

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from warehouse.routes.known_routes import known_routes

ORDERS, OTHER = "persistent://public/default/orders", "persistent://public/default/other"
CONTROL = "persistent://public/default/delaylake-control"
POSITIONS = {ORDERS: "1:5", OTHER: "2:7", CONTROL: "3:1"}


class Consumer:
    """Of a topic with a few messages."""

    def __init__(self, messages: Sequence[Any] = ()) -> None:
        self._messages = deque(messages)
        self.acknowledged: list[tuple[int, int]] = []
        self._closed = threading.Event()

    def receive(self, millis: int) -> Any:
        if not self._messages:
            self._closed.wait(min(millis, 20) / 1000)
        if self._messages:
            return self._messages.popleft()
        raise pulsar.Timeout

    def publish(self, messages: Sequence[Any]) -> None:
        self._messages.extend(messages)

    def acknowledge_cumulative(self, message_id: pulsar.MessageId) -> None:
        self.acknowledged.append((message_id.ledger_id(), message_id.entry_id()))

    def is_connected(self) -> bool:
        return not self._closed.is_set()

    def get_last_message_id(self) -> pulsar.MessageId:
        return pulsar.MessageId(-1, -1, -1, -1)

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
        routes=[  # type: ignore[arg-type]
            {"source": f"persistent://public/default/{topic}", "subscriptions": [{"name": name} for name in names]}
            for topic, names in routes.items()
        ],
    )


def offset(before: Settings, **values: Any) -> Offset:
    return Offset(tick=4, run_id="before", positions=POSITIONS, routes=known_routes(before).to_json(), **values)
