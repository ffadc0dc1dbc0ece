"""Releases that have been handed out and not yet confirmed."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from tracker.messages import pack, unpack
from tracker.store import Store

SENDING = "sending"  # key of a release's schema metadata: how it is to be sent

_TABLE = "in_flight"
_LIST = "in_flight_list"


@dataclass(frozen=True)
class Release:
    """What one shard hands out in one tick to be sent on time.

    `is_planned`: the rows were waiting here; else they came in too late to be planned, and go out at once.
    `rows` is a table of messages in order of sending, with the column `wants`: bit i is set for the i-th
    subscription of the row's route. A row's sequence id is made of the tick and its place in the table. The table's
    metadata says how it is to be sent, so that it is sent the same way again after the settings have changed.
    """

    tick: int
    is_planned: bool
    rows: pa.Table


class InFlight:
    """Keeps releases until they are confirmed, so that a new run of the job can hand them out again, unchanged."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get(_LIST, (0, 0))
        self._releases: list[tuple[int, int, int]] = (
            [(tick, planned, rows) for tick, planned, rows in json.loads(self._saved)] if self._saved else []
        )

    def __len__(self) -> int:
        return sum(rows for _, _, rows in self._releases)

    def add(self, release: Release) -> None:
        key = (release.tick, int(release.is_planned))
        self._store.put(_TABLE, key, pack(release.rows))
        self._releases.append((*key, release.rows.num_rows))

    def confirm(self, tick: int) -> None:
        """Forgets what was released at this tick or before."""
        for key in [(t, planned) for t, planned, _ in self._releases if t <= tick]:
            self._store.remove(_TABLE, key)
        self._releases = [entry for entry in self._releases if entry[0] > tick]

    def all(self) -> list[Release]:
        """All that is not confirmed, oldest first."""
        releases = []
        for tick, planned, _ in self._releases:
            data = self._store.get(_TABLE, (tick, planned))
            assert data is not None, f"release {tick} is lost"
            releases.append(Release(tick, bool(planned), unpack(data)))
        return releases

    def save(self) -> None:
        """Writes what is not in the store yet."""
        data = json.dumps(self._releases, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_LIST, (0, 0), data)
            self._saved = data
