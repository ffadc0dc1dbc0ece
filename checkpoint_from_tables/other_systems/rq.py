"""Reads RQ: for each queue a sorted set of the ids of scheduled jobs, by their time in seconds; a hash for each job.

rq-scheduler has one such set for all queues.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from checkpoint_from_tables.other_systems.item import Item, item, rejected_item
from checkpoint_from_tables.other_systems.redis_server import hashes, names_of, text
from checkpoint_from_tables.other_systems.repeats import LEFT, Rule, every, recurring

_FIELDS = ("data", "origin", "description", "timeout", "repeats_left", "repeat_intervals", "meta")
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
                    continue
                found = job(member, seconds, fields, is_of_scheduler=queue is None)
                if found is None:
                    self.left[LEFT] += 1
                else:
                    yield found


def job(member: bytes, seconds: float, fields: Mapping[str, bytes], is_of_scheduler: bool = False) -> Item | None:
    """Returns a job as an item; its payload is the function and its arguments, as RQ's serializer has packed them.

    Args:
        member: the job's id.
        seconds: when it is due, since the epoch.
        fields: of the job's hash.
        is_of_scheduler: whether rq-scheduler has scheduled it.

    Returns:
        None: it repeats, by a rule that no message can have. With such a one it is a recurring message.
    """
    id = f"rq:{text(member)}"
    data = fields.get("data")
    if data is None:
        return rejected_item(id, "its hash is not there, or has no data", None)
    try:
        unpacking = zlib.decompressobj()
        payload = unpacking.decompress(data, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            return rejected_item(id, f"it has more than {_MOST_BYTES} bytes", data)
        if not unpacking.eof:
            return rejected_item(id, "its data is cut off: a zlib stream without its end", data)
    except zlib.error:
        payload = data  # as RQ reads it, too
    properties = {
        "jobId": text(member),
        "queue": text(fields.get("origin")),
        "description": text(fields.get("description")),
        "timeout": text(fields.get("timeout")),
    }
    found = item(id, seconds * 1000, payload, properties)
    if is_of_scheduler:
        about = _about(fields.get("meta"))
        if about is None:
            return rejected_item(id, "its meta can't be read, which says whether it repeats", data)
        repeats = "interval" in about or "cron_string" in about
        return recurring(found, _rule_of_scheduler(about)) if repeats else found
    if fields.get("repeats_left", b"") in (b"", b"0"):
        return found
    return recurring(found, _rule(fields))


def _rule(fields: Mapping[str, bytes]) -> Rule | None:
    """Returns the rule of a job with `Repeat`; None: its intervals differ, or can't be read."""
    try:
        left, intervals = int(fields["repeats_left"]), json.loads(fields.get("repeat_intervals", b"[]"))
        return Rule(every(intervals[0] * 1_000), times=left + 1) if len(set(intervals)) == 1 else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _rule_of_scheduler(about: Mapping[Any, Any]) -> Rule | None:
    """Returns the rule in the meta of a job of rq-scheduler."""
    interval, cron, times = about.get("interval"), about.get("cron_string"), about.get("repeat")
    if times is not None and not isinstance(times, int):
        return None
    if isinstance(interval, int | float):
        return Rule(every(interval * 1_000), times=times)
    return Rule(cron, times=times) if isinstance(cron, str) else None


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, texts, lists and dictionaries alone, so nothing is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def _about(meta: bytes | None) -> Mapping[Any, Any] | None:
    """Returns a job's meta, as RQ's serializers write it; None: it can't be read without calling what it names."""
    if not meta:
        return {}
    try:
        found = json.loads(meta)
    except (ValueError, RecursionError):
        try:
            found = _PlainUnpickler(io.BytesIO(meta)).load()
        except Exception:  # whatever damaged bytes lead to
            return None
    return found if isinstance(found, dict) else None
