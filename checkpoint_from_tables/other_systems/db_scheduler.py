"""Reads the schedules of db-scheduler's persistent recurring tasks, which are in the tasks' data."""

from __future__ import annotations

from typing import Any

from checkpoint_from_tables.other_systems.item import json_object
from checkpoint_from_tables.other_systems.repeats import Rule, every, iso_duration_millis

_TYPES = ("cron", "fixedDelay", "daily")

# In data that Java itself has serialized: the package of all schedules, and the interface of data with a schedule.
_IN_JAVA = (b"com.github.kagkarlsson.scheduler.task.schedule.", b"ScheduleAndData")


def has_schedule(data: bytes | None) -> bool:
    """Whether a task's data is that of a persistent recurring task."""
    return data is not None and (_schedule(data) is not None or any(name in data for name in _IN_JAVA))


def rule_of(data: bytes) -> Rule | None:
    """Returns the rule in a task's data; None: it is none that can be read, as where Java itself has serialized it."""
    schedule = _schedule(data)
    if schedule is None:
        return None
    zone = schedule.get("zoneId", schedule.get("zone"))
    if schedule["type"] == "cron":
        pattern = schedule.get("pattern")
        return Rule(pattern, zone) if isinstance(pattern, str) and isinstance(zone, str) else None
    if schedule["type"] == "fixedDelay":
        millis = _millis(schedule.get("duration"))
        return None if millis is None else Rule(every(millis))
    times = schedule.get("times")
    time = _time(times[0]) if isinstance(times, list) and len(times) == 1 else None
    return Rule(time, zone) if time is not None and isinstance(zone, str) else None


def _schedule(data: bytes) -> dict[str, Any] | None:
    for value in (json_object(data) or {}).values():
        if isinstance(value, dict) and value.get("type") in _TYPES:
            return value
    return None


def _millis(duration: object) -> float | None:
    if isinstance(duration, str):
        return iso_duration_millis(duration)
    return duration * 1_000 if isinstance(duration, int | float) and not isinstance(duration, bool) else None


def _time(time: object) -> str | None:
    """Returns a time of day, as `08:00`, `08:00:30` or [8, 0], as a cron expression of six fields."""
    parts = time.split(":") if isinstance(time, str) else time
    if not isinstance(parts, list) or not 2 <= len(parts) <= 3:
        return None
    try:
        hour, minute, second = (int(part) for part in [*parts, 0][:3])
    except (TypeError, ValueError):
        return None
    return f"{second} {minute} {hour} * * *"
