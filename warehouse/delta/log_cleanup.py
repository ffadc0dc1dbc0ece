"""Deletes what only expired versions need of a Delta table's log."""

from __future__ import annotations

import re

from deltalake import DeltaTable

from warehouse.delta.checkpoint_hint import COMMIT
from warehouse.delta.commits import sync_checkpoint
from warehouse.storage import Storage

_LOG = "_delta_log"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_OF_VERSION = re.compile(r"(\d{20})\..+")
_MILLISECONDS = re.compile(r"interval (\d+) milliseconds")


def shorten_log(table: DeltaTable) -> None:
    """Writes a checkpoint of a table's version, and deletes the parts of its log that only expired versions need.

    A version expires `delta.logRetentionDuration` after the next one was committed. `DeltaTable.cleanup_metadata` goes
    by when it was committed itself. So where nothing was written for as long, the next commit and its checkpoint would
    take away the version that the job, a listing or a backup reads.

    Args:
        table: its newest version. `Tables.create` has set how long versions are kept.
    """
    table.create_checkpoint()
    sync_checkpoint(table)
    kept = _MILLISECONDS.fullmatch(table.metadata().configuration.get("delta.logRetentionDuration") or "")
    if kept is None:  # somebody else has set it: the next start of the job sets it again
        return
    storage = Storage(table.table_uri)
    written_at = storage.written_at(_LOG)
    expires_at = max(written_at.values()) - int(kept[1])  # by the storage's clock: the checkpoint was written just now
    # The last version that was committed before has not expired: the one after it came later. It needs its checkpoint.
    current = max((version for version, at in _versions(written_at, COMMIT) if at < expires_at), default=-1)
    first = max((version for version, _ in _versions(written_at, _CHECKPOINT) if version <= current), default=0)
    for name in sorted(written_at):
        if (of_version := _OF_VERSION.fullmatch(name)) is not None and int(of_version[1]) < first:
            storage.delete(f"{_LOG}/{name}")


def _versions(written_at: dict[str, int], pattern: re.Pattern[str]) -> list[tuple[int, int]]:
    """Returns version and time, ms since the epoch, of the files of a log whose names fit a pattern."""
    return [(int(found[1]), at) for name, at in written_at.items() if (found := pattern.fullmatch(name)) is not None]
