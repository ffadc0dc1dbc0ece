"""Large payloads in files beside the checkpoint: what passes through Spark and its state has references to them.

A byte that passes through Spark is copied a dozen times: to the JVM, to the operator, to the state, and back.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import one_line
from conf.files import OWNER_ALONE
from conf.settings import Settings, local_path
from streaming.checkpoint.checkpoint import PART, Checkpoint
from tracker.messages import with_columns
from tracker.packing import payload_sizes
from tracker.payload_refs import COLUMN, PayloadRef, has_refs, refs_of
from tracker.store import StateLostError
from warehouse.durable import sync

# Payloads from this size on go to files: for smaller ones a file's row would cost more than it saves.
ASIDE_BYTES = 64 * 1024
# Of rows that have more than a part's bytes together: from this size on.
ASIDE_BYTES_OF_MANY = 1024

_FOLDER_MODE = 0o777 & ~OWNER_ALONE


class PayloadUnreadableError(StateLostError):
    """The disk does not give a file with payloads now, which is no fault of their messages: try again."""


class PayloadFiles:
    """Writes and reads files with payloads. A file is never changed; its name begins with the tick that wrote it.

    Args:
        folder: for the files, which all machines of the job share; made with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, settings: Settings) -> PayloadFiles:
        """Returns those of the job with some settings."""
        return cls(Checkpoint(Path(local_path(settings.checkpoint))).payload_folder)

    def put_aside(self, rows: pa.Table, tick: int, is_synced: bool = False, least_bytes: int = ASIDE_BYTES) -> pa.Table:
        """Writes the large payloads of rows to a file; returns the rows with references in their place.

        Args:
            rows: as MESSAGES.
            tick: of the batch with which the rows come in.
            is_synced: whether the file is on the disk when this returns (fsync).
            least_bytes: payloads from this size on are large.
        """
        are_large = payload_sizes(rows) >= least_bytes
        if has_refs(rows):
            are_large &= pc.is_null(rows[COLUMN]).to_numpy()
        if not are_large.any():
            return rows
        chosen, payloads = np.flatnonzero(are_large).tolist(), rows["payload"]
        buffers = [payloads[i].as_buffer() for i in chosen]
        name = self._write(tick, buffers, is_synced)
        refs: list[str | None] = [None] * rows.num_rows if not has_refs(rows) else rows[COLUMN].to_pylist()
        offset = 0
        for i, payload in zip(chosen, buffers, strict=True):
            refs[i] = str(PayloadRef(name, offset, len(payload), zlib.crc32(payload)))
            offset += len(payload)
        left = payloads.take(pa.array(np.arange(rows.num_rows), mask=are_large))  # `if_else` would keep the bytes
        return with_columns(rows, payload=left, **{COLUMN: pa.array(refs, pa.string())})

    def _write(self, tick: int, payloads: Sequence[pa.Buffer], is_synced: bool) -> str:
        """Writes a file, unless it is there whole; returns its name.

        The name says what is in it: a batch that fails again and again writes the same file, and not a further one. A
        loss of power may have left a part of the file.
        """
        digest = hashlib.blake2b(digest_size=16)
        for payload in payloads:
            digest.update(len(payload).to_bytes(8, "little"))
            digest.update(payload)
        name = f"{tick}-{digest.hexdigest()}"
        file = self._folder / name
        if not _is_whole(file, payloads):
            self._folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            part = self._folder / f"{name}.{uuid.uuid4().hex[:8]}{PART}"
            try:
                with open(part, "xb", opener=_open) as written:
                    written.writelines(payloads)
                part.rename(file)
            finally:
                part.unlink(missing_ok=True)
        if is_synced:
            sync([file])
        return name

    def bring_back(self, rows: pa.Table) -> pa.Table:
        """Returns rows with their payloads, and without references.

        Raises:
            StateLostError: a payload is not there.
        """
        if not has_refs(rows):
            return rows
        refs = refs_of(rows)
        are_refs = np.zeros(rows.num_rows, np.bool_)
        are_refs[list(refs)] = True
        read = pa.array([self.read(ref) for ref in refs.values()], pa.binary())
        payloads = pc.replace_with_mask(rows["payload"].combine_chunks(), pa.array(are_refs), read)
        return with_columns(rows, payload=payloads, **{COLUMN: pa.nulls(rows.num_rows, pa.string())})

    def read(self, ref: PayloadRef) -> bytes:
        """Returns a payload.

        Raises:
            StateLostError: it is not there, or not as it was written.
            PayloadUnreadableError: the disk does not give it now.
        """
        try:
            with open(self._folder / ref.file, "rb") as file:
                file.seek(ref.offset)
                payload = file.read(ref.length)
        except FileNotFoundError:
            raise _lost(self._folder / ref.file, "is gone") from None
        except OSError as error:
            raise PayloadUnreadableError(f"{self._folder / ref.file}: {one_line(error)}") from None
        if len(payload) != ref.length or zlib.crc32(payload) != ref.checksum:
            raise _lost(self._folder / ref.file, "is damaged")
        return payload


def _is_whole(file: Path, payloads: Sequence[pa.Buffer]) -> bool:
    """Whether a file is there, and has these payloads and nothing else."""
    try:
        with file.open("rb") as there:
            return all(there.read(len(payload)) == memoryview(payload) for payload in payloads) and not there.read(1)
    except FileNotFoundError:
        return False


def _open(path: str, flags: int) -> int:
    """Opens a file; executors have a umask of their own."""
    return os.open(path, flags, 0o666 & ~OWNER_ALONE)


def _lost(file: Path, what: str) -> StateLostError:
    return StateLostError(
        f"the file {file} with payloads of the tracker's state {what}: run `delaylake rebuild --discard-checkpoint`, "
        "then start the job again: the tables and Pulsar have everything"
    )


class Payloads(Sequence[bytes | None]):
    """The payloads of rows, of which those that are in files are read when they are asked for.

    Args:
        values: by row; None: it has none, or it is in a file.
        refs: the references by row.
        files: has the files.
    """

    def __init__(self, values: Sequence[bytes | None], refs: Mapping[int, PayloadRef], files: PayloadFiles) -> None:
        self._values = values
        self._refs = refs
        self._files = files

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, row: int) -> bytes | None: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[bytes | None]: ...

    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        ref = self._refs.get(row)
        return self._values[row] if ref is None else self._files.read(ref)


class PayloadSweep:
    """Removes files with payloads that nobody needs any more. Runs in the driver. Thread-safe.

    A batch that runs again begins with the state after the batch before, and with its own recorded input. So after a
    batch those files stay to which the state of any shard refers, or referred before the batch, those that the batch
    or a later one has written, and those that are pinned.

    Args:
        folder: as of `PayloadFiles`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: set[str] | None = None  # the files that the states referred to before; None: not known yet
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._unpinned: deque[tuple[str, ...]] = deque()  # taken off `_pinned` later: an object may end at any time

    def pin(self, owner: object, ends: Mapping[str, int]) -> None:
        """Keeps files as long as an object lives.

        Args:
            owner: the object.
            ends: by name of a file the bytes that it has at least.

        Raises:
            StateLostError: a file is not there, or too short.
        """
        if not ends:
            return
        names = tuple(ends)
        with self._lock:
            self._pinned.update(names)
        weakref.finalize(owner, self._unpinned.append, names)
        for name, end in ends.items():
            file = self._folder / name
            if not file.exists():
                raise _lost(file, "is gone")
            if file.stat().st_size < end:
                raise _lost(file, "is damaged")

    def sweep(self, tick: int, referred: set[str]) -> None:
        """Removes files after a batch.

        Args:
            tick: of the batch, of which the output has been written.
            referred: the files to which the states refer after it.
        """
        before, self._before = self._before, referred
        if before is None or not self._folder.is_dir():
            return
        with self._lock:
            while self._unpinned:
                self._pinned.subtract(self._unpinned.popleft())
            self._pinned = +self._pinned
            kept = {*before, *referred, *self._pinned}
        for file in self._folder.iterdir():
            number = file.name.partition("-")[0]
            if number.isdigit() and int(number) < tick and file.name not in kept:
                file.unlink(missing_ok=True)
