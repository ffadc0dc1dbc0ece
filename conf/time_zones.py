"""Time zones of one version of the IANA database, the same on every machine."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from zoneinfo import ZoneInfo

import tzdata

TIME_ZONE_DATA_VERSION: str = tzdata.IANA_VERSION


class TimeZones:
    """The time zones of one version of the IANA database, all in memory: no file is read when one is used.

    A file that can't be read for a moment would look like an error in the one message that needs it.

    Args:
        files: the content of each zone's file (RFC 8536), by its name.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._zones: dict[str, ZoneInfo] = {}

    @classmethod
    def read(cls, package: Traversable) -> TimeZones:
        """Reads the time zones of a folder like the package `tzdata`, about 350 KB.

        Args:
            package: with a file `zones`, which has the names, and a folder `zoneinfo`.

        Raises:
            OSError: a file can't be read.
        """
        names = package.joinpath("zones").read_text().split()
        return cls({name: package.joinpath("zoneinfo", *name.split("/")).read_bytes() for name in names})

    @classmethod
    def unpack(cls, packed: bytes) -> TimeZones:
        """Returns the time zones that `pack` has packed."""
        return cls.read(zipfile.Path(zipfile.ZipFile(io.BytesIO(packed))))

    def pack(self) -> bytes:
        """Returns all time zones as a ZIP archive, about 400 KB."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            # `ZipInfo` gives members a fixed time, so that the same zones are the same bytes.
            archive.writestr(zipfile.ZipInfo("zones"), "\n".join(sorted(self._files)), zipfile.ZIP_DEFLATED)
            for name in sorted(self._files):
                archive.writestr(zipfile.ZipInfo(f"zoneinfo/{name}"), self._files[name], zipfile.ZIP_DEFLATED)
        return packed.getvalue()

    def zone(self, name: str) -> ZoneInfo:
        """Returns a time zone.

        Raises:
            KeyError: there is no such time zone.
        """
        if name not in self._zones:
            self._zones[name] = ZoneInfo.from_file(io.BytesIO(self._files[name]), key=name)
        return self._zones[name]


@lru_cache
def packaged() -> TimeZones:
    """Returns the time zones of the package `tzdata` (TIME_ZONE_DATA_VERSION), not those of the machine.

    Raises:
        OSError: a file of the package can't be read.
    """
    return TimeZones.read(resources.files("tzdata"))


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
