"""Files with the rows of large releases, which tasks read: so they neither pass through Spark nor stay in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from streaming.checkpoint.payload_files import PayloadSweep
from streaming.release.attempt import Assignment
from streaming.release.driver.lane_release import LaneRelease, lane_release_of
from tracker.messages import concat
from tracker.packing import pack, unpack

# Smaller bodies go with the task: Spark sends up to a megabyte with it at hardly any cost.
_FILE_BYTES = 512 * 1024


class ReleaseFiles:
    """Joins the shards' releases, and keeps their large bodies in files until nobody has the release any more.

    Args:
        app_id: of the checkpoint.
        folder: for the files, which all machines of the job share; what an earlier run has left in it is removed.
            None: bodies go with the tasks.
        payloads: keeps the files with payloads of a release as long as anybody has it.
    """

    def __init__(self, app_id: str, folder: Path | None, payloads: PayloadSweep | None = None) -> None:
        self._app_id = app_id
        self._payloads = payloads
        # A folder for each run: an earlier one in this process may still remove its files.
        self._folder = None if folder is None else folder / uuid.uuid4().hex
        if folder is not None and self._folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir(parents=True)

    def lane_release(self, tick: int, kind: int, of_shards: Mapping[int, Sequence[bytes]], now: int) -> LaneRelease:
        """Makes the release of all shards together.

        Args:
            tick: of the release.
            kind: of the release.
            of_shards: by shard the parts of its release, packed, in order.
            now: the tick that hands it out, as for `lane_release_of`.

        Raises:
            StateLostError: a file with payloads of the release is not there.
        """
        assignments = [self._assignment(shard, tick, kind, parts) for shard, parts in of_shards.items()]
        release = lane_release_of(tick, kind, assignments, now)
        for assignment in assignments:
            if assignment.file:
                weakref.finalize(release, _remove, assignment.file)
        if self._payloads is not None:
            self._payloads.pin(release, release.payload_files)
        return release

    def _assignment(self, shard: int, tick: int, kind: int, parts: Sequence[bytes]) -> Assignment:
        body = parts[0] if len(parts) == 1 else pack(concat(unpack(part) for part in parts))
        if self._folder is None or len(body) < _FILE_BYTES:
            return Assignment(self._app_id, shard, tick, kind, body)
        file = self._folder / f"{tick}-{kind}-{shard}"
        file.write_bytes(body)
        return Assignment(self._app_id, shard, tick, kind, b"", str(file))


def _remove(file: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)
