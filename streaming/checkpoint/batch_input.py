"""Stores the messages of a batch until Spark has committed it, so that a replay has the same messages."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from conf.files import replace_file
from streaming.checkpoint.offset import Offset
from tracker.packing import pack, unpack

_log = logging.getLogger(__name__)

_LENGTH_BYTES = 8  # of the number at the start of a file, which is the length of the packed messages after it


class Received(NamedTuple):
    """The messages that came in with a batch: tables of the schema `tracker.messages.MESSAGES`."""

    messages: pa.Table  # of source topics
    commands: pa.Table  # of the control topic, not decoded


def input_name(offset: Mapping[str, Any]) -> str:
    """Returns the name of the input's file of the batch that ends with an offset, as Spark's offset log has it."""
    digest = hashlib.sha256(json.dumps(offset, sort_keys=True).encode()).hexdigest()[:16]
    return f"{offset.get('tick', 0)}-{digest}"


class BatchInput:
    """A file for each batch, beside Spark's offsets, with its messages and commands. The last committed one stays, too.

    Sequence ids count the rows of a release. So a replayed batch must have the same rows, also when the broker has
    trimmed some, or a limit in the settings has changed. The file is written before any message of the batch is sent;
    without a file none was sent, and the messages can be read from the broker again.

    Args:
        folder: for the files; created with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_named: tuple[Offset | None, str] = None, ""  # the name of a batch's file

    def read(self, end: Offset) -> Received | None:
        """Returns the messages of the batch that ends with an offset; None: there is no file, or it is incomplete."""
        try:
            data = self._file(end).read_bytes()
        except FileNotFoundError:
            return None
        length = int.from_bytes(data[:_LENGTH_BYTES], "big")
        parts = data[_LENGTH_BYTES : _LENGTH_BYTES + length], data[_LENGTH_BYTES + length :]
        try:
            return Received(*map(unpack, parts))
        except (pa.ArrowException, OSError) as error:  # after a loss of power, before anything was sent
            _log.warning("the input of batch %d is read from the broker again: %s", end.tick, error)
            return None

    def write(self, end: Offset, received: Received) -> None:
        """Writes the messages and commands of the batch that ends with an offset, as one atomic file."""
        messages, commands = map(pack, received)
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._file(end), len(messages).to_bytes(_LENGTH_BYTES, "big") + messages + commands)

    def forget(self, end: Offset) -> None:
        """Removes the files of batches before the one that ends with an offset, which Spark has committed.

        The file of that one stays: it says which offset the next batch begins with (`Checkpoint.check_offsets`).
        """
        for file in self._folder.glob("*"):
            number = file.name.partition("-")[0]
            if number.isdigit() and int(number) < end.tick:
                file.unlink(missing_ok=True)

    def _file(self, end: Offset) -> Path:
        last, name = self._last_named
        if end is not last:  # a batch is asked for several times, and its offset has all routes
            name = input_name(end.to_json())
            self._last_named = end, name
        return self._folder / name
