"""Reads Celery on Redis: tasks with an ETA, in a queue's list, or in the hash `unacked` if a worker has taken them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from checkpoint_from_tables.other_systems.item import (
    Item,
    end_millis,
    iso_millis,
    item,
    json_object,
    rejected_item,
    unreadable,
)
from checkpoint_from_tables.other_systems.redis_server import names_of

_AT_ONCE = 1_000

_BINDING_PARTS = 3  # routing key, pattern, queue

SEPARATOR = "\x06\x16"  # kombu's own, between the name of a queue and a priority, and within a binding

# A separator that an application may have chosen, and a priority, at the end of the name of a list.
_OTHER_PRIORITY = re.compile(r"[^0-9A-Za-z]+[0-9]+")


class Celery:
    """The tasks with an ETA or a countdown. Workers must be stopped, because they also keep their tasks in memory.

    Args:
        redis: a client, as of redis-py, whose answers are bytes.
        queues: the queues to read; empty: the queue `celery`.
        prefix: the `global_keyprefix` of the broker's transport options.
        separator: their `sep`. All priorities are read, whatever `priority_steps` are.
    """

    def __init__(self, redis: Any, queues: Collection[str], prefix: str, separator: str = SEPARATOR) -> None:
        self._redis = redis
        self._queues = queues or ("celery",)
        self._prefix = prefix
        self._separator = separator
        self._bindings: dict[str, list[list[str]]] = {}
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        """Yields the tasks in the queues' lists, then those that workers have taken."""
        for queue in self._queues:
            for key in self._lists(queue):
                for message in self._list(key):
                    yield from self._with_eta(message, queue)
        for _, value in self._redis.hscan_iter(f"{self._prefix}unacked", count=_AT_ONCE):
            try:
                message, exchange, routing_key = json.loads(value)
            except (ValueError, TypeError, RecursionError):
                yield unreadable("celery", value, "no JSON list of a message, its exchange and its routing key")
                continue
            queues = self._queues_of(exchange, routing_key)
            own = next((queue for queue in queues if queue in self._queues), None)
            if own is not None:
                content = message if isinstance(message, str) else json.dumps(message)
                yield from self._with_eta(content.encode(errors="backslashreplace"), own)
            else:
                self.left["of other queues" if queues else "taken by a worker, of no known queue"] += 1

    def _lists(self, queue: str) -> list[str]:
        """Returns the names of a queue's lists; counts what is in lists that look as if they were of it, too."""
        first = f"{self._prefix}{queue}"
        of_priority = re.compile(re.escape(self._separator) + "[0-9]+")
        lists = [first]
        for name in sorted(names_of(self._redis, first, "", "list")):
            if of_priority.fullmatch(name):
                lists.append(first + name)
            elif _OTHER_PRIORITY.fullmatch(name) and queue + name not in self._queues:
                self.left[f"in {first}{name}: a queue, or another sep"] += self._redis.llen(first + name)
        return lists

    def _queues_of(self, exchange: object, routing_key: object) -> list[str]:
        """Returns the queues to which an exchange brings a routing key, as its bindings in Redis say."""
        if not isinstance(exchange, str) or not isinstance(routing_key, str):
            return []
        if not exchange:
            return [routing_key]
        if exchange not in self._bindings:
            found = self._redis.smembers(f"{self._prefix}_kombu.binding.{exchange}")
            parts = [member.decode(errors="backslashreplace").split(self._separator) for member in found]
            self._bindings[exchange] = [binding for binding in parts if len(binding) == _BINDING_PARTS]
        bindings = self._bindings[exchange]
        return [queue for key, _, queue in bindings if key == routing_key] or [
            queue for _, pattern, queue in bindings if pattern and _matches(pattern, routing_key)
        ]

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


def _matches(pattern: str, routing_key: str) -> bool:
    """Whether a routing key is one that a topic exchange's pattern, a regular expression of kombu's, lets through."""
    try:
        return re.match(pattern, routing_key) is not None
    except re.error:
        return False


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
    payload, problem = _body(content)
    about = _about(headers, payload)
    if about is None:
        return unreadable("celery", message, "its headers name no task, as of protocol 1, and its body is no JSON")
    name, eta, ends = about.get("id"), about.get("eta"), about.get("expires")
    if eta is None:
        return None
    if not isinstance(name, str) or not name:
        return unreadable("celery", message, "its headers have no id")
    id = f"celery:{name}"
    due = iso_millis(eta) if isinstance(eta, str) else None
    if due is None:
        return rejected_item(id, f"its eta {eta} is no time", message)
    if problem is not None:
        return rejected_item(id, problem, message)
    properties = {
        "task": about.get("task"),
        "taskId": name,
        "queue": queue,
        "contentType": content.get("content-type"),
        "contentEncoding": content.get("content-encoding"),
        "compression": headers.get("compression"),
        "retries": about.get("retries") or None,
        "expires": ends,
        "expireAt": end_millis(iso_millis(ends) if isinstance(ends, str) else None),
    }
    return item(id, due, payload, properties)


def _body(content: dict[str, Any]) -> tuple[bytes, str | None]:
    """Returns (body of a message, why it can't be read; None: it can)."""
    body, about = content.get("body"), content.get("properties")
    if not isinstance(body, str):
        return b"", "its body is no text"
    try:
        is_base64 = isinstance(about, dict) and about.get("body_encoding") == "base64"
        return base64.b64decode(body, validate=True) if is_base64 else body.encode(), None
    except (binascii.Error, ValueError):
        return b"", "its body can't be decoded"


def _about(headers: dict[str, Any], payload: bytes) -> dict[str, Any] | None:
    """Returns the fields that tell of a task: the headers, or the body as of protocol 1; None: it can't be read."""
    if any(headers.get(name) is not None for name in ("task", "id", "eta")):
        return headers
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else {}
