"""Makes a recurring message of the next run of a repeatable job, where its rule is one that a message can have."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from checkpoint_from_tables.other_systems.item import Item
from tracker.recurrence.recurrence import REPEAT, REPEAT_TIMES, REPEAT_UNTIL, TIME_ZONE, Recurrence

# In `Source.left`: next runs of jobs whose rule is not known, or is none that a message can have.
LEFT = "repeats, left"

_MOST_MILLIS = 1 << 60

_ISO_DURATION = re.compile(r"P(?:(\d+)D)?T?(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?")


@dataclass(frozen=True)
class Rule:
    """The rule by which a job repeats.

    Attributes:
        repeat: as the property `repeat`.
        time_zone: IANA name.
        until_millis: no run is later, ms since the epoch; None: no such end.
        times: how many runs are left, the next one included; None: no such end.
    """

    repeat: str
    time_zone: str = "UTC"
    until_millis: int | None = None
    times: int | None = None


def every(millis: float) -> str:
    """Returns an interval as the property `repeat`; of one that is infinite or no number, a rule that is none."""
    return f"@every {round(millis)}ms" if abs(millis) < _MOST_MILLIS else "@every never"


def recurring(run: Item, rule: Rule | None) -> Item | None:
    """Returns the next run of a repeatable job as a recurring message; a rejected one as it is.

    Args:
        run: the next run.
        rule: of the job; None: it is not known.

    Returns:
        None: the rule is none that a message can have, or the run is at another time than by a cron expression.
    """
    if run.reason is not None:
        return run
    if rule is None or run.due is None:
        return None
    repeat = rule.repeat.replace("?", "*")  # as cron expressions of Java's and Node's libraries may have
    try:
        known = Recurrence(repeat, rule.time_zone, rule.until_millis, rule.times)
        # Of a zone that is not told, and of a cron expression that is read otherwise, the next run tells.
        is_of_rule = not known.is_cron or known.first(run.due - 1, None) == run.due
    except Exception:  # whatever the other system takes for a rule
        return None
    if not is_of_rule:
        return None
    texts = {
        REPEAT: repeat,
        TIME_ZONE: rule.time_zone,
        REPEAT_UNTIL: None if rule.until_millis is None else str(rule.until_millis),
        REPEAT_TIMES: None if rule.times is None else str(rule.times),
    }
    return replace(
        run, properties={**run.properties, **{name: text for name, text in texts.items() if text is not None}}
    )


def iso_duration_millis(text: str) -> float | None:
    """Reads a duration in ISO 8601, as `PT1H30M`; None: the text is none, or has months."""
    match = _ISO_DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000
