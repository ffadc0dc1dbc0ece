"""Producers for source topics: one a topic, as many as are allowed, and none is closed while it is in use."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from admin.control.source_producers import SourceProducers


class Broker:
    """Makes producers, and notes which are open."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.open: set[str] = set()
        self.fails = False
        self.lock = threading.Lock()

    def make(self, topic: str, options: dict[str, Any]) -> Any:
        if self.fails:
            raise ConnectionError(topic)
        assert options["batching_enabled"] is False
        with self.lock:
            self.made.append(topic)
            self.open.add(topic)
        broker = self

        class Producer:
            name = topic

            def close(self) -> None:
                with broker.lock:
                    broker.open.discard(topic)

        return Producer()


async def use(producers: SourceProducers, topic: str) -> str:
    async with producers.producer(topic) as producer:
        return producer.name


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_calls_at_once_share_a_producer_and_the_oldest_unused_are_closed() -> None:
    async def run() -> None:
        broker = Broker()
        producers = SourceProducers(broker.make, most=3)
        assert await asyncio.gather(*(use(producers, "a") for _ in range(20))) == ["a"] * 20
        assert broker.made == ["a"]
        for topic in "bca":
            await use(producers, topic)
        await use(producers, "d")
        await until(lambda: broker.open == {"c", "a", "d"})
        assert len(producers) == 3
        assert broker.made == ["a", "b", "c", "d"]

    asyncio.run(run())


def test_a_producer_in_use_is_not_closed() -> None:
    async def run() -> None:
        broker = Broker()
        producers = SourceProducers(broker.make, most=1)
        async with producers.producer("a"):
            for topic in "bcd":
                await use(producers, topic)
            assert "a" in broker.open
            await until(lambda: broker.open == {"a"})
        assert len(producers) == 1

    asyncio.run(run())


def test_after_a_failure_the_next_call_tries_again() -> None:
    async def run() -> None:
        broker = Broker()
        producers = SourceProducers(broker.make)
        broker.fails = True
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await use(producers, "a")
        broker.fails = False
        assert await use(producers, "a") == "a"
        producers.forget()
        assert await use(producers, "a") == "a"
        assert broker.made == ["a", "a"]

    asyncio.run(run())


def test_who_gives_up_does_not_stop_others_that_wait_for_the_producer() -> None:
    async def run() -> None:
        broker = Broker()
        begins = threading.Event()

        def make(topic: str, options: dict[str, Any]) -> Any:
            assert begins.wait(20)
            return broker.make(topic, options)

        producers = SourceProducers(make)
        first, second = asyncio.create_task(use(producers, "a")), asyncio.create_task(use(producers, "a"))
        await asyncio.sleep(0)
        first.cancel()
        begins.set()
        assert await second == "a"
        assert broker.made == ["a"]

    asyncio.run(run())
