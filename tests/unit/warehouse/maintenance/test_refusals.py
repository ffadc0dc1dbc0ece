"""The API's table of refused calls: its files are merged, and its old rows go."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from conf.settings import Settings
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import Extent, maintain, needs_maintenance
from warehouse.schemas import REFUSALS

pytestmark = pytest.mark.slow

DAY = 86_400_000
NOW = 1_800_000_000_000


def test_refusals_are_merged_and_go_after_their_retention(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "warehouse": f"file:{tmp_path}",
            "maintain": {"keep_versions_millis": 60_000},
            "retention": {"refusals_millis": 2 * DAY},
        }
    )
    tables = Tables(settings.warehouse)
    tables.create()
    assert [report.table for report in maintain(settings)][-1] != "refusals"
    tables.create({"refusals": REFUSALS})
    for day in range(5):
        for hour in range(3):
            row = {"refused_at": NOW - day * DAY - hour, "code": 401, "reason": "no token", "calls": 3}
            tables.append("refusals", pa.Table.from_pylist([row], schema=REFUSALS), {})
    assert needs_maintenance(settings, tables)
    merged = maintain(settings, extent=Extent.MERGES, now=NOW)[-1]
    assert (merged.table, merged.files_before, merged.files_after, merged.rows_deleted) == ("refusals", 15, 1, 0)
    assert not needs_maintenance(settings, tables)
    deleted = maintain(settings, now=NOW)[-1]
    assert deleted.rows_deleted == 8  # of the third and fourth day, and two of the second that are older than it
    kept = tables.query("refusals", "SELECT sum(calls) AS n FROM refusals").to_pylist()
    assert kept == [{"n": 21}]
