"""Files of earlier versions get the statistics that today's questions go by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from tests.support.tracker.messages import TOPIC, messages
from tests.support.warehouse.tables import NOW, make
from tracker.schemas import CANCEL_ROWS
from warehouse.delta.tables import Tables
from warehouse.maintenance import statistics
from warehouse.maintenance.maintain import maintain
from warehouse.maintenance.statistics import complete_statistics
from warehouse.maintenance.table_files import TableFiles
from warehouse.queries.index_rows import cancels_to_index, to_index
from warehouse.schemas import STATISTICS

pytestmark = pytest.mark.slow

_BEFORE = "deliver_at,topic,partition,ledger_id,entry_id"
DUE = NOW + 86_400_000


def old_table(tables: Tables) -> DeltaTable:
    """A delayed index as an earlier version has written it: a file with a cancel, one without, and another column."""
    index = DeltaTable(tables.path("delayed_index"))
    index.alter.set_table_properties({"delta.dataSkippingStatsColumns": _BEFORE})
    rows = to_index(messages([(1, entry, DUE + entry) for entry in range(20)]), 1)
    cancel = {"operation": "CANCEL", "topic": TOPIC, "subscription": "a", "ledger_id": 1, "entry_id": 3}
    cancel |= {"partition": -1, "batch_index": -1, "deliver_at": DUE + 3, "sequence": 7}
    cancels = cancels_to_index(pa.Table.from_pylist([cancel], schema=CANCEL_ROWS), 1)
    tables.append("delayed_index", pa.concat_tables([rows, cancels]), {})
    tables.append("delayed_index", to_index(messages([(2, entry, DUE + entry) for entry in range(20)]), 1), {})
    index.update_incremental()
    return index


def told(tables: Tables) -> list[dict[str, Any]]:
    """What the log tells of the files, the one with the cancel first."""
    files = pa.table(DeltaTable(tables.path("delayed_index")).get_add_actions(flatten=True))
    return files.sort_by([("num_records", "descending")]).to_pylist()


def test_maintenance_gives_older_files_statistics_and_changes_nothing_else(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    index = old_table(tables)
    before, rows = told(tables), index.to_pyarrow_table()
    maintain(made, ["delayed_index"], now=NOW)
    mixed, plain = told(tables)
    assert [file["path"] for file in (mixed, plain)] == [file["path"] for file in before]
    for file, old in zip((mixed, plain), before, strict=True):
        assert all(file[name] == value for name, value in old.items() if name != "modification_time")
    names = ("min.operation", "max.operation", "null_count.operation", "null_count.subscription", "min.subscription")
    assert [mixed[name] for name in names] == ["CANCEL", "DELAY", 0, 20, "a"]
    assert [plain[name] for name in names] == ["DELAY", "DELAY", 0, 20, None]
    index.update_incremental()
    assert index.to_pyarrow_table().sort_by("ledger_id").num_rows == rows.num_rows
    assert polars.read_delta(tables.path("delayed_index")).height == rows.num_rows
    for table in (DeltaTable(tables.path("delayed_index")), index):  # from the log's checkpoint, and from its commits
        assert pc.sum(pa.table(table.get_add_actions(flatten=True))["num_records"]).as_py() == rows.num_rows


def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    _, tables = make(tmp_path)
    old_table(tables)
    assert complete_statistics(tables, TableFiles(tables, "delayed_index")) == 2
    version = tables.version("delayed_index")
    assert complete_statistics(tables, TableFiles(tables, "delayed_index")) == 0
    assert tables.version("delayed_index") == version


def test_files_that_are_removed_in_the_meantime_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables = make(tmp_path)
    old_table(tables)
    files = TableFiles(tables, "delayed_index")
    read = statistics._statistics

    def remove_and_read(*arguments: Any) -> dict[str, Any]:
        tables.delete("delayed_index", "ledger_id = 2")
        return read(*arguments)

    monkeypatch.setattr(statistics, "_statistics", remove_and_read)
    assert complete_statistics(tables, files) == 0
    assert tables.query("delayed_index", "SELECT DISTINCT ledger_id FROM delayed_index")["ledger_id"].to_pylist() == [1]


def test_a_table_that_has_all_is_not_written(tmp_path: Path) -> None:
    _, tables = make(tmp_path)
    tables.append("delayed_index", to_index(messages([(1, 0, DUE)]), 1), {})
    version = tables.version("delayed_index")
    for name in STATISTICS.keys() & {"delayed_index", "entries", "outcomes", "deliveries", "rejects"}:
        assert complete_statistics(tables, TableFiles(tables, name)) == 0
    assert tables.version("delayed_index") == version
