"""One warehouse, one writer: who has been overtaken commits nothing any more, whenever it notices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from tests.support.warehouse.tables import NOW, bucket, rows
from warehouse import durable
from warehouse.delta import commits
from warehouse.delta.commits import remove_torn_commits
from warehouse.delta.fencing import FencedError, PauseWatch
from warehouse.delta.tables import Tables
from warehouse.durable import write_durably
from warehouse.maintenance.table_files import TableFiles
from warehouse.routes.membership import TABLE, Changes, write_changes
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    Tables(f"file:{tmp_path}").create()
    return f"file:{tmp_path}"


def begun(warehouse: str) -> Tables:
    tables = Tables(warehouse)
    tables.take_over(tables.newest_epoch() + 1)
    return tables


def entry(number: int) -> pa.Table:
    return rows("entries", [{"ledger_id": 1, "entry_id": number}])


def entries(warehouse: str) -> list[int]:
    found = Tables(warehouse).query("entries", "SELECT entry_id FROM entries ORDER BY entry_id")
    return list(found["entry_id"].to_pylist())


def test_who_was_overtaken_writes_nothing_any_more(warehouse: str) -> None:
    first = begun(warehouse)
    assert first.append("entries", entry(1), {"a": 1})
    second = begun(warehouse)
    for name in SCHEMAS:
        with pytest.raises(FencedError, match="epoch 2, this one has 1"):
            first.append(name, rows(name, [{}]), {"a": 2})
    with pytest.raises(FencedError):
        first.delete("entries", "entry_id = 1")
    with pytest.raises(FencedError):
        first.check_epoch()
    assert first.is_fenced
    assert not second.is_fenced
    second.check_epoch()
    assert second.append("entries", entry(3), {"b": 1})
    assert entries(warehouse) == [1, 3]


def test_a_check_that_is_young_enough_is_not_made_again(warehouse: str) -> None:
    first = begun(warehouse)
    first.check_epoch()
    begun(warehouse)
    first.check_epoch(max_age_seconds=60)
    with pytest.raises(FencedError):
        first.check_epoch()


def test_being_overtaken_between_the_look_and_the_commit_fails_the_commit(warehouse: str) -> None:
    first = begun(warehouse)
    table = DeltaTable(first.path("entries"))

    def write(properties: CommitProperties) -> None:
        if Tables(warehouse).newest_epoch() == 1:
            begun(warehouse)
        write_deltalake(table, entry(1), mode="append", commit_properties=properties)

    with pytest.raises(FencedError):
        first.commit(table, write)
    assert entries(warehouse) == []


def test_an_overtaken_job_tells_of_no_changes_of_subscriptions(warehouse: str) -> None:
    first, second = begun(warehouse), begun(warehouse)
    found: Changes = {"t": {"handed_out": 9, "positions": {}, "subscriptions": {"a": "ADDED"}}}
    with pytest.raises(FencedError):
        write_changes(first, found, 5, 1, "app")
    write_changes(second, found, 6, 1, "app")
    assert Tables(warehouse).query(TABLE, f"SELECT batch_id FROM {TABLE}").to_pylist() == [{"batch_id": 6}]


def test_of_starts_at_the_same_time_one_has_the_warehouse(warehouse: str) -> None:
    starts = [Tables(warehouse) for _ in range(4)]
    winners: list[Tables] = []
    gate = threading.Barrier(4)

    def take_over(tables: Tables) -> None:
        gate.wait()
        try:
            tables.take_over(1)
            winners.append(tables)
        except FencedError:
            pass

    threads = [threading.Thread(target=take_over, args=(tables,)) for tables in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    begun(warehouse)
    for tables in winners:
        with pytest.raises(FencedError):
            tables.check_epoch()


def test_writers_of_one_epoch_do_not_hinder_each_other(warehouse: str) -> None:
    job = begun(warehouse)
    beside = Tables(warehouse)
    beside.join()
    written: list[bool] = []

    def append(tables: Tables, first: int) -> None:
        numbers = range(first, first + 15)
        written.extend(tables.append("entries", entry(number), {f"app{first}": number}) for number in numbers)

    threads = [threading.Thread(target=append, args=a) for a in ((job, 100), (beside, 200), (job, 300))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [True] * 45
    assert entries(warehouse) == [*range(100, 115), *range(200, 215), *range(300, 315)]


def test_a_write_that_was_done_is_not_done_again(warehouse: str) -> None:
    job = begun(warehouse)
    assert job.append("entries", entry(1), {"a": 1})
    assert not job.append("entries", entry(1), {"a": 1})
    assert job.append("entries", entry(2), {"a": 1, "b": 1}), "b has not written yet"


def test_maintenance_of_an_earlier_epoch_exchanges_no_files(warehouse: str) -> None:
    job = begun(warehouse)
    for number in range(3):
        job.append("delayed_index", bucket(number, 10, NOW, 1000), {"a": number + 1})
    beside = Tables(warehouse)
    beside.join()
    files = TableFiles(beside, "delayed_index")
    one, two, three = files.all()
    job.append("delayed_index", bucket(3, 10, NOW, 1000), {"a": 4})
    assert files.replace([one], []), "an append in between does not matter"
    assert not files.replace([one, two], []), "one of the files is gone"
    begun(warehouse)
    with pytest.raises(FencedError):
        files.replace([three], [])
    assert len(TableFiles(Tables(warehouse), "delayed_index").all()) == 3


def test_an_interrupted_take_over_is_made_good_by_the_next(warehouse: str) -> None:
    first = begun(warehouse)
    killed = Tables(warehouse)
    killed._begin(next(iter(SCHEMAS)), 2)  # the first table only
    with pytest.raises(FencedError):
        first.check_epoch()
    assert begun(warehouse).epoch == 3


def test_what_a_loss_of_power_left_incomplete_at_the_end_of_a_log_is_removed(warehouse: str) -> None:
    job = begun(warehouse)
    for number in range(3):
        job.append("entries", entry(number), {"a": number + 1})
    log = Path(job.path("entries")) / "_delta_log"
    newest = sorted(log.glob("*.json"))[-2:]
    newest[1].write_text("")  # of the log itself
    data = next(Path(job.path("entries")).glob("*.parquet"))
    assert data.stat().st_size
    added = newest[0].read_text()
    name = added.split('"path":"')[1].split('"')[0]
    (Path(job.path("entries")) / name).write_bytes(b"")  # of the data that it names
    Tables(warehouse).create()
    assert entries(warehouse) == [0]
    assert remove_torn_commits(job.path("entries")) == []
    assert begun(warehouse).append("entries", entry(1), {"a": 2}), "it was never said to be written"


@pytest.mark.parametrize("is_older_gone", [False, True])
def test_a_torn_commit_of_which_the_log_has_a_checkpoint_ends_no_later_one(warehouse: str, is_older_gone: bool) -> None:
    job = begun(warehouse)
    for number in range(3):
        job.append("entries", entry(number), {"a": number + 1})
    log = Path(job.path("entries")) / "_delta_log"
    *older, newest = sorted(log.glob("*.json"))
    DeltaTable(job.path("entries"), version=int(older[-1].stem)).create_checkpoint()
    DeltaTable(job.path("entries")).create_checkpoint()
    newest.write_text("")
    for file in older[:-1] if is_older_gone else ():
        file.unlink()
    Tables(warehouse).create()
    assert entries(warehouse) == [0, 1]
    assert begun(warehouse).append("entries", entry(2), {"a": 3})
    assert entries(warehouse) == [0, 1, 2]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "query" / "shards"
    write_durably(file, "2")

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_durably(file, "4")
    assert file.read_text() == "2"


def test_a_file_in_new_folders_is_there_after_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "_sync", synced.append)
    write_durably(tmp_path / "checkpoint" / "query" / "shards", "2")
    assert {tmp_path, tmp_path / "checkpoint", tmp_path / "checkpoint" / "query"} <= set(synced)


@pytest.mark.parametrize("stands_still", [0, 1])
def test_a_pause_is_noticed_by_either_clock(stands_still: int) -> None:
    clocks = [100.0, 1000.0]
    paused: list[Any] = []
    watch = PauseWatch(lambda: paused.append(1), 5, None, (lambda: clocks[0], lambda: clocks[1]))
    for _ in range(3):
        clocks[:] = clocks[0] + 4.9, clocks[1] + 4.9
        watch.check()
    assert not paused
    clocks[1 - stands_still] += 5.1
    watch.check()
    watch.check()
    assert len(paused) == 1


def test_a_pause_between_the_drivers_look_at_the_epoch_and_the_task_counts() -> None:
    paused: list[Any] = []
    clocks = (lambda: 7.0, lambda: 1000.0)
    PauseWatch(lambda: paused.append(1), 5, 996.0, clocks).check()
    assert not paused
    PauseWatch(lambda: paused.append(1), 5, 994.0, clocks).check()
    assert paused


def test_a_commit_whose_writer_was_killed_before_its_sync_is_synced_by_the_next_start(
    warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could take it, and leave those after it: a log with a gap."""
    first = begun(warehouse)
    with monkeypatch.context() as patched:
        patched.setattr(commits, "sync", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.append("entries", entry(1), {"a": 1})
    assert entries(warehouse) == [1]
    synced: list[str] = []
    monkeypatch.setattr(commits, "sync", lambda files: synced.extend(file.name for file in files))
    unsynced = f"{Tables(warehouse).version('entries'):020}.json"
    second = begun(warehouse)
    assert unsynced in synced
    synced.clear()
    second.append("entries", entry(2), {"a": 2})
    assert len([name for name in synced if name.endswith(".json")]) == 1, "each is synced once"
