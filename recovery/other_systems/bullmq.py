"""Reads BullMQ and Bull: a sorted set of the ids of delayed jobs for each queue, and a hash for each job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from recovery.other_systems.item import Item, item, rejected_item
from recovery.other_systems.redis_server import hashes, names_of, text

_FIELDS = ("name", "data", "timestamp", "attemptsMade", "atm", "rjk")

# A score is the time in ms, multiplied by this, plus a count that keeps jobs of one ms in order.
_PER_MILLI = 0x1000


class BullMQ:
    """The delayed jobs of queues.

    Args:
        redis: a client, as of redis-py, whose answers are bytes.
        queues: the queues to read; empty: all.
        prefix: of the names of keys, before the queue and with its colon; empty: BullMQ's default.
    """

    def __init__(self, redis: Any, queues: Collection[str], prefix: str) -> None:
        self._redis = redis
        self._queues = queues
        self._prefix = prefix or "bull:"
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the delayed jobs, queue by queue."""
        for queue in self._queues or names_of(self._redis, self._prefix, ":delayed"):
            begin = f"{self._prefix}{queue}:"
            for member, score, fields in hashes(self._redis, f"{begin}delayed", begin, _FIELDS):
                yield job(begin, queue, member, score, fields)


def job(begin: str, queue: str, member: bytes, score: float, fields: Mapping[str, bytes]) -> Item:
    """Returns a job as an item; its payload is the job's `data`, which is usually JSON.

    Args:
        begin: the beginning of the names of the queue's keys. Ids are unique among the existing jobs of a queue; a
            later job may have the same id, and another time of creation.
        queue: the name of the queue.
        member: the job's id.
        score: the time at which the job is due, ms since the epoch, multiplied by 4096.
        fields: of the job's hash.
    """
    name = text(member)
    id = f"bullmq:{begin}{name}:{text(fields.get('timestamp'))}"
    data = fields.get("data")
    if data is None:
        return rejected_item(id, "its hash is not there, or has no data", None)
    if "rjk" in fields:
        return rejected_item(id, "the next run of a job scheduler: make a recurring message of it", data)
    properties = {
        "queue": queue,
        "jobId": name,
        "name": text(fields.get("name")),
        "attemptsMade": text(fields.get("attemptsMade", fields.get("atm"))),
    }
    return item(id, score // _PER_MILLI, data, properties)
