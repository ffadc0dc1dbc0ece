"""The consumer that the docs show is the one that is run by tests, and what it sends back is the message."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, cast

import pulsar
import pytest
from delaylake import Client, Invalid, NotFound
from retrying_consumer import handle

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("language", "file", "indent"),
    [
        ("python", "clients/python/examples/retrying_consumer.py", ""),
        ("java", "clients/java/client/src/main/java/delaylake/RetryingConsumer.java", "    "),
    ],
)
def test_the_docs_show_the_example(language: str, file: str, indent: str) -> None:
    docs = (ROOT / "docs/retries.md").read_text()
    shown = docs.partition(f"```{language}\n")[2].partition("```")[0].rstrip()
    assert shown
    assert textwrap.indent(shown, indent) in (ROOT / file).read_text()


class _Service:
    """A service that does not retry a message by its id, and the broker beside it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.sent: list[tuple[str, bytes, dict[str, Any]]] = []
        self.acknowledged: list[object] = []
        self.retried: list[str] = []

    def retry(self, topic: str, message_id: str, **_: str) -> None:
        self.retried.append(message_id)
        if self.error is not None:
            raise self.error

    def create_producer(self, topic: str) -> _Service:
        self.topic = topic
        return self

    def send(self, payload: bytes, **given: Any) -> None:
        self.sent.append((self.topic, payload, given))

    def close(self) -> None:
        pass

    def acknowledge(self, message: object) -> None:
        self.acknowledged.append(message)


class _Message:
    def data(self) -> bytes:
        return b"pay"

    def properties(self) -> dict[str, str]:
        return {"delaylake.messageId": "7:0:-1:-1", "delaylake.source": "orders", "delaylake.attempt": "2", "of": "me"}

    def partition_key(self) -> str:
        return "k"

    def ordering_key(self) -> str:
        return "o"

    def event_timestamp(self) -> int:
        return 77


@pytest.mark.parametrize("error", [None, NotFound("not kept"), Invalid("it recurs")])
def test_what_is_not_retried_by_its_id_is_sent_back_with_its_keys_and_time(error: Exception | None) -> None:
    service, message = _Service(error), _Message()

    def fails(_: pulsar.Message) -> None:
        raise RuntimeError("no connection")

    handle(
        cast(Client, service), cast(Any, service), cast(Any, service), cast(pulsar.Message, message), "billing", fails
    )
    assert service.retried == ["7:0:-1:-1"]
    assert service.acknowledged == [message]
    if error is None:
        assert service.sent == []
        return
    [(topic, payload, given)] = service.sent
    assert (topic, payload) == ("orders", b"pay")
    assert (given["partition_key"], given["ordering_key"], given["event_timestamp"]) == ("k", "o", 77)
    retry = {
        "retryOf": "7:0:-1:-1",
        "retrySubscription": "billing",
        "retryReason": "RuntimeError: no connection",
    }
    assert given["properties"] == message.properties() | retry
