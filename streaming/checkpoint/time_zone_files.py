"""Stores the time zones of the last batches, so that a replay computes the same times."""

from __future__ import annotations

import logging
from pathlib import Path

from conf.time_zones import TIME_ZONE_DATA_VERSION, packaged
from streaming.checkpoint.offset import Offset
from warehouse.durable import write_durably

_log = logging.getLogger(__name__)


class TimeZoneFiles:
    """A file for each version of the time zones that a replayed batch may need, beside Spark's offsets.

    After a job was killed, the next start replays its last batch, perhaps with a program that has newer time zones.

    Args:
        folder: for the files; created with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, last: str) -> None:
        """Stores this program's time zones, and syncs them to the disk. Call it before an offset names them.

        Args:
            last: the version of the last batch, which stays, too; other versions are removed.
        """
        file = self._folder / TIME_ZONE_DATA_VERSION
        if not file.exists():
            write_durably(file, packaged().pack())
        for other in self._folder.iterdir():
            if other.name not in (TIME_ZONE_DATA_VERSION, last):
                other.unlink()

    def other(self, offset: Offset) -> list[bytes]:
        """Returns the time zones of a batch, as `TimeZones.pack` packs them; [] where they are this program's."""
        version = offset.time_zone_data
        if version in ("", TIME_ZONE_DATA_VERSION):
            return []
        try:
            return [(self._folder / version).read_bytes()]
        except FileNotFoundError:  # a checkpoint of an earlier program
            _log.warning(
                "batch %d is run again by the time zones of %s: those of %s were not kept",
                offset.tick,
                TIME_ZONE_DATA_VERSION,
                version,
            )
            return []
