"""Reads and writes the checkpoint's own files.

Spark has its offsets, commits and state in the folder `query`. The job adds files of one line there: `application`, the
app id under which the checkpoint's job writes; `shards`, the number of shards; `version`, of the checkpoint's format;
and `epoch`, in which its job last took the warehouse over.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock

from conf.errors import DelayLakeError
from conf.files import make_folder
from streaming.checkpoint.batch_input import input_name
from streaming.checkpoint.offset import Offset
from warehouse.durable import create_durably, sync, write_durably

_log = logging.getLogger(__name__)

# The version of the checkpoint's format: it rises when the meaning of state or offsets changes. A checkpoint without a
# version is of release 0.1.0, and has version 1. In version 3 payloads may be in files, which an earlier program would
# take for none; in version 4 values of the state are together, where an earlier program would not look for them.
VERSION = 4
OLDEST_VERSION = 2  # from which this program goes on

PART = ".part"  # ends the name of a file that is being written

REPAIR = "run `delaylake rebuild --discard-checkpoint`, then start the job again: the tables and Pulsar have everything"


class CheckpointError(DelayLakeError):
    """The job can't go on from a checkpoint. The message is one line, and says what to do."""


def checkpoint_lock(folder: Path) -> FileLock:
    """Returns the lock of a checkpoint folder, which one job or rebuild at a time holds. Makes the folder.

    The process holds the lock: any of its threads may release it, and it is released when the process ends.

    Raises:
        FolderError: the folder can't be made or written.
    """
    make_folder(folder, "checkpoint")
    return FileLock(folder / "delaylake.lock", thread_local=False)


class Checkpoint:
    """A checkpoint folder. Its properties and methods raise CheckpointError if the file that they read is damaged.

    Args:
        folder: contains the folder `query`, or nothing yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._query = folder / "query"
        self._synced: set[str] = set()
        self._background = ThreadPoolExecutor(1, "sync checkpoint")
        self._syncing: Future[None] | None = None

    @property
    def has_query(self) -> bool:
        """Whether a query has run on this checkpoint."""
        return (self._query / "offsets").exists()

    @property
    def input_folder(self) -> Path:
        """The folder of `BatchInput`: the messages of batches that Spark has not committed."""
        return self._query / "input"

    @property
    def release_folder(self) -> Path:
        """The folder of `ReleaseFiles`: the rows of large releases that are on their way."""
        return self._query / "releases"

    @property
    def payload_folder(self) -> Path:
        """The folder of `PayloadFiles`: large payloads to which state, input and releases refer."""
        return self._query / "payloads"

    @property
    def time_zones_folder(self) -> Path:
        """The folder of `TimeZoneFiles`: the time zones of the last batches."""
        return self._query / "time_zones"

    @property
    def app_id(self) -> str:
        """The app id of this checkpoint's job. A new checkpoint gets a new one, because its ticks begin again."""
        file = self._query / "application"
        if not file.exists():
            app_id = f"delaylake-{uuid.uuid4().hex[:12]}"
            create_durably(file, app_id, file.with_name(f".{app_id}"))
        return file.read_text()

    @property
    def shards(self) -> int | None:
        """The number of shards of its state; None: it has no state yet, so any number will do."""
        if (shards := self._number("shards")) is None:
            return len(list((self._query / "state" / "0").glob("[0-9]*"))) or None
        return shards

    @shards.setter
    def shards(self, shards: int) -> None:
        self._write("shards", shards)

    @property
    def epoch(self) -> int:
        """The last epoch in which a job ran on this checkpoint; 0: none."""
        return self._number("epoch") or 0

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._write("epoch", epoch)

    @property
    def version(self) -> int | None:
        """The version of its format; None: it does not say."""
        return self._number("version")

    def write_version(self) -> None:
        """Writes this program's version of the format to the checkpoint."""
        self._write("version", VERSION)

    def newest_offset(self) -> Offset | None:
        """The end of the last batch that was begun; None: there is none yet.

        Raises:
            CheckpointError: it can't be read.
        """
        number = self._newest_batch()
        if number is None:
            return None
        logged = self._logged_offset(number)
        try:
            return Offset.from_json(logged)
        except TypeError as error:
            raise self._damaged(number, error) from None

    def mend_logs(self) -> None:
        """Removes Spark's newest offset and commit where a loss of power has left them torn: Spark ends at those.

        A batch is written and sent after its offset is on the disk (`sync_begun`): of one that is torn nothing was.
        Tables and destinations are asked afterwards all the same. A batch whose commit is removed runs again.
        """
        newest = self._newest_batch()
        last = -1 if newest is None else newest
        offsets, commits = self._query / "offsets", self._query / "commits"
        torn = [offsets / str(number) for number in _numbers_in(offsets) if number > last]
        for number in reversed(_numbers_in(commits)):
            if number <= last and _is_whole_commit(commits / str(number)):
                break
            torn.append(commits / str(number))
        for file in torn:
            _log.warning("%s is removed: a loss of power has left the newest offset or commit torn", file)
            file.unlink()

    def app_id_of(self, epoch: int) -> str:
        """Returns the app id for a query, if it is still the checkpoint on which a start began.

        Called right before the query begins, after all that waits: on another checkpoint it would begin anew.

        Args:
            epoch: of the start.

        Raises:
            CheckpointError: the folder was removed, or another one is in its place.
        """
        if self.epoch != epoch:
            raise CheckpointError(
                f"the checkpoint {self.folder} was removed or replaced while the job ran: start the job again, and run "
                "`delaylake rebuild` if it asks for that"
            )
        return self.app_id

    def check_offsets(self) -> None:
        """Checks that the last two offsets are there, and that nobody has replaced them: with them a batch runs again.

        A job that hangs in the write of an offset, and loses the lock to another one, still ends that write when its
        file system answers. The batch of the other job's offset may have been sent. Its input is named by that offset.

        Raises:
            CheckpointError: there is input of another offset of the same tick; or an offset is missing, or can't be
                read.
        """
        if (newest := self._newest_batch()) is not None:
            for number in range(max(0, newest - 1), newest + 1):
                if not self._offset_file(number).exists():
                    raise CheckpointError(
                        f"the checkpoint {self.folder} has offset {newest}, and not {number}: another job has written "
                        f"to a copy that was put back meanwhile: {REPAIR}"
                    )
                self._check_offset(number)

    def remove_input_after(self, tick: int) -> None:
        """Removes the input of later ticks: the disk has lost their offsets, so nothing of them was sent.

        Args:
            tick: of the newest offset.
        """
        later = [file for file in self.input_folder.glob("[0-9]*-*") if int(file.name.partition("-")[0]) > tick]
        for file in later:
            file.unlink(missing_ok=True)
        if later:
            sync([self.input_folder])

    def sync_begun(self, batch_id: int) -> None:
        """Syncs a batch's offset and input to the disk (fsync), and returns when they are there.

        No message of the batch may be sent before: after a loss of power another batch would get its number.

        Args:
            batch_id: Spark's number of the batch.

        Raises:
            CheckpointError: another job has replaced the offset.
        """
        self._check_offset(batch_id)
        # That of the batch before it, too, which had perhaps nothing to send: Spark reads both.
        offsets = [file for number in (batch_id - 1, batch_id) if (file := self._offset_file(number)).exists()]
        sync([*offsets, *self.input_folder.glob("[0-9]*")])

    def sync_soon(self) -> None:
        """Does the same as `sync_done` in the background, unless a sync is under way: a disk may take long."""
        if self._syncing is None or self._syncing.done():
            self._syncing = self._background.submit(self._sync_new)

    def sync_done(self) -> None:
        """Syncs Spark's offsets, commits and state so far to the disk (fsync), and returns when they are there.

        Also the payloads to which the state refers.
        """
        self._background.submit(self._sync_new).result()

    def _sync_new(self) -> None:
        files = {
            os.path.join(folder, name)
            for part in ("offsets", "commits", "state", "payloads")
            for folder, _, names in os.walk(self._query / part)
            for name in names
            if not name.endswith(PART)  # still being written
        }
        sync(Path(name) for name in files - self._synced)
        self._synced = files

    def _check_offset(self, number: int) -> None:
        if not self._offset_file(number).exists():
            return  # the checkpoint was removed: `app_id_of` tells
        name = input_name(self._logged_offset(number))
        others = {file.name for file in self.input_folder.glob(f"{name.partition('-')[0]}-*")} - {name}
        if any(not other.endswith(".tmp") for other in others):  # those of a write that was broken off
            raise CheckpointError(
                f"another job has replaced offset {number} of the checkpoint {self.folder}, whose batch may have been "
                f"sent: {REPAIR}"
            )

    def _offset_file(self, number: int) -> Path:
        return self._query / "offsets" / str(number)

    def _logged_offset(self, number: int) -> dict[str, Any]:
        try:
            return _end_in(self._offset_file(number))
        except ValueError as error:
            raise self._damaged(number, error) from None

    def _damaged(self, number: int, error: Exception) -> CheckpointError:
        return CheckpointError(f"offset {number} of the checkpoint {self.folder} is damaged ({error}): {REPAIR}")

    def _newest_batch(self) -> int | None:
        """Returns the number of the last batch whose offset is whole: see `mend_logs`."""
        numbers = reversed(_numbers_in(self._query / "offsets"))
        return next((number for number in numbers if _is_whole_offset(self._offset_file(number))), None)

    def _number(self, name: str) -> int | None:
        file = self._query / name
        text = file.read_text().strip() if file.exists() else ""
        try:
            return int(text) if text else None
        except ValueError:
            raise CheckpointError(f"{file} is damaged: {REPAIR}") from None

    def _write(self, name: str, number: int) -> None:
        if self._number(name) != number:
            write_durably(self._query / name, str(number))


def _numbers_in(log: Path) -> list[int]:
    """Returns the numbers of the batches in a log of Spark's (`HDFSMetadataLog`), ascending."""
    return sorted(int(file.name) for file in log.glob("[0-9]*") if file.name.isdigit())


def _is_whole_commit(file: Path) -> bool:
    try:
        return bool(_lines_of(file))
    except ValueError:
        return False


def _is_whole_offset(file: Path) -> bool:
    try:
        return bool(_end_in(file))
    except ValueError:
        return False


def _end_in(file: Path) -> dict[str, Any]:
    """Returns the job's own offset in a file of Spark's, which is its last line.

    Raises:
        ValueError: the file is not whole.
    """
    end = (_lines_of(file) or [None])[-1]
    if not isinstance(end, dict) or "tick" not in end:
        raise ValueError("its end is missing")
    return end


def _lines_of(file: Path) -> list[Any]:
    """Returns the lines of a file of a log, which are JSON but for the first, the version."""
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]
