"""The transactions of all writers of a Delta table, read from its log."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem

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
