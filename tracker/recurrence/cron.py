"""A cron expression of five or six fields; the first of six are seconds."""

from __future__ import annotations

from copy import copy
from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError

from tracker.recurrence.shortest import shortest_in_day

_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)


class CronRule:
    """The wall times of a cron expression, as Debian's cron reads it: a `tracker.recurrence.wall_clock.Rule`.

    Args:
        expression: five fields, or six of which the first are seconds.

    Raises:
        ValueError: it can't be read; its message goes on after "it".
    """

    def __init__(self, expression: str) -> None:
        fields = expression.split()
        if len(fields) not in (5, 6):
            raise ValueError(f"has {len(fields)} fields: a cron expression has five, or six with seconds")
        try:
            # Without a time zone: `tracker.recurrence.wall_clock` handles its changes.
            self._sim = CronSim(expression, _EPOCH)
        except CronSimError as error:
            message = str(error)
            raise ValueError(f"has a {message[:1].lower()}{message[1:]}") from error
        self.every_pass = any(field.startswith("*") for field in fields[-5:-3])

    @property
    def shortest(self) -> int:
        """The shortest time between two of its times, in seconds, on a day or on two that follow each other."""
        seconds = self._sim.seconds or {0}
        return shortest_in_day(self._sim.hours, self._sim.minutes, seconds)

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none within 50 years."""
        sim = copy(self._sim)
        sim.dt = _EPOCH + timedelta(seconds=wall)
        found = next(sim, None)
        return None if found is None else (found - _EPOCH) // _SECOND
