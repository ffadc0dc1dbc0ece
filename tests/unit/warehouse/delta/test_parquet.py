"""One text is found without reading those of the row groups that do not have it, by whoever reads the files."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.support.warehouse.tables import NOW, rows
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import FAN_IN, merge
from warehouse.maintenance.table_files import TableFiles

ROWS = 1_000

# By column a text that is there and one that is not, though it lies between others of each row group. The filters pass
# some of those: not these.
TEXTS = [("key", "20", "443"), ("schedule_key", "of 20", "of 443")]


@pytest.fixture(params=["appended", "merged"])
def warehouse(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """With keys that are even numbers, in each row group from all over; half of the rows have a schedule key, too."""
    tables = Tables(str(tmp_path), segment_rows=100)
    tables.create()
    for number in range(FAN_IN):
        due = range(number, ROWS, FAN_IN)
        keys = [f"{i * 7_919 % ROWS * 2}" for i in due]
        values = [{"deliver_at": NOW + i, "operation": "DELAY", "key": key} for i, key in zip(due, keys, strict=True)]
        for value in values[::2]:
            value["schedule_key"] = f"of {value['key']}"
        tables.append("delayed_index", rows("delayed_index", values), {})
    if request.param == "merged":
        files = TableFiles(tables, "delayed_index", row_group_rows=100)
        assert merge(files, files.all())
    return tmp_path


def files_of(warehouse: Path) -> list[str]:
    return Snapshot(str(warehouse), {"delayed_index": None}).files("delayed_index")["path"].to_pylist()


def found(warehouse: Path, column: str, text: str) -> list[int]:
    tables = Snapshot(str(warehouse), {"delayed_index": None})
    return tables.sql(f"SELECT deliver_at FROM delayed_index WHERE {column} = '{text}'")["deliver_at"].to_pylist()


def damage(warehouse: Path, column: str) -> None:
    """Overwrites all texts of a column."""
    for path in (warehouse / "delayed_index" / name for name in files_of(warehouse)):
        data, footer = bytearray(path.read_bytes()), pq.read_metadata(path)
        place = [footer.schema.column(i).path for i in range(footer.num_columns)].index(column)
        for chunk in (footer.row_group(i).column(place) for i in range(footer.num_row_groups)):
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(("column", "there", "absent"), TEXTS)
def test_a_text_that_is_not_there_is_not_looked_for_in_the_rows(
    warehouse: Path, column: str, there: str, absent: str
) -> None:
    assert len(found(warehouse, column, there)) == 1
    damage(warehouse, column)
    assert found(warehouse, column, absent) == []
    with pytest.raises(Exception, match=r"(?i)parquet|decompress|thrift"):
        found(warehouse, column, there)


@pytest.mark.slow
def test_duckdb_and_polars_find_the_same(warehouse: Path) -> None:
    paths = [str(warehouse / "delayed_index" / name) for name in files_of(warehouse)]
    for column, text in ((column, text) for column, *texts in TEXTS for text in texts):
        expected = found(warehouse, column, text)
        query = f"SELECT deliver_at FROM read_parquet({paths}) WHERE {column} = '{text}'"
        with duckdb.connect() as connection:
            assert [time for (time,) in connection.sql(query).fetchall()] == expected
        table = pl.scan_delta(str(warehouse / "delayed_index"))
        assert table.filter(pl.col(column) == text).collect()["deliver_at"].to_list() == expected
