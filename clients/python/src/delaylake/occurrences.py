"""When a recurring message is due, for the service in memory: by the packages cronsim and python-dateutil."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from delaylake.errors import DelayLakeError
from delaylake.times import millis, moment, parse_millis


class RuleError(ValueError):
    """The rule is one that the service rejects."""


@dataclass(frozen=True)
class Rule:
    """The rule of a recurring message.

    Attributes:
        anchor: the time from which the rule counts, ms since the epoch.
        until: no occurrence is later, ms since the epoch; None: no limit.
        times: the number of occurrences; None: no limit.
        misfire: `once`, `all` or `skip`.
    """

    text: str
    zone: str
    anchor: int
    until: int | None
    times: int | None
    misfire: str

    @classmethod
    def of_properties(cls, properties: Mapping[str, str], anchor: int) -> Rule | None:
        """Makes the rule of a message's properties; None if it does not recur.

        Raises:
            RuleError: the rule can't be read.
            DelayLakeError: the extra `testing` is not installed.
        """
        if (text := properties.get("repeat")) is None:
            return None
        until, times = properties.get("repeatUntil"), properties.get("repeatTimes")
        rule = cls(
            text,
            properties.get("timeZone", "UTC"),
            anchor,
            None if until is None else int(until),
            None if times is None else int(times),
            properties.get("misfire", "once"),
        )
        rule.next_after(anchor)
        return rule

    def next_after(self, after: int) -> int | None:
        """Returns the first occurrence after a time, ms since the epoch; None: there is none."""
        found = self._every(after) if self.text.startswith("@every") else self._by_calendar(after)
        return None if found is None or (self.until is not None and found > self.until) else found

    def _every(self, after: int) -> int:
        if not (period := parse_millis(self.text.removeprefix("@every"))):
            raise RuleError("repeat needs a duration after @every")
        return self.anchor + ((after - self.anchor) // period + 1) * period

    def _by_calendar(self, after: int) -> int | None:
        zone = ZoneInfo(self.zone)
        start = moment(after).astimezone(zone)
        try:
            found: datetime | None = (
                self._rrule(start, zone) if "=" in self.text else next(_cronsim()(self.text, start), None)
            )
        except ValueError as error:
            raise RuleError(f"repeat: {error}") from None
        return None if found is None else millis("repeat", found)

    def _rrule(self, start: datetime, zone: ZoneInfo) -> datetime | None:
        text = self.text.strip().removeprefix("RRULE:").rstrip(";")
        # Its times are of the wall clock: an hour that a change of the clock leaves out is the one after it.
        first = moment(self.anchor).astimezone(zone).replace(tzinfo=None, microsecond=0)
        rule = _rrulestr()(text, dtstart=first)
        found: datetime | None = start.replace(tzinfo=None)
        while (found := rule.after(found)) is not None:
            occurrence: datetime = found.replace(tzinfo=zone)
            if occurrence > start:
                return occurrence
        return None


def _cronsim() -> Any:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise _missing("cronsim") from None

    def occurrences(text: str, start: datetime) -> Any:
        try:
            return CronSim(text, start)
        except CronSimError as error:
            raise ValueError(str(error)) from None

    return occurrences


def _rrulestr() -> Any:
    try:
        from dateutil.rrule import rrulestr
    except ImportError:
        raise _missing("python-dateutil") from None
    return rrulestr


def _missing(package: str) -> DelayLakeError:
    return DelayLakeError(f"recurring messages in tests need {package}: pip install 'delaylake-client[testing]'")
