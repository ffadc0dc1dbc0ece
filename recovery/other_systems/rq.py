"""Reads RQ: for each queue a sorted set of the ids of scheduled jobs, by their time in seconds; a hash for each job.

rq-scheduler has one such set for all queues.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from recovery.other_systems.item import Item, item, rejected_item
from recovery.other_systems.redis_server import hashes, names_of, text

_FIELDS = ("data", "origin", "description", "timeout")
_MOST_BYTES = 64 << 20  # of a job, decompressed


class RQ:
    """The scheduled jobs of RQ, and of rq-scheduler.

    Args:
        redis: a client, as of redis-py, whose answers are bytes.
        queues: the queues to read; empty: all.
        prefix: of the names of keys, with its colon; empty: RQ's default.
    """

    def __init__(self, redis: Any, queues: Collection[str], prefix: str) -> None:
        self._redis = redis
        self._queues = queues
        self._prefix = prefix or "rq:"
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the scheduled jobs, queue by queue, and then those of rq-scheduler."""
        begin = f"{self._prefix}scheduled:"
        queues = self._queues or names_of(self._redis, begin, "")
        sets = [*((begin + queue, queue) for queue in queues), (f"{self._prefix}scheduler:scheduled_jobs", None)]
        for key, queue in sets:
            for member, seconds, fields in hashes(self._redis, key, f"{self._prefix}job:", _FIELDS):
                origin = text(fields.get("origin")) or queue
                # The queue of a job without a hash is not known, so the job is reported, whichever queues are read.
                if self._queues and "data" in fields and origin not in self._queues:
                    self.left["of other queues"] += 1
                else:
                    yield job(member, seconds, fields)


def job(member: bytes, seconds: float, fields: Mapping[str, bytes]) -> Item:
    """Returns a job as an item; its payload is the function and its arguments, as RQ's serializer has packed them."""
    id = f"rq:{text(member)}"
    data = fields.get("data")
    if data is None:
        return rejected_item(id, "its hash is not there, or has no data", None)
    try:
        unpacking = zlib.decompressobj()
        payload = unpacking.decompress(data, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            return rejected_item(id, f"it has more than {_MOST_BYTES} bytes", data)
    except zlib.error:
        payload = data  # as RQ reads it, too
    properties = {
        "jobId": text(member),
        "queue": text(fields.get("origin")),
        "description": text(fields.get("description")),
        "timeout": text(fields.get("timeout")),
    }
    return item(id, seconds * 1000, payload, properties)
