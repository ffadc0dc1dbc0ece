"""The settings of shaped release: the rate of a subscription's messages, and the times at which it gets any."""

from __future__ import annotations

import re
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from conf.setting_types import Section
from conf.time_zones import packaged

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

MINUTES_A_DAY = 24 * 60

_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)")


def minutes(time: str) -> int:
    """Returns a time of day, HH:MM, as minutes from midnight."""
    hours, of_hour = time.split(":")
    return int(hours) * 60 + int(of_hour)


def _day(value: Any) -> Any:
    name = str(value).lower()
    for day in DAYS:
        if len(name) >= 3 and day.startswith(name):
            return day
    raise ValueError("must be a day of the week: monday or mon, to sunday or sun")


def _time_of_day(value: Any) -> str:
    # YAML reads 22:30 without quotes as a number of base 60. A number below 60 is an hour without minutes: an error.
    if isinstance(value, int) and not isinstance(value, bool) and (value == 0 or 60 <= value <= MINUTES_A_DAY):
        value = f"{value // 60:02}:{value % 60:02}"
    if not isinstance(value, str) or not _TIME.fullmatch(value) or minutes(value) > MINUTES_A_DAY:
        raise ValueError("must be a time of day, HH:MM, from 00:00 to 24:00")
    return value


def _time_zone(name: str) -> str:
    try:
        packaged().zone(name)
    except KeyError:
        raise ValueError("must be the name of a time zone: UTC, or as Europe/Berlin") from None
    return name


TimeOfDay = Annotated[str, BeforeValidator(_time_of_day)]


class Rate(Section):
    """The maximum rate of a subscription's messages, or of each key's: a token bucket."""

    # At least about one a day, so that the places of a long queue are valid times.
    messages_per_second: Annotated[float, Field(ge=1e-5, le=1_000_000, allow_inf_nan=False)]
    burst: Annotated[int, Field(gt=0, le=1_000_000_000)] | None = None  # None: the messages of a second, at least 1
    per: Literal["subscription", "key"] = "subscription"

    @property
    def most_at_once(self) -> int:
        """The maximum number of messages that may go at once after a pause."""
        return self.burst or max(1, ceil(self.messages_per_second))


class Window(Section):
    """A window in which messages go out: days of the week, from one time of day to another, in a time zone.

    A window whose end is before its start ends on the next day.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    days: Annotated[tuple[Annotated[str, BeforeValidator(_day)], ...], Field(min_length=1)] = DAYS
    start: Annotated[TimeOfDay, Field(alias="from")] = "00:00"
    end: Annotated[TimeOfDay, Field(alias="to")] = "24:00"
    time_zone: Annotated[str, AfterValidator(_time_zone)] = "UTC"

    @model_validator(mode="after")
    def _is_not_empty(self) -> Window:
        if self.start == self.end:
            raise ValueError("from and to must differ")
        if self.start == "24:00":
            raise ValueError("from must be before 24:00")
        return self
