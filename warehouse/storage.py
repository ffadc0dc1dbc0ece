"""Lists, copies and replaces files in a folder or in object storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileType, PyFileSystem

from conf.settings import is_object_storage, local_path
from warehouse.durable import copy_durably, sync_folder, write_durably

# A chunk has to fit the buffer: delta-rs takes no more than that from Arrow at once.
_CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 16 << 20


class Storage:
    """A folder, or a place in object storage; endpoint and credentials are in environment variables.

    Paths are relative to it. A file is there as a whole or not at all, also after a crash.

    Args:
        uri: the folder or URI.
    """

    def __init__(self, uri: str) -> None:
        self._uri = local_path(uri)
        self._is_local = not is_object_storage(uri)

    @cached_property
    def _files(self) -> PyFileSystem:
        try:
            return PyFileSystem(DeltaStorageHandler(self._uri))
        except DeltaError as error:
            raise OSError(str(error)) from error

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the sizes of a folder's files, in bytes, by name; folders in it are left out."""
        return {name: size for name, size, _ in self._list(folder)}

    def written_at(self, folder: str = "") -> dict[str, int]:
        """Returns when a folder's files were written, in ms since the epoch, by name, as `sizes`."""
        return {name: at // 1_000_000 for name, _, at in self._list(folder)}

    def _list(self, folder: str) -> Iterator[tuple[str, int, int]]:
        """Yields name, size in bytes, and time in ns since the epoch of a folder's files."""
        if self._is_local:
            with contextlib.suppress(FileNotFoundError), os.scandir(self._path(folder)) as found:
                for file in found:
                    with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                        if file.is_file():
                            stat = file.stat()
                            yield file.name, stat.st_size, stat.st_mtime_ns
            return
        for info in self._files.get_file_info(FileSelector(folder, allow_not_found=True)):
            if info.type == FileType.File:
                yield info.base_name, info.size, info.mtime_ns

    def copy_from(self, other: Storage, path: str) -> None:
        """Copies a file from another storage, to the same path.

        Raises:
            FileNotFoundError: the file is not there any more.
        """
        if self._is_local:
            with other._reader(path) as source:
                copy_durably(source, self._path(path))
            return
        with other._reader(path) as source, self._writer(path) as stream:
            while chunk := source.read(_CHUNK_BYTES):
                stream.write(chunk)

    def sync(self, folder: str) -> None:
        """Forces the names of files that were copied to a folder to the disk; in object storage they are there."""
        if self._is_local:
            sync_folder(self._path(folder))

    def delete(self, path: str) -> None:
        """Deletes a file; does nothing if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            if self._is_local:
                self._path(path).unlink()
            else:
                self._files.delete_file(path)

    def read(self, path: str) -> bytes | None:
        """Returns a small file's content; None: there is no such file."""
        try:
            with self._reader(path) as stream:
                content: bytes = stream.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, content: bytes) -> None:
        """Replaces a small file, at once and durably."""
        if self._is_local:
            write_durably(self._path(path), content.decode())
            return
        with self._writer(path) as stream:
            stream.write(content)

    def _path(self, path: str) -> Path:
        return Path(self._uri, path)

    def _reader(self, path: str) -> AbstractContextManager[IO[bytes] | Any]:
        return self._path(path).open("rb") if self._is_local else self._files.open_input_stream(path)

    @contextlib.contextmanager
    def _writer(self, path: str) -> Iterator[Any]:
        stream = self._files.open_output_stream(path, buffer_size=_BUFFER_BYTES)
        yield stream
        stream.close()  # only this makes the file appear: not after an error in writing
