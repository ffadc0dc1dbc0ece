"""Old versions of a table: how long they can be read, whenever they were committed."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from warehouse.delta.log_cleanup import shorten_log
from warehouse.delta.tables import Tables
from warehouse.schemas import REJECTS

KEPT_SECONDS = 3_600


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(f"file:{tmp_path}")
    made.create({"rejects": REJECTS}, KEPT_SECONDS * 1_000)
    return made


def append(tables: Tables) -> int:
    """Commits a version; returns its number."""
    row = {"topic": "t", "partition": -1, "ledger_id": 1, "entry_id": 1, "batch_index": -1, "position": "1:1:-1:-1"}
    tables.append("rejects", pa.Table.from_pylist([row], schema=REJECTS), {})
    return DeltaTable(tables.path("rejects")).version()


def pass_time(tables: Tables, seconds: float) -> None:
    """Makes all that is in the log older."""
    for file in log(tables).iterdir():
        written_at = file.stat().st_mtime - seconds
        os.utime(file, (written_at, written_at))


def log(tables: Tables) -> Path:
    return Path(DeltaTable(tables.path("rejects")).table_uri.removeprefix("file://"), "_delta_log")


def clean(tables: Tables) -> None:
    shorten_log(DeltaTable(tables.path("rejects")))


def rows(tables: Tables, version: int) -> int:
    return DeltaTable(tables.path("rejects"), version=version).to_pyarrow_table().num_rows


def test_a_version_is_kept_from_when_there_is_a_later_one_however_old_it_is(tables: Tables) -> None:
    for _ in range(3):
        newest = append(tables)
    clean(tables)
    pass_time(tables, 10 * KEPT_SECONDS)
    append(tables)
    for _ in range(2):  # also when the later one has a checkpoint
        clean(tables)
        assert rows(tables, newest) == 3
    pass_time(tables, KEPT_SECONDS - 60)
    append(tables)
    clean(tables)
    assert rows(tables, newest) == 3
    pass_time(tables, 120)
    append(tables)
    clean(tables)
    with pytest.raises(DeltaError):
        rows(tables, newest)
    assert rows(tables, newest + 1) == 4
    assert rows(tables, newest + 2) == 5


def test_of_a_table_that_nobody_writes_the_checkpoint_alone_is_left(tables: Tables) -> None:
    for _ in range(3):
        newest = append(tables)
    pass_time(tables, 2 * KEPT_SECONDS)
    clean(tables)
    left = {int(file.name.partition(".")[0]) for file in log(tables).iterdir() if file.name[0].isdigit()}
    assert left == {newest}
    assert rows(tables, append(tables)) == 4


def test_a_log_is_shortened_while_it_is_written_often(tables: Tables) -> None:
    """Each version has its checkpoint, as where maintenance follows each commit."""
    for _ in range(12):
        newest = append(tables)
        clean(tables)
        pass_time(tables, KEPT_SECONDS / 4)
    clean(tables)
    assert len([*log(tables).glob("*.json")]) <= 6
    assert rows(tables, newest - 3) == 9
