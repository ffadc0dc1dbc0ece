"""Reads Celery on Redis: tasks with an ETA, in a queue's list, or in the hash `unacked` if a worker has taken them."""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from recovery.other_systems.item import Item, iso_millis, item, json_object, rejected_item, unreadable

_AT_ONCE = 1_000

# What kombu appends to a queue's name for each priority but the first.
_PRIORITIES = ("", "\x06\x163", "\x06\x166", "\x06\x169")


class Celery:
    """The tasks with an ETA or a countdown. Workers must be stopped, because they also keep their tasks in memory.

    Args:
        redis: a client, as of redis-py, whose answers are bytes.
        queues: the queues to read; empty: the queue `celery`.
        prefix: the `global_keyprefix` of the broker's transport options.
    """

    def __init__(self, redis: Any, queues: Collection[str], prefix: str) -> None:
        self._redis = redis
        self._queues = queues or ("celery",)
        self._prefix = prefix
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the tasks in the queues' lists, then those that workers have taken."""
        for queue in self._queues:
            for priority in _PRIORITIES:
                for message in self._list(f"{self._prefix}{queue}{priority}"):
                    yield from self._with_eta(message, queue)
        for _, value in self._redis.hscan_iter(f"{self._prefix}unacked", count=_AT_ONCE):
            try:
                message, _, queue = json.loads(value)
            except (ValueError, TypeError, RecursionError):
                yield unreadable("celery", value, "no JSON list of a message, its exchange and its queue")
                continue
            if queue in self._queues:
                content = message if isinstance(message, str) else json.dumps(message)
                yield from self._with_eta(content.encode(errors="backslashreplace"), queue)
            else:
                self.left["of other queues"] += 1

    def _list(self, key: str) -> Iterator[bytes]:
        begin = 0
        while messages := self._redis.lrange(key, begin, begin + _AT_ONCE - 1):
            yield from messages
            begin += len(messages)

    def _with_eta(self, message: bytes, queue: str) -> Iterator[Item]:
        found = task(message, queue)
        if found is None:
            self.left["without an eta"] += 1
        else:
            yield found


def task(message: bytes, queue: str) -> Item | None:
    """Returns a task as an item; its payload is the message's body, decoded from base64. None: it has no ETA.

    Args:
        message: as kombu stores it: JSON with body, headers and properties.
        queue: the name of the queue.
    """
    content = json_object(message)
    headers = content.get("headers") if content is not None else None
    if content is None or not isinstance(headers, dict):
        return unreadable("celery", message, "no JSON object with headers")
    name, eta = headers.get("id"), headers.get("eta")
    if eta is None:
        return None
    if not isinstance(name, str) or not name:
        return unreadable("celery", message, "its headers have no id")
    id = f"celery:{name}"
    due = iso_millis(eta) if isinstance(eta, str) else None
    if due is None:
        return rejected_item(id, f"its eta {eta} is no time", message)
    body, about = content.get("body"), content.get("properties")
    if not isinstance(body, str):
        return rejected_item(id, "its body is no text", message)
    try:
        is_base64 = isinstance(about, dict) and about.get("body_encoding") == "base64"
        payload = base64.b64decode(body, validate=True) if is_base64 else body.encode()
    except (binascii.Error, ValueError):
        return rejected_item(id, "its body can't be decoded", message)
    properties = {
        "task": headers.get("task"),
        "taskId": name,
        "queue": queue,
        "contentType": content.get("content-type"),
        "contentEncoding": content.get("content-encoding"),
        "retries": headers.get("retries") or None,
        "expires": headers.get("expires"),
    }
    return item(id, due, payload, properties)
