"""The time zones by which the last batches were computed: one that is run again says what it said."""

from __future__ import annotations

import logging
from pathlib import Path

from streaming.checkpoint.offset import Offset
from tracker.recurrence.time_zones import TIME_ZONE_DATA_VERSION, packaged
from warehouse.durable import write_durably

_log = logging.getLogger(__name__)


class TimeZoneFiles:
    """A file for each version of the time zones that a batch may be run again with, beside Spark's offsets.

    A killed job's last batch is run again by the next start, whose program may have newer time zones.

    Args:
        folder: for the files; created at the first one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, last: str) -> None:
        """Keeps this program's time zones, on the disk when done. To be called before an offset names them.

        Args:
            last: the version of the last batch, which is kept, too; others are removed.
        """
        file = self._folder / TIME_ZONE_DATA_VERSION
        if not file.exists():
            write_durably(file, packaged().pack())
        for other in self._folder.iterdir():
            if other.name not in (TIME_ZONE_DATA_VERSION, last):
                other.unlink()

    def other(self, offset: Offset) -> list[bytes]:
        """Returns the time zones of a batch as `TimeZones.pack` has them; nothing where they are this program's."""
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
