"""Tasks as Celery itself writes them to a real server, by its transport options, exchanges and routing keys."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery as App
from kombu import Exchange, Queue

from checkpoint_from_tables.other_systems.celery import Celery
from checkpoint_from_tables.other_systems.sources import OpenSource
from tests.support.servers.redis_server import redis_server, url_of

pytestmark = pytest.mark.slow

ETA = datetime(2030, 1, 1, tzinfo=UTC)
NUMBERED = {"priority_steps": list(range(10)), "sep": ":", "queue_order_strategy": "priority"}
MAIL = Queue("mail", Exchange("post", type="direct"), routing_key="letters")
NEWS = Queue("news", Exchange("press", type="topic"), routing_key="paper.#")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with redis_server(tmp_path) as server:
        yield server


def app_of(server: redis.Redis, options: dict[str, Any]) -> App:
    app = App("shop", broker=url_of(server), set_as_current=False)
    app.conf.broker_transport_options = options
    app.conf.task_queues = [Queue("celery", Exchange("celery"), routing_key="celery"), MAIL, NEWS]
    return app


def tasks(source: Celery) -> Counter[str]:
    found = list(source.items())
    assert [one.reason for one in found] == [None] * len(found)
    return Counter(one.properties["task"] for one in found)


@pytest.mark.parametrize(
    "options", [{}, {"priority_steps": [0, 5, 7]}, NUMBERED, {"sep": ":", "global_keyprefix": "a:"}]
)
def test_all_priorities_are_read_whatever_the_steps_and_the_separator_are(
    server: redis.Redis, options: dict[str, Any]
) -> None:
    separator = {"separator": options["sep"]} if "sep" in options else {}
    with app_of(server, options) as app:
        for priority in range(10):
            app.send_task(f"at {priority}", eta=ETA, priority=priority)
        source = Celery(server, [], options.get("global_keyprefix", ""), **separator)
        assert tasks(source) == {f"at {priority}": 1 for priority in range(10)}
        assert source.left == {}
        if separator:
            other = Celery(server, [], options.get("global_keyprefix", ""))
            seen = sum(tasks(other).values())
            assert seen < 10
            assert sum(other.left.values()) == 10 - seen
            assert all("a queue, or another sep" in reason for reason in other.left)


def test_a_list_that_is_another_queue_is_named_and_not_read(server: redis.Redis) -> None:
    with app_of(server, {}) as app:
        app.send_task("own", eta=ETA)
        app.send_task("other's", eta=ETA, queue="celery-2")
        app.send_task("another's", eta=ETA, queue="celery2")
    source = Celery(server, [], "")
    assert tasks(source) == {"own": 1}
    assert source.left == {"in celery-2: a queue, or another sep": 1}
    both = Celery(server, ["celery", "celery-2"], "")
    assert tasks(both) == {"own": 1, "other's": 1}
    assert both.left == {}


@pytest.mark.parametrize("options", [{}, {"sep": ":"}])
def test_what_a_worker_has_taken_is_of_the_queue_to_which_its_exchange_brings_it(
    server: redis.Redis, options: dict[str, Any]
) -> None:
    with app_of(server, options) as app, app.connection_for_read() as worker:
        app.send_task("direct", eta=ETA, queue="mail")
        app.send_task("topic", eta=ETA, exchange="press", routing_key="paper.daily", declare=[NEWS])
        app.send_task("ready", queue="mail")
        channel = worker.channel()
        for queue in (MAIL, NEWS):
            bound = queue.bind(channel)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                while bound.get() is not None:
                    pass
        assert server.hlen("unacked") == 3
        separator = options.get("sep", "\x06\x16")
        for queues, expected, left in (
            (["mail"], {"direct": 1}, {"without an eta": 1, "of other queues": 1}),
            (["news"], {"topic": 1}, {"of other queues": 2}),
            (["letters", "paper.daily"], {}, {"of other queues": 3}),
        ):
            source = Celery(server, queues, "", separator)
            found = list(source.items())
            assert Counter(one.properties["task"] for one in found) == expected
            assert all(one.properties["queue"] == queues[0] for one in found)
            assert source.left == left
        server.hset("unacked", "x", '["{}", "nowhere", "key"]')
        source = Celery(server, ["mail"], "", separator)
        list(source.items())
        assert source.left["taken by a worker, of no known queue"] == 1


def test_sep_is_celery_s_alone(server: redis.Redis) -> None:
    assert list(OpenSource("celery", url_of(server), separator=":").items()) == []
    with pytest.raises(Exception, match="--sep: it is of Celery"):
        OpenSource("rq", url_of(server), separator=":")
