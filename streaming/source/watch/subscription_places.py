"""Notices that the job's subscription of a topic partition went back: somebody deleted it, or reset it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from broker.position import Position
from conf.files import replace_file
from conf.settings import Settings, local_path

_log = logging.getLogger(__name__)

PLACES_FILE = Path("query/subscription_places.json")

# By default a broker writes a cursor to its disk within a minute. So a crash of it takes back what is younger.
_DURABLE_MILLIS = 120_000


class SubscriptionPlaces:
    """Remembers up to where the broker said that each topic partition is acknowledged. Not thread-safe.

    Places are kept in a file of the checkpoint, for what happens to a subscription while the job does not run.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = Path(local_path(settings.checkpoint)) / PLACES_FILE
        self._durable = _read(self._file)  # the last place that no crash of a broker takes back, by topic partition
        self._newest: dict[str, tuple[int, Position]] = {}  # (time it was told, place): may become the durable one
        self._written = dict(self._durable)

    def look(self, name: str, place: Position, now: int) -> Position | None:
        """Notes up to where a topic partition is acknowledged.

        Args:
            name: of the topic partition.
            place: the last entry up to which all are acknowledged.
            now: ms since the epoch.

        Returns:
            a later place, from where the subscription went back; None: it did not.
        """
        durable = self._durable.get(name)
        if durable is not None and place < durable:
            self._durable[name] = place
            self._newest.pop(name, None)
            return durable
        told_at, newest = self._newest.setdefault(name, (now, place))
        if place < newest:
            self._newest[name] = now, place
        elif now - told_at >= _DURABLE_MILLIS:
            self._durable[name] = newest
            self._newest[name] = now, place
        return None

    def write(self) -> None:
        """Writes the places to the file, where they have changed."""
        if self._durable == self._written:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps(self._durable).encode())
            self._written = dict(self._durable)
        except OSError as error:
            _log.warning("how far source topics are acknowledged can't be written down: %s", error)


def _read(file: Path) -> dict[str, Position]:
    try:
        return {name: Position(ledger, entry) for name, (ledger, entry) in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("how far source topics were acknowledged is lost: %s: %s", file, error)
        return {}
