"""Time zones of one version of the IANA database, the same on every machine."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from zoneinfo import ZoneInfo

import tzdata

TIME_ZONE_DATA_VERSION: str = tzdata.IANA_VERSION


class TimeZones:
    """The time zones of one version of the IANA database.

    Args:
        files: a folder like the package `tzdata`: with a file `zones`, which has the names, and a folder `zoneinfo`.
    """

    def __init__(self, files: Traversable) -> None:
        self._files = files
        self._zones: dict[str, ZoneInfo] = {}

    @classmethod
    def unpack(cls, packed: bytes) -> TimeZones:
        """Returns the time zones that `pack` has packed."""
        return cls(zipfile.Path(zipfile.ZipFile(io.BytesIO(packed))))

    def pack(self) -> bytes:
        """Returns all time zones as a ZIP archive, about 400 KB."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            # `ZipInfo` gives members a fixed time, so that the same zones are the same bytes.
            archive.writestr(zipfile.ZipInfo("zones"), "\n".join(sorted(self._names)), zipfile.ZIP_DEFLATED)
            for name in sorted(self._names):
                archive.writestr(zipfile.ZipInfo(f"zoneinfo/{name}"), self._file(name), zipfile.ZIP_DEFLATED)
        return packed.getvalue()

    def zone(self, name: str) -> ZoneInfo:
        """Returns a time zone.

        Raises:
            KeyError: there is no such time zone.
        """
        if name not in self._names:
            raise KeyError(name)
        if name not in self._zones:
            self._zones[name] = ZoneInfo.from_file(io.BytesIO(self._file(name)), key=name)
        return self._zones[name]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._files.joinpath("zones").read_text().split())

    def _file(self, name: str) -> bytes:
        return self._files.joinpath("zoneinfo").joinpath(*name.split("/")).read_bytes()


@lru_cache
def packaged() -> TimeZones:
    """Returns the time zones of the package `tzdata` (TIME_ZONE_DATA_VERSION), not those of the machine."""
    return TimeZones(resources.files("tzdata"))


_used: ContextVar[TimeZones | None] = ContextVar("time zones", default=None)


def used() -> TimeZones:
    """Returns the time zones in use: those of the enclosing `using`, else those of `packaged`."""
    return _used.get() or packaged()


@contextmanager
def using(time_zones: TimeZones | None) -> Iterator[None]:
    """Uses other time zones for a block; None: those of `packaged`."""
    token = _used.set(time_zones)
    try:
        yield
    finally:
        _used.reset(token)


def time_zone(name: str) -> ZoneInfo:
    """Returns one of the time zones in use.

    Raises:
        KeyError: there is no such time zone.
    """
    return used().zone(name)
