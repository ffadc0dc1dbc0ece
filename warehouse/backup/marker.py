"""The file `_backup.json`, which marks a folder of tables as a backup and says which of their versions go together.

A run of a backup writes it last; a rebuild that makes a warehouse of the backup removes it last. Until a first run is
complete another file marks the folder: where nothing locks runs out, a slow one could else undo what another completed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from conf.errors import DelayLakeError
from warehouse.storage import Storage

_FILE = "_backup.json"
_BEGUN = "_backup.begun.json"
_FORMAT = 1


class NotABackupError(DelayLakeError):
    """A backup can't be read. The message is one line."""


@dataclass(frozen=True)
class Marker:
    """The last complete run of a backup.

    Attributes:
        source: the warehouse that was copied.
        made_at: when the versions to be copied were chosen, ms since the epoch; 0: no run has been completed.
        tables: the version in the backup of each table that the run copied, by table name.
    """

    source: str
    made_at: int = 0
    tables: dict[str, int] = field(default_factory=dict)


def read_marker(place: str) -> Marker | None:
    """Reads the marker of a folder or URI; None: the place is not a backup.

    Raises:
        NotABackupError: a newer program has written the marker, or it is damaged.
        OSError: the place can't be read.
    """
    storage = Storage(place)
    file, content = _FILE, storage.read(_FILE)
    if content is None:
        file, content = _BEGUN, storage.read(_BEGUN)
    if content is None:
        return None
    try:
        values = json.loads(content)
        if values.pop("format") <= _FORMAT:
            return Marker(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NotABackupError(f"{file} in {place} is damaged: make a backup in another, empty place") from None
    raise NotABackupError(f"a newer delaylake has made the backup in {place}: use that one")


def write_marker(place: str, marker: Marker) -> None:
    """Marks a place as a backup that has begun, or notes a complete run of it."""
    file = _FILE if marker.made_at else _BEGUN
    Storage(place).write(file, json.dumps({"format": _FORMAT, **asdict(marker)}).encode())


def remove_marker(place: str) -> None:
    """Removes the marker, which makes a backup a warehouse like any other."""
    storage = Storage(place)
    for file in (_BEGUN, _FILE):
        storage.delete(file)
