"""When `delaylake run` looks for topics on which anybody may produce."""

from __future__ import annotations

import logging

import pytest

from conf.settings import PulsarSettings, Settings
from jobs import open_topics as module
from jobs.open_topics import warn_of_open_topics


def settings(service_url: str) -> Settings:
    routes = [{"source": "persistent://public/default/orders", "subscriptions": [{"name": "a"}]}]
    return Settings(pulsar=PulsarSettings(service_url=service_url), routes=routes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url", ["pulsar://127.0.0.1:6650", "pulsar://localhost:6650,127.0.0.2:6650", "pulsar://[::1]:1"]
)
def test_a_broker_of_this_machine_alone_is_for_its_users(url: str) -> None:
    assert warn_of_open_topics(settings(url)) is None


def test_each_open_topic_is_named_with_what_it_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(module, "open_topics", lambda pulsar, topics: list(topics))
    thread = warn_of_open_topics(settings("pulsar://broker.example:6650"))
    assert thread is not None
    thread.join()
    for part in (
        "delaylake-control, and so cancel and move any message",
        "delaylake-outcomes, and so forge outcomes",
        "anybody may produce on destinations, as persistent://public/default/orders-a",
    ):
        assert part in caplog.text


def test_a_broker_that_asks_for_credentials_is_not_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "open_topics", lambda pulsar, topics: [])
    thread = warn_of_open_topics(settings("pulsar://broker.example:6650"))
    assert thread is not None
    thread.join()
    assert caplog.text == ""
