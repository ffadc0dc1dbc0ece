"""Reads Sidekiq: the sorted sets `schedule` and `retry`, whose members are jobs as JSON, by their time in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from checkpoint_from_tables.other_systems.item import (
    Item,
    end_millis,
    is_number,
    item,
    json_object,
    rejected_item,
    unreadable,
)

_SETS = ("schedule", "retry")
_AT_ONCE = 1_000


class Sidekiq:
    """The jobs that wait for their time, or for another attempt.

    Args:
        redis: a client, as of redis-py, whose answers are bytes.
        queues: only jobs of these queues; empty: of all.
        prefix: the namespace before the names of keys, with its colon.
    """

    def __init__(self, redis: Any, queues: Collection[str], prefix: str) -> None:
        self._redis = redis
        self._queues = queues
        self._prefix = prefix
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the jobs of both sets."""
        for name in _SETS:
            for member, seconds in self._redis.zscan_iter(self._prefix + name, count=_AT_ONCE):
                queue, found = job(member, seconds)
                if self._queues and queue is not None and queue not in self._queues:
                    self.left["of other queues"] += 1
                else:
                    yield found


def job(member: bytes, seconds: float) -> tuple[str | None, Item]:
    """Returns (queue, job as an item); the queue is None if it can't be read, the payload is the job's JSON."""
    content = json_object(member)
    jid = content.get("jid") if content is not None else None
    if content is None or not isinstance(jid, str) or not jid:
        return None, unreadable("sidekiq", member, "no JSON object with a jid")
    queue = content.get("queue", "default")
    if not isinstance(queue, str):
        return None, rejected_item(f"sidekiq:{jid}", "its queue is no text", member)
    properties = {
        "class": content.get("wrapped") or content.get("class"),
        "jid": jid,
        "queue": queue,
        "retryCount": content.get("retry_count"),
        "expireAt": end_millis(expiry * 1000 if is_number(expiry := content.get("expiry")) else None),
    }
    return queue, item(f"sidekiq:{jid}", seconds * 1000, member, properties)
