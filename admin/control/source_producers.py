"""Producers for source topics: made when first needed, and as many kept as are allowed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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


class ProducerSchema(NamedTuple):
    """The schema that a producer's messages have, as Pulsar's admin API has it."""

    type: str
    definition: str


@dataclass
class _Kept:
    producer: asyncio.Task[pulsar.Producer]
    users: int = 0


@dataclass
class SourceProducers:
    """Producers of one event loop, by topic and schema. Those that were not used for longest are closed.

    Attributes:
        make_producer: makes a producer of a topic, or raises a pulsar.PulsarException; blocks.
        most: how many are kept when they are not in use.
    """

    make_producer: Callable[[str, dict[str, Any]], pulsar.Producer]
    most: int = MOST_PRODUCERS
    _kept: OrderedDict[tuple[str, ProducerSchema | None], _Kept] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """The number of producers."""
        return len(self._kept)

    @asynccontextmanager
    async def producer(self, topic: str, schema: ProducerSchema | None = None) -> AsyncIterator[pulsar.Producer]:
        """Gives a producer of a topic, which is not closed meanwhile.

        Args:
            topic: full name of the topic.
            schema: of its messages; None: they have none.

        Raises:
            pulsar.PulsarException: the broker gives none; the next call tries again.
        """
        place = topic, schema
        kept = self._kept.get(place)
        if kept is None or (kept.producer.done() and not _is_usable(kept.producer)):
            options = _OPTIONS if schema is None else _OPTIONS | {"schema": _declared(schema)}
            make = asyncio.to_thread(self.make_producer, topic, options)
            kept = self._kept[place] = _Kept(asyncio.create_task(make))
        self._kept.move_to_end(place)
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
        unused = [place for place, kept in self._kept.items() if not kept.users]
        for place in unused[: max(0, len(self._kept) - self.most)]:
            closing = self._kept.pop(place).producer
            if closing.done() and not closing.cancelled() and closing.exception() is None:
                asyncio.get_running_loop().run_in_executor(None, close_quietly, closing.result())


def _declared(schema: ProducerSchema) -> object:
    """Returns the schema as Pulsar's client takes it, for messages that are bytes already."""
    import _pulsar
    from pulsar.schema import BytesSchema

    declared = BytesSchema()
    declared._schema_info = _pulsar.SchemaInfo(_pulsar.SchemaType.__members__[schema.type], "", schema.definition)
    return declared


def _is_usable(made: asyncio.Task[pulsar.Producer]) -> bool:
    return not made.cancelled() and made.exception() is None
