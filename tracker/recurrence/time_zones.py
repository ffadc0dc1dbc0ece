"""Time zones of one version of the IANA database, the same on every machine."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from zoneinfo import ZoneInfo

import tzdata

TIME_ZONE_DATA_VERSION: str = tzdata.IANA_VERSION


@lru_cache
def time_zone(name: str) -> ZoneInfo:
    """Returns a time zone from the package `tzdata`, whatever the machine has: a replay elsewhere says the same.

    Raises:
        KeyError: there is no such time zone.
    """
    if name not in _names():
        raise KeyError(name)
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@lru_cache
def _names() -> frozenset[str]:
    return frozenset(resources.files("tzdata").joinpath("zones").read_text().split())
