"""All transactions of a table are those that delta-rs finds for one app id after the other."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow

WRITERS = [f"job:planned{i}" for i in range(7)] + ['job:a "quoted" lane', "job:ünïcode"]


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Tables whose `entries` have a checkpoint of the log, and commits after it."""
    tables = Tables(str(tmp_path))
    tables.create()
    write(tables, 105)
    assert list(log_of(tables).glob("*.checkpoint.parquet"))
    return tables


def write(tables: Tables, n: int) -> None:
    """Writes n transactions, in turns of all writers; numbers also go down, as an import's may."""
    for i in range(n):
        tables.note("entries", {WRITERS[i % len(WRITERS)]: (i * 37) % 100})


def log_of(tables: Tables) -> Path:
    return Path(tables.warehouse) / "entries" / "_delta_log"


def expected(tables: Tables) -> dict[str, int]:
    table = DeltaTable(f"{tables.warehouse}/entries")
    found = {writer: table.transaction_version(writer) for writer in WRITERS}
    return {writer: number for writer, number in found.items() if number is not None}


def of_writers(tables: Tables) -> dict[str, int]:
    """The transactions without those that creating and taking over have made."""
    return {app: number for app, number in tables.transactions("entries").items() if app in WRITERS}


def test_they_are_found_in_the_checkpoint_of_the_log_and_in_the_commits_after_it(tables: Tables) -> None:
    assert of_writers(tables) == expected(tables)
    assert len(of_writers(tables)) == len(WRITERS)


def test_nobody_has_written_to_a_new_table(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    assert of_writers(tables) == {}


def test_the_commits_before_the_checkpoint_are_not_needed(tables: Tables) -> None:
    DeltaTable(f"{tables.warehouse}/entries").create_checkpoint()
    for commit in sorted(log_of(tables).glob("0*.json"))[:-1]:
        commit.unlink()
    assert of_writers(tables) == expected(tables)
    write(tables, 3)
    assert of_writers(tables) == expected(tables)


def test_a_checkpoint_may_have_parts_as_spark_writes_them(tables: Tables) -> None:
    (whole,) = log_of(tables).glob("*.checkpoint.parquet")
    rows, version = pq.read_table(whole), whole.name[:20]
    for part, content in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :]), 1):
        pq.write_table(content, log_of(tables) / f"{version}.checkpoint.{part:010}.{2:010}.parquet")
    whole.unlink()
    (log_of(tables) / "_last_checkpoint").unlink()
    for commit in log_of(tables).glob("*.json"):
        if commit.name[:20] <= version:
            commit.unlink()
    assert of_writers(Tables(tables.warehouse)) == expected(tables)
