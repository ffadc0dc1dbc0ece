"""Compaction, retention and vacuum of real Delta tables."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import multiprocessing.synchronize
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import Index
from conf.files import FolderError
from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import messages
from tests.support.warehouse.tables import DAY, HOUR, NOW, bucket, content, make
from warehouse.delta.tables import Tables
from warehouse.maintenance import maintain as module
from warehouse.maintenance.compaction import FAN_IN, MERGED_AT_ONCE, RowGroups, Run, merge, overlap, plan, slices
from warehouse.maintenance.maintain import Extent, MaintenanceError, is_paused, lock, maintain, needs_maintenance
from warehouse.maintenance.table_files import DataFile, TableFiles, TableFolder
from warehouse.queries.index_rows import read_segment, to_index
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow

# Of the delayed index, since its first release.
NEW_COLUMNS = ["ordering_key_bytes", "key_encoding", "schema_version"]


def test_a_table_of_an_earlier_release_gets_the_columns_that_came_since(tmp_path: Path) -> None:
    earlier = pa.schema([f for f in SCHEMAS["delayed_index"] if f.name not in NEW_COLUMNS])
    tables = Tables(f"file:{tmp_path}")
    tables.create({"delayed_index": earlier})
    for number in range(FAN_IN):
        write_deltalake(
            tables.path("delayed_index"), bucket(number, 100, NOW, HOUR).select(earlier.names), mode="append"
        )
    tables.create()
    version = tables.version("delayed_index")
    tables.create()
    assert tables.version("delayed_index") == version, "nothing is added twice"

    tables = Tables(f"file:{tmp_path}")
    tables.append("delayed_index", bucket(FAN_IN, 100, NOW, HOUR), {})
    files = TableFiles(tables, "delayed_index")
    assert merge(files, files.all())
    rows = read_segment(tables, tables.version("delayed_index"), NOW, NOW + HOUR)
    assert rows.num_rows == 100 * (FAN_IN + 1)
    assert all(rows[name].null_count == rows.num_rows for name in NEW_COLUMNS)


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Settings, Tables]:
    made, tables = make(tmp_path)
    for number in range(1, 41):
        tables.append("delayed_index", bucket(number, 300, NOW + DAY, DAY), {"job": number})
    return made, tables


@pytest.mark.parametrize(("warehouse", "named"), [("file:{}/no/w", "warehouse"), ("s3://bucket/w", "checkpoint")])
def test_a_folder_that_can_not_be_made_is_named_with_its_setting(tmp_path: Path, warehouse: str, named: str) -> None:
    (tmp_path / "no").touch()
    settings = Settings(warehouse=warehouse.format(tmp_path), checkpoint=f"file:{tmp_path}/no/c")
    with pytest.raises(FolderError, match=rf"can't be made .*`{named}` in the settings"):
        lock(settings)


def test_compaction_keeps_all_rows_old_versions_and_transactions(sealed: tuple[Settings, Tables]) -> None:
    made, tables = sealed
    before, version = content(tables, "delayed_index"), tables.version("delayed_index")
    report = next(r for r in maintain(made, now=NOW) if r.table == "delayed_index")
    assert (report.files_before, report.files_after, report.files_merged) == (40, 1, 40)
    assert report.bytes_after < report.bytes_before
    assert content(tables, "delayed_index") == before
    assert content(tables, "delayed_index", version) == before
    assert tables.written("delayed_index", "job") == 40
    assert not tables.append("delayed_index", bucket(40, 1, NOW, DAY), {"job": 40})
    assert maintain(made, now=NOW)[0].files_merged == 0


def test_a_run_ends_also_where_the_job_appends_faster_than_files_are_merged(
    sealed: tuple[Settings, Tables], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tables = sealed
    numbers = itertools.count(41)

    def merge_on_a_busy_machine(*given: Any) -> bool:
        for number in itertools.islice(numbers, 10):
            assert number < 100, "it would go on for ever"
            tables.append("delayed_index", bucket(number, 300, NOW + DAY, DAY), {"job": number})
        return merge(*given)

    monkeypatch.setattr(module, "merge", merge_on_a_busy_machine)
    report = next(r for r in maintain(made, now=NOW) if r.table == "delayed_index")
    assert (report.files_before, report.files_merged, report.files_after) == (40, 40, 11)


def test_a_segment_is_the_same_before_and_after(sealed: tuple[Settings, Tables]) -> None:
    made, tables = sealed

    def segment() -> list[str]:
        version = tables.version("delayed_index")
        return sorted(map(repr, read_segment(tables, version, NOW + DAY, NOW + DAY + HOUR).to_pylist()))

    before = segment()
    maintain(made, now=NOW)
    assert before
    assert segment() == before


def test_many_bytes_of_one_instant_are_merged_a_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_bytes, payload = 1 << 20, 25_000
    monkeypatch.setattr("warehouse.maintenance.compaction.FILE_BYTES", file_bytes)
    monkeypatch.setattr("warehouse.maintenance.table_files._ROW_GROUP_BYTES", file_bytes // 4)
    _, tables = make(tmp_path)
    for number in range(12):
        rows = [messages([(1, 40 * number + i, NOW + DAY)], payload=os.urandom(payload)) for i in range(40)]
        tables.append("delayed_index", to_index(pa.concat_tables(rows), number + 1), {})
    before = content(tables, "delayed_index")
    files, base, most = TableFiles(tables, "delayed_index"), pa.total_allocated_bytes(), 0
    write = TableFolder.write

    def measured(self: TableFolder, rows: pa.Table, run: str) -> AddAction:
        nonlocal most
        most = max(most, pa.total_allocated_bytes() - base)
        return write(self, rows, run)

    monkeypatch.setattr(TableFolder, "write", measured)
    assert merge(files, files.all())
    assert most < 1.5 * file_bytes, "the rows of a file in order, and nothing of what they were read as"
    assert len(files.all()) >= 12
    assert content(tables, "delayed_index") == before
    for file in files.all():
        with files.folder.open(file.path) as parquet:
            assert parquet.metadata.row_group(0).total_byte_size < file_bytes // 2
        ids = files.folder.read(file.path)["entry_id"].to_pylist()
        assert ids == sorted(ids)


def test_merged_files_are_sorted_and_do_not_overlap(sealed: tuple[Settings, Tables], monkeypatch: Any) -> None:
    monkeypatch.setattr("warehouse.maintenance.compaction.FILE_ROWS", 1_000)
    _, tables = sealed
    files = TableFiles(tables, "delayed_index", row_group_rows=100)
    assert merge(files, files.all())
    merged = files.all()
    assert len(merged) > 10
    assert len({file.run for file in merged}) == 1
    assert all(one.last <= following.first for one, following in itertools.pairwise(merged))
    for file in merged:
        with files.folder.open(file.path) as parquet:
            assert parquet.metadata.row_group(0).num_rows <= 100
        times = files.folder.read(file.path, ["deliver_at"])["deliver_at"].to_pylist()
        assert times == sorted(times)
        assert (times[0], times[-1], len(times)) == (file.first, file.last, file.rows)
    assert max(file.rows for file in merged) <= 1_000


def test_a_dry_run_changes_nothing(sealed: tuple[Settings, Tables]) -> None:
    made, tables = sealed
    version = tables.version("delayed_index")
    report = next(r for r in maintain(made, extent=Extent.NOTHING, now=NOW) if r.table == "delayed_index")
    assert report.files_merged == 40
    assert report.files_after == 40
    assert tables.version("delayed_index") == version


def test_the_transactions_survive_vacuum_and_a_cleaned_log(sealed: tuple[Settings, Tables], tmp_path: Path) -> None:
    made, tables = sealed
    tables.create(keep_versions_millis=1000)
    maintain(made, now=NOW)
    version, before = tables.version("delayed_index"), content(tables, "delayed_index")
    time.sleep(1.5)
    report = next(r for r in maintain(made, now=NOW) if r.table == "delayed_index")
    folder = tmp_path / "warehouse" / "delayed_index"
    assert report.files_vacuumed == 40
    assert len(list(folder.glob("*.parquet"))) == 1
    assert not (folder / "_delta_log" / f"{version - 5:020}.json").exists()
    fresh = Tables(made.warehouse)
    assert fresh.written("delayed_index", "job") == 40
    assert content(fresh, "delayed_index") == before


def test_old_versions_stay_while_the_job_stands_still(sealed: tuple[Settings, Tables], tmp_path: Path) -> None:
    made, tables = sealed
    tables.create(keep_versions_millis=1000)
    version, before = tables.version("delayed_index"), content(tables, "delayed_index")
    offsets = tmp_path / "checkpoint" / "query" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "12").write_text("v1\n{}\n" + json.dumps({"now": NOW - 1}))
    (offsets / "9").write_text("v1\n{}\n" + json.dumps({"now": NOW - DAY}))
    assert not is_paused(made, NOW)
    assert is_paused(made, NOW + DAY)
    maintain(made, now=NOW + DAY - HOUR)
    time.sleep(1.5)
    assert all(report.vacuum_put_off for report in maintain(made, now=NOW + DAY - HOUR))
    assert content(tables, "delayed_index", version) == before


def test_old_versions_stay_where_the_machine_stood_still_with_job_and_maintenance(
    sealed: tuple[Settings, Tables], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tables = sealed
    tables.create(keep_versions_millis=1000)
    offsets = tmp_path / "checkpoint" / "query" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "12").write_text("v1\n{}\n" + json.dumps({"now": NOW - 1}))
    times = itertools.chain([NOW], itertools.repeat(NOW + DAY))
    clock = SimpleNamespace(time_ns=lambda: next(times) * 1_000_000, monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", clock)
    version, before = tables.version("delayed_index"), content(tables, "delayed_index")
    assert all(report.vacuum_put_off for report in maintain(made))
    assert content(tables, "delayed_index", version) == before


def test_one_at_a_time(sealed: tuple[Settings, Tables]) -> None:
    made, _ = sealed
    with lock(made), pytest.raises(MaintenanceError, match="under way already"):
        maintain(made, now=NOW)


def test_of_two_that_remove_the_same_files_one_fails(sealed: tuple[Settings, Tables]) -> None:
    _, tables = sealed
    before = content(tables, "delayed_index")
    one, other = TableFiles(tables, "delayed_index"), TableFiles(tables, "delayed_index")
    files = one.all()
    assert merge(one, files)
    tables.append("delayed_index", bucket(99, 1, NOW, 1), {"job": 99})
    assert not merge(other, files)
    one.update()
    DeltaTable(tables.path("delayed_index")).delete("ledger_id = 99")
    assert not merge(one, one.all()) or content(tables, "delayed_index") == before
    assert content(tables, "delayed_index") == before


def test_whether_it_is_needed(sealed: tuple[Settings, Tables]) -> None:
    made, tables = sealed
    few = made.model_copy(update={"maintain": made.maintain.model_copy(update={"min_small_files": 40})})
    many = made.model_copy(update={"maintain": made.maintain.model_copy(update={"min_small_files": 41})})
    assert needs_maintenance(few, tables)
    assert not needs_maintenance(many, tables)
    maintain(few, now=NOW, extent=Extent.MERGES)
    assert not needs_maintenance(few, tables)


def _append(warehouse: str, is_enough: multiprocessing.synchronize.Event) -> None:
    tables = Tables(warehouse)
    number = 0
    while not is_enough.is_set():
        number += 1
        assert tables.append("delayed_index", bucket(number, 50, NOW + DAY, DAY), {"job": number})


def test_appends_of_another_process_go_on_while_files_are_merged_again_and_again(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    processes = multiprocessing.get_context("spawn")
    is_enough = processes.Event()
    writer = processes.Process(target=_append, args=(made.warehouse, is_enough))
    writer.start()
    commits = 0
    files = TableFiles(tables, "delayed_index")
    try:
        while commits < 8 and writer.is_alive():
            files.update()
            if len(found := files.all()) > 2:
                assert merge(files, found)
                commits += 1
    finally:
        is_enough.set()
    writer.join()
    assert writer.exitcode == 0
    assert commits == 8
    n = tables.written("delayed_index", "job")
    assert n is not None
    assert n > 8
    found = tables.query("delayed_index", "SELECT ledger_id, count(*) AS n FROM delayed_index GROUP BY 1 ORDER BY 1")
    assert found["ledger_id"].to_pylist() == list(range(1, n + 1))
    assert set(found["n"].to_pylist()) == {51}


# The plan alone.


@given(
    st.lists(st.tuples(st.integers(1, 3_000_000), st.integers(0, 100), st.integers(1, 100)), max_size=400),
    st.integers(1, 50),
)
@settings(max_examples=examples(60))
def test_after_the_planned_merges_no_time_has_more_runs_than_it_may(spans: list[Any], limit: int) -> None:
    files = [DataFile(f"f{i}", n * 10, n, start, start + length) for i, (n, start, length) in enumerate(spans)]
    runs = [Run((file,)) for file in files_after_merges(files, limit)]
    assert overlap(runs) <= limit
    small = [run for run in runs if run.tier < 0]
    assert len(small) < FAN_IN * len({run.tier for run in small} or {0})


def files_after_merges(files: list[DataFile], limit: int) -> list[DataFile]:
    """Files, each a run, after the merges of plan after plan, until there is nothing to do."""
    while groups := plan(files, None, limit):
        merged = [file for group in groups for file in group]
        assert len({file.path for file in merged}) == len(merged)
        assert all(1 < len(group) <= MERGED_AT_ONCE for group in groups)
        files = [file for file in files if file not in merged]
        for group in groups:
            first, last = min(file.first for file in group), max(file.last for file in group)
            rows = sum(file.rows for file in group)
            files.append(DataFile(f"of {group[0].path}", rows * 10, rows, first, last))
    return files


def test_of_a_thousand_runs_a_row_is_written_twice() -> None:
    """So many come by an import of files that are not sorted by time."""
    index = Index(row_bytes=60)
    for _ in range(1_000):
        index.add_run(NOW, NOW + 365 * DAY, 1_000_000)
    while groups := plan(index.files, NOW, 25):
        for group in groups:
            assert len({file.run for file in group}) <= MERGED_AT_ONCE
            index.merge(group)
    assert len({file.run for file in index.files}) < FAN_IN
    assert index.merged <= 2 * index.came


def test_each_part_of_a_merge_is_about_a_full_file_however_many_there_are() -> None:
    n, files = 2_000_000, 20_000
    chance = np.random.default_rng(1)
    first = np.sort(chance.integers(NOW, NOW + 365 * DAY, n))
    last = first + chance.integers(0, 2 * HOUR, n)
    file = np.repeat(np.arange(files), n // files)
    number = np.tile(np.arange(n // files), files)
    groups = RowGroups([f"f{i}" for i in range(files)], file, number, first, last, np.full(n, 0.01))
    found = slices(groups)
    assert (found[0].start, found[-1].end) == (first[0], last.max() + 1)
    assert all(one.end == other.start for one, other in itertools.pairwise(found))
    assert len(found) == pytest.approx(n * 0.01 / 0.9, abs=1)
    for part in found[:: len(found) // 50]:
        wanted = {(f"f{file[i]}", number[i]) for i in np.flatnonzero((first < part.end) & (last >= part.start))}
        assert {(path, i) for path, numbers in part.groups.items() for i in numbers} == wanted
        within = np.minimum(last + 1, part.end) - np.maximum(first, part.start)
        assert (0.01 * within.clip(0) / (last + 1 - first)).sum() == pytest.approx(0.9, rel=0.01)


def test_a_row_is_written_once_a_tier() -> None:
    """Seals come in for ever, all due in the same month: what is written again grows with the logarithm."""
    runs: list[DataFile] = []
    written = 0
    seals = 19_200
    for number in range(seals):
        runs.append(DataFile(f"seal{number}", 1_000, 5_000, 0, DAY))
        if number % 120 == 119:
            for group in plan(runs, None, 25):
                total = sum(file.rows for file in group)
                written += total
                runs = [run for run in runs if run not in group]
                runs.append(DataFile(f"run{number}-{len(runs)}", total, total, 0, DAY))
    assert overlap(Run((file,)) for file in runs) <= 25
    assert written / (seals * 5_000) < 5


def test_large_files_that_do_not_overlap_are_left_alone() -> None:
    files = [DataFile(f"f{i}", 1, 600_000, i * 10, i * 10 + 9) for i in range(100)]
    assert plan(files, None, 50) == []


def test_what_is_past_is_merged_only_while_it_is_small() -> None:
    large = [DataFile(f"large{i}", 1, 600_000, 0, 10) for i in range(20)]
    small = [DataFile(f"small{i}", 1, 100, 0, 10) for i in range(20)]
    assert plan(large + small, 11, 50) == [small]
