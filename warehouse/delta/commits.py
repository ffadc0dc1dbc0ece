"""Commits to a Delta table: each is the very next version after one that was checked, and is on the disk when done.

By default delta-rs retries a commit as a later version if the commits in between do not conflict, and does not force
files to the disk.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem

from conf.errors import one_line
from conf.settings import is_object_storage, local_path
from warehouse.delta.checkpoint_hint import drop_wrong_hint
from warehouse.durable import sync

_log = logging.getLogger(__name__)

_ATTEMPTS = 50

_TORN_AT_MOST = 20  # commits at the end of a log that may be torn


def commit_next(
    table: DeltaTable,
    transactions: Mapping[str, int],
    is_wanted: Callable[[DeltaTable], bool],
    write: Callable[[CommitProperties], object],
    synced_to: MutableMapping[str, int] | None = None,
) -> bool:
    """Commits the very next version of a table, if that is wanted; tries again where another commit comes first.

    The versions before it are on the disk then, too: who committed one may have been killed before it was.

    Args:
        table: the table; it is updated to its newest version.
        transactions: the numbers of the transactions that the commit carries, by app id.
        is_wanted: called before each attempt with the table at its newest version; may raise.
        write: commits with the given properties; raises CommitFailedError if another commit came first.
        synced_to: by a table's URI the last version that the caller's commits have synced; it is updated. None: it has
            made none.

    Returns:
        whether it was wanted, and so committed.

    Raises:
        CommitFailedError: others committed first again and again.
    """
    synced_to = {} if synced_to is None else synced_to
    properties = CommitProperties(
        app_transactions=[Transaction(name, number) for name, number in transactions.items()], max_commit_retries=0
    )
    attempts = 0
    while True:
        table.update_incremental()
        if not is_wanted(table):
            return False
        version = table.version() + 1
        try:
            write(properties)
        except CommitFailedError:
            attempts += 1
            if attempts == _ATTEMPTS:
                raise
            continue
        except BaseException as error:
            # As delta-rs' writer may on a full disk. Such an exception is no Exception: it would end a thread unseen.
            if type(error).__name__ == "PanicException":
                raise OSError(f"delta-rs panicked: {one_line(error)}") from error
            raise
        _sync_versions(table, synced_to.get(table.table_uri), version)
        synced_to[table.table_uri] = version
        if table.version() < version:
            table.update_incremental()
        return True


def force_commits(table: DeltaTable) -> None:
    """Forces the last commits of a table to the disk: who made them may have been killed before they were."""
    _sync_versions(table, None, table.version())


def _sync_versions(table: DeltaTable, synced_to: int | None, version: int) -> None:
    for unsynced in range(_first_unsynced(synced_to, version), version + 1):
        _sync_version(table.table_uri, unsynced)


def _first_unsynced(synced_to: int | None, version: int) -> int:
    """Returns the first version up to a new one that may not be on the disk.

    Args:
        synced_to: the last version that the writer of the new one knows to be there; None: it knows of none.
        version: the new one.
    """
    first = version - _TORN_AT_MOST if synced_to is None else synced_to + 1
    return max(0, min(first, version))  # a table may have been made again


def mend_log(uri: str) -> None:
    """Removes from a table's log what a loss of power or an incomplete copy has left there; logs what it was.

    Nobody may write meanwhile.

    Args:
        uri: the table's folder or URI; there may be no table.
    """
    if torn := remove_torn_commits(uri):
        _log.warning("%s: removed from its log, incomplete after a loss of power: %s", uri, ", ".join(torn))
    drop_wrong_hint(uri)


def remove_torn_commits(uri: str) -> list[str]:
    """Removes the torn commits that a loss of power has left at the end of a table's log: nobody has read them.

    A checkpoint of the log that is incomplete, or whose commit is gone, is renamed. Does nothing on object storage.

    Args:
        uri: the table's folder or URI.

    Returns:
        the names of the files that were removed or renamed.
    """
    log = Path(local_path(uri)) / "_delta_log"
    if is_object_storage(uri) or not log.is_dir():
        return []
    removed = []
    for file in sorted(log.glob("[0-9]" * 20 + ".json"), reverse=True)[:_TORN_AT_MOST]:
        if _is_whole(file):
            break
        file.unlink()
        removed.append(file.name)
    versions = {int(file.stem) for file in log.glob("[0-9]" * 20 + ".json")}
    checkpoints = {int(file.name[:20]): file for file in log.glob("[0-9]" * 20 + ".checkpoint.parquet")}
    for version, file in sorted(checkpoints.items(), reverse=True):
        # Nobody can commit after a checkpoint whose commit is gone. It stays where the log has nothing else to go by.
        is_behind = version > max(versions, default=-1) and (0 in versions or min(checkpoints) < version)
        if is_behind or not _is_whole_checkpoint(file):
            file.rename(file.with_name(f"{file.name}.torn"))
            (log / "_last_checkpoint").unlink(missing_ok=True)
            removed.append(file.name)
    return removed


def _is_whole_checkpoint(file: Path) -> bool:
    with file.open("rb") as content:
        content.seek(0, 2)
        content.seek(max(0, content.tell() - 4))
        return content.read() == b"PAR1"


def _is_whole(commit: Path) -> bool:
    """Whether a commit can be read, and the files that it adds are there in full."""
    try:
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        files = [(commit.parent.parent / unquote(a["add"]["path"]), a["add"]["size"]) for a in actions if "add" in a]
        return bool(actions) and all(file.stat().st_size == size for file, size in files)
    except (ValueError, FileNotFoundError):
        return False


def sync_checkpoint(table: DeltaTable) -> None:
    """Writes the log's checkpoint of a table's version to the disk, before older parts of the log are deleted."""
    if not is_object_storage(table.table_uri):
        log = Path(local_path(table.table_uri)) / "_delta_log"
        sync([log / f"{table.version():020}.checkpoint.parquet", log / "_last_checkpoint"])


def _sync_version(uri: str, version: int) -> None:
    if is_object_storage(uri):
        return
    table = Path(local_path(uri))
    log = table / "_delta_log"
    commit = log / f"{version:020}.json"
    if not commit.exists():
        return  # the write changed nothing, as a delete without matching rows
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    added = [table / unquote(action["add"]["path"]) for action in actions if "add" in action]
    checkpoint = log / f"{version:020}.checkpoint.parquet"
    sync([*added, commit, *([checkpoint, log / "_last_checkpoint"] if checkpoint.exists() else [])])


_LOG = "_delta_log"

_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\.\d{10}\.\d{10})?\.parquet")


def last_transactions(table: DeltaTable) -> dict[str, int]:
    """Returns the number of each writer's last transaction in a table's version, by app id.

    `DeltaTable.transaction_version` reads the log again for each app id: some ms for each of thousands of writers.
    Source: "Transaction Identifiers" and "Checkpoints" in Delta's PROTOCOL.md.

    Args:
        table: without Delta's feature v2Checkpoint, which tables of the warehouse don't have.

    Raises:
        OSError: the log can't be read.
    """
    files = PyFileSystem(DeltaStorageHandler(table.table_uri))
    version = table.version()
    checkpoints: dict[int, list[str]] = {}
    for info in files.get_file_info(FileSelector(_LOG)):
        if (found := _CHECKPOINT.fullmatch(info.base_name)) and int(found[1]) <= version:
            checkpoints.setdefault(int(found[1]), []).append(info.path)
    newest = max(checkpoints, default=-1)
    last: dict[str, int] = {}
    for path in checkpoints.get(newest, []):
        with files.open_input_file(path) as file:
            transactions = pq.ParquetFile(file).read(["txn"])["txn"].combine_chunks()
        apps, numbers = (transactions.field(name) for name in ("appId", "version"))
        is_one = apps.is_valid()
        last |= zip(apps.filter(is_one).to_pylist(), numbers.filter(is_one).to_pylist(), strict=True)
    for commit in range(newest + 1, version + 1):
        with files.open_input_file(f"{_LOG}/{commit:020}.json") as file:
            for line in file.read().splitlines():
                if transaction := json.loads(line).get("txn"):
                    last[transaction["appId"]] = transaction["version"]
    return last
