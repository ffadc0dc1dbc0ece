"""Reads BullMQ and Bull: a sorted set of the ids of delayed jobs for each queue, and a hash for each job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from checkpoint_from_tables.other_systems.item import Item, iso_millis, item, json_object, rejected_item
from checkpoint_from_tables.other_systems.redis_server import hashes, names_of, text
from checkpoint_from_tables.other_systems.repeats import LEFT, Rule, every, recurring

_FIELDS = ("name", "data", "timestamp", "attemptsMade", "atm", "rjk", "opts")

# What the id of a run of a repeatable job begins with, before the job's key and the time of the run.
_REPEAT = "repeat:"

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
                found = job(begin, queue, member, score, fields)
                if found is None:
                    self.left[LEFT] += 1
                else:
                    yield found


def job(begin: str, queue: str, member: bytes, score: float, fields: Mapping[str, bytes]) -> Item | None:
    """Returns a job as an item; its payload is the job's `data`, which is usually JSON.

    The next run of a repeatable job is a recurring message, and known by the repeatable job.

    Args:
        begin: the beginning of the names of the queue's keys. Ids are unique among the existing jobs of a queue; a
            later job may have the same id, and another time of creation.
        queue: the name of the queue.
        member: the job's id.
        score: the time at which the job is due, ms since the epoch, multiplied by 4096.
        fields: of the job's hash.

    Returns:
        None: it is the next run of a repeatable job, whose rule is not known.
    """
    name = text(member) or ""
    attempts = text(fields.get("attemptsMade", fields.get("atm")))
    options = json_object(fields.get("opts", b"")) or {}
    # A run that has failed is tried again by itself: its job's next run waits, too.
    is_next = attempts in (None, "", "0") and (
        "rjk" in fields or name.startswith(_REPEAT) or isinstance(options.get("repeat"), dict)
    )
    key = text(fields.get("rjk")) or name.removeprefix(_REPEAT).rpartition(":")[0] or name
    id = f"bullmq:{begin}{_REPEAT}{key}" if is_next else f"bullmq:{begin}{name}:{text(fields.get('timestamp'))}"
    data = fields.get("data")
    if data is None:
        return rejected_item(id, "its hash is not there, or has no data", None)
    properties = {"queue": queue, "jobId": name, "name": text(fields.get("name")), "attemptsMade": attempts}
    found = item(id, score // _PER_MILLI, data, properties)
    return recurring(found, _rule(options.get("repeat"))) if is_next else found


def _rule(repeat: object) -> Rule | None:
    """Returns the rule in the options of a repeatable job, as Bull, BullMQ 1 to 4 and job schedulers have them."""
    if not isinstance(repeat, dict):
        return None
    pattern, interval = repeat.get("pattern", repeat.get("cron")), _number(repeat.get("every"))
    if isinstance(pattern, str):
        how = pattern
    elif interval is not None:
        how = every(interval)
    else:
        return None
    ends, limit = repeat.get("endDate"), _number(repeat.get("limit"))
    until = iso_millis(ends) if isinstance(ends, str) and _number(ends) is None else _number(ends)
    if ends is not None and until is None:
        return None
    times = None if limit is None else int(limit) - int(_number(repeat.get("count")) or 1) + 1
    zone = repeat.get("tz")
    return Rule(how, zone if isinstance(zone, str) and zone else "UTC", None if until is None else int(until), times)


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
