"""Opens the systems that an import can read, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from checkpoint_from_tables.other_systems.bullmq import BullMQ
from checkpoint_from_tables.other_systems.celery import SEPARATOR, Celery
from checkpoint_from_tables.other_systems.item import Item, Source, SourceError
from checkpoint_from_tables.other_systems.mapping import read_mapping, shipped
from checkpoint_from_tables.other_systems.postgres import PostgresTable
from checkpoint_from_tables.other_systems.rabbitmq import RabbitMQ
from checkpoint_from_tables.other_systems.redis_server import connect, items_of
from checkpoint_from_tables.other_systems.rq import RQ
from checkpoint_from_tables.other_systems.sidekiq import Sidekiq

_ON_REDIS: dict[str, Callable[[Any, Collection[str], str], Source]] = {
    "sidekiq": Sidekiq,
    "bullmq": BullMQ,
    "celery": Celery,
    "rq": RQ,
}

SYSTEMS = (*_ON_REDIS, *shipped(), "rabbitmq")

_MAPPING_FILES = (".yaml", ".yml")


class OpenSource:
    """A source of any supported system, whose errors are one line.

    Args:
        system: one of SYSTEMS, or a file with the mapping of a Postgres table.
        url: of the system.
        queues: only items of these queues; empty: of all, or of the system's default queue.
        prefix: of the names of keys in Redis; empty: the system's default.
        due_after: items that are due by this time, ms since the epoch, or at once, are left out; None: none is.
        separator: of Celery, `sep` of its broker's transport options; empty: kombu's default.

    Raises:
        SourceError: there is no such system or file, its client is not installed, or the URL is wrong.
    """

    def __init__(
        self,
        system: str,
        url: str,
        queues: Collection[str] = (),
        prefix: str = "",
        due_after: int | None = None,
        separator: str = "",
    ) -> None:
        if system not in SYSTEMS and not system.endswith(_MAPPING_FILES):
            raise SourceError(f"--from: {system} is neither a YAML file nor one of {', '.join(SYSTEMS)}")
        if prefix and system not in _ON_REDIS:
            raise SourceError("--prefix: it is of keys in Redis")
        if separator and system != "celery":
            raise SourceError("--sep: it is of Celery's queues in Redis")
        self._items: Callable[[], Iterator[Item]]
        source: Source
        if system == "celery":
            source = Celery(connect(url), queues, prefix, separator or SEPARATOR)
            self._items = lambda: items_of(source)
        elif system in _ON_REDIS:
            source = _ON_REDIS[system](connect(url), queues, prefix)
            self._items = lambda: items_of(source)
        elif system == "rabbitmq":
            source = RabbitMQ(url, queues)
            self._items = source.items
        else:
            source = PostgresTable(url, read_mapping(system), queues)
            self._items = source.items
        self._due_after = due_after
        self.left = source.left

    def items(self) -> Iterator[Item]:
        """Yields the items.

        Raises:
            SourceError: the system can't be read.
        """
        for found in self._items():
            if self._due_after is not None and found.reason is None and (found.due or 0) <= self._due_after:
                self.left["due too soon"] += 1
            else:
                yield found
