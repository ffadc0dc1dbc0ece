"""Producers for source topics: made when first needed, and as many kept as are allowed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.client import FIRST_SEQUENCE_ID, close_quietly

if TYPE_CHECKING:
    import pulsar

MOST_PRODUCERS = 100  # that are kept, beyond those in use

# With which the client neither blocks nor refuses: calls, and the bytes of their bodies, are limited before.
_OPTIONS: dict[str, Any] = {
    "batching_enabled": False,
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 0,
    "initial_sequence_id": FIRST_SEQUENCE_ID,
}


@dataclass
class _Kept:
    producer: asyncio.Task[pulsar.Producer]
    users: int = 0


@dataclass
class SourceProducers:
    """Producers of one event loop, by topic. Those that were not used for longest are closed.

    Attributes:
        make_producer: makes a producer of a topic; blocks.
        most: how many are kept when they are not in use.
    """

    make_producer: Callable[[str, dict[str, Any]], pulsar.Producer]
    most: int = MOST_PRODUCERS
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """The number of topics with a producer."""
        return len(self._kept)

    @asynccontextmanager
    async def producer(self, topic: str) -> AsyncIterator[pulsar.Producer]:
        """Gives the producer of a topic, which is not closed meanwhile.

        Raises:
            pulsar.PulsarException: the broker gives none; the next call tries again.
        """
        kept = self._kept.get(topic)
        if kept is None or (kept.producer.done() and not _is_usable(kept.producer)):
            make = asyncio.to_thread(self.make_producer, topic, _OPTIONS)
            kept = self._kept[topic] = _Kept(asyncio.create_task(make))
        self._kept.move_to_end(topic)
        kept.users += 1
        try:
            yield await asyncio.shield(kept.producer)
        finally:
            kept.users -= 1
            self._close_unused()

    def forget(self) -> None:
        """Forgets all producers: their client is closed, and with it they are."""
        self._kept.clear()

    def _close_unused(self) -> None:
        unused = [topic for topic, kept in self._kept.items() if not kept.users]
        for topic in unused[: max(0, len(self._kept) - self.most)]:
            closing = self._kept.pop(topic).producer
            if closing.done() and not closing.cancelled() and closing.exception() is None:
                asyncio.get_running_loop().run_in_executor(None, close_quietly, closing.result())


def _is_usable(made: asyncio.Task[pulsar.Producer]) -> bool:
    return not made.cancelled() and made.exception() is None
