"""The shortest time between two occurrences of a rule, by its parts alone."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tracker.recurrence.rrule_parts import Parts

_DAY = 86_400
_UNIT = {"HOURLY": 3_600, "MINUTELY": 60, "SECONDLY": 1}
_ALL_HOURS, _ALL_OF_60 = range(24), range(60)


def shortest_in_day(hours: Collection[int], minutes: Collection[int], seconds: Collection[int]) -> int:
    """Returns the shortest time between two of a day's times, in seconds, also between days that follow each other."""
    within_hour = np.add.outer(60 * np.array(sorted(minutes)), sorted(seconds)).ravel()
    times = np.add.outer(3_600 * np.array(sorted(hours)), within_hour).ravel()
    return int(np.diff(times, append=times[0] + _DAY).min())


def shortest_of(parts: Parts) -> int:
    """Returns a time that no two occurrences of a recurrence rule are nearer to each other, in seconds."""
    unit = _UNIT.get(parts.frequency, _DAY)
    one = (0,)  # some minute or second, of DTSTART
    of_day = shortest_in_day(
        parts.by_hour or (_ALL_HOURS if unit < _DAY else one),
        parts.by_minute or (_ALL_OF_60 if unit < 3_600 else one),
        parts.by_second or (_ALL_OF_60 if unit < 60 else one),
    )
    if unit == _DAY:
        return of_day * parts.interval if parts.frequency == "DAILY" and of_day == _DAY else of_day
    # Within an hour or minute all times count; from one to the next it is the interval at least.
    minutes = (parts.by_minute or one) if unit == 3_600 else one
    seconds = (parts.by_second or one) if unit > 1 else one
    times = np.add.outer(60 * np.array(sorted(minutes)), sorted(seconds)).ravel()
    return max(of_day, int(np.diff(times, append=times[0] + parts.interval * unit).min()))
