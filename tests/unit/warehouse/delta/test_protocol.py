"""What other programs have to know of Delta Lake to read the tables: as little as there is."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.support.warehouse.tables import DAY, HOUR, NOW, bucket, make, rows
from warehouse.backup.copying import back_up
from warehouse.backup.restoring import restore
from warehouse.delta.snapshot import query_builder, run_sql
from warehouse.maintenance.maintain import Extent, maintain
from warehouse.message_schemas import COLUMNS as SCHEMA_COLUMNS
from warehouse.schemas import EXPIRED, REFUSALS, STATISTICS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The logs of tables to which has been done whatever is done to them, and of a copy that was restored."""
    folder = tmp_path_factory.mktemp("protocol")
    made, tables = make(folder, deliveries_millis=1, rejects_millis=1)
    tables.create({"schemas": SCHEMA_COLUMNS, "refusals": REFUSALS, "expired": EXPIRED})
    tables.take_over(1)
    for number in range(1, 10):
        tables.append("delayed_index", bucket(number, 20, NOW, HOUR), {"job": number})
        tables.append("rejects", rows("rejects", [{"publish_time": NOW, "topic": made.control.topic}]), {"job": number})
    merged = {report.table: report.files_merged for report in maintain(made, extent=Extent.MERGES, now=NOW)}
    tables.delete("delayed_index", "entry_id = 3")
    reports = {report.table: report for report in maintain(made, now=NOW + DAY)}
    assert (merged["delayed_index"], reports["rejects"].rows_deleted) == (9, 9)
    back_up(made, str(folder / "copy"))
    restore(str(folder / "copy"))
    return list(folder.glob("*/*/_delta_log"))


def test_whatever_is_done_to_the_tables_every_reader_of_version_1_can_read_them(logs: list[Path]) -> None:
    assert {log.parent.name for log in logs} == STATISTICS.keys(), "every table that there is"
    for log in logs:
        table = DeltaTable(log.parent)
        assert (table.protocol().min_reader_version, table.protocol().min_writer_version) == (1, 2), log
        actions = [json.loads(line) for file in log.glob("*.json") for line in file.read_text().splitlines()]
        assert all(action.get("add", {}).get("deletionVector") is None for action in actions)
        assert not any({"sidecar", "domainMetadata", "checkpointMetadata"} & action.keys() for action in actions)
        for key, value in table.metadata().configuration.items():
            assert "columnMapping" not in key, value


def test_duckdb_and_polars_find_the_same_in_them(logs: list[Path]) -> None:
    for log in logs:
        table = DeltaTable(log.parent)
        integers = [field.name for field in pa.schema(table.schema()) if pa.types.is_integer(field.type)]
        sums = ", ".join(f'sum("{name}")' for name in integers)
        query = f"SELECT count(*), {sums} FROM t"
        expected = [column[0].as_py() for column in run_sql(query_builder({"t": table}), query).columns]

        with duckdb.connect() as connection:
            connection.register("t", table.to_pyarrow_dataset())
            assert list(connection.sql(query).fetchall()[0]) == expected, log

        columns = [pl.col(name).cast(pl.Int64).sum() for name in integers]
        found = pl.scan_delta(str(log.parent)).select(pl.len(), *columns).collect().row(0)
        # Of a column without values the sum is 0 there.
        assert list(found) == [value or 0 for value in expected], log
