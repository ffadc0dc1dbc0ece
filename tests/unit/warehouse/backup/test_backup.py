"""Backups of real Delta tables: what a run copies, what it refuses, and what is there whenever it ends."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.settings import Settings
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.crash_recovery import begin
from streaming.start_checks import StartError
from tests.conftest import Run
from tests.support.fuzzing.examples import examples
from tests.support.warehouse.tables import HOUR, NOW, bucket, content, make, rows
from warehouse import durable
from warehouse.backup import copying
from warehouse.backup.copying import CHOSEN, BackupError, back_up
from warehouse.backup.marker import Marker, NotABackupError, read_marker, remove_marker, write_marker
from warehouse.backup.restoring import NeverCompleteError, restore
from warehouse.delta import commits
from warehouse.delta.tables import Tables, exists
from warehouse.maintenance.maintain import Extent, MaintenanceError, maintain
from warehouse.schemas import SCHEMAS
from warehouse.storage import Storage

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path: Path) -> tuple[Settings, Tables]:
    """A warehouse with some rows in two tables."""
    made, tables = make(tmp_path)
    tables.take_over(3)
    for number in range(1, 5):
        tables.append("delayed_index", bucket(number, 20, NOW, HOUR), {"job": number})
    tables.append("entries", rows("entries", [{"ledger_id": 1, "entry_id": 7, "publish_time": NOW}]), {"job": 1})
    return made, tables


def contents(tables: Tables) -> dict[str, list[str]]:
    return {name: content(tables, name) for name in SCHEMAS}


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*.parquet") if "_delta_log" not in file.parts}


def test_the_copy_has_the_same_rows_and_a_second_run_copies_what_is_new(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    made, tables = source
    target = tmp_path / "copy"
    wanted = back_up(made, f"file:{target}", dry_run=True)
    assert not target.exists()
    first = back_up(made, f"file:{target}")
    assert contents(Tables(str(target))) == contents(tables)
    assert Tables(str(target)).newest_epoch() == 3
    assert {t.table: t.files_copied for t in first.tables if t.files_copied} == {"delayed_index": 4, "entries": 1}
    assert [t.bytes_copied for t in first.tables] == [t.bytes_copied for t in wanted.tables]
    assert first.newest_entry_at == NOW

    again = back_up(made, str(target))
    assert [t.files_copied for t in again.tables] == [0] * len(again.tables)
    tables.append("delayed_index", bucket(5, 20, NOW, HOUR), {"job": 5})
    maintain(made, extent=Extent.MERGES)
    tables.append("delayed_index", bucket(6, 20, NOW, HOUR), {"job": 6})
    more = back_up(made, str(target))
    assert contents(Tables(str(target))) == contents(tables)
    assert sum(t.files_copied for t in more.tables) < 5
    # Of a version that a reader may have open nothing is deleted before the next run.
    back_up(made, str(target))
    assert files(target) == {f"{name}/{path}" for name in SCHEMAS for path in _paths(target / name)}
    log = list((target / "delayed_index" / "_delta_log").glob("*.checkpoint.parquet"))
    assert log, "the log is bounded"


def _paths(table: Path) -> list[str]:
    return [uri.rsplit("/", 1)[1] for uri in DeltaTable(table).file_uris()]


def test_statistics_come_along(source: tuple[Settings, Tables], tmp_path: Path) -> None:
    made, tables = source
    back_up(made, str(tmp_path / "copy"))

    def statistics(warehouse: Tables) -> list[str]:
        log = Path(warehouse.path("delayed_index"), "_delta_log").glob("*.json")
        adds = [json.loads(line).get("add") for file in log for line in file.read_text().splitlines()]
        return sorted(json.dumps(json.loads(add["stats"]), sort_keys=True) for add in adds if add)

    assert statistics(Tables(str(tmp_path / "copy"))) == statistics(tables)


def test_what_is_in_use_otherwise_is_not_written(source: tuple[Settings, Tables], tmp_path: Path) -> None:
    made, tables = source
    target = str(tmp_path / "copy")
    other, _ = make(tmp_path / "other")
    with pytest.raises(BackupError, match="is a warehouse, and no backup"):
        back_up(made, other.warehouse)
    for nested in (made.warehouse, f"{made.warehouse}/copy", str(tmp_path), made.checkpoint):
        with pytest.raises(BackupError, match="lie in each other"):
            back_up(made, nested)
    empty = made.model_copy(update={"warehouse": str(tmp_path / "nothing")})
    with pytest.raises(BackupError, match=r"no table entries .*: has the job run"):
        back_up(empty, target)
    assert not Path(target).exists()
    back_up(made, target)
    with pytest.raises(BackupError, match=r"is a backup of .*: choose an empty place"):
        back_up(other, target)
    copy = made.model_copy(update={"warehouse": target})
    with pytest.raises(BackupError, match="is a backup: `delaylake rebuild` makes it a warehouse"):
        back_up(copy, str(tmp_path / "copy_of_copy"))
    with pytest.raises(MaintenanceError, match="is a backup"):
        maintain(copy)
    with pytest.raises(StartError, match="is a backup: run `delaylake rebuild"):
        begin(copy, Tables(target), Checkpoint(tmp_path / "checkpoint"))
    Path(target, "_backup.json").write_text("")
    with pytest.raises(NotABackupError, match="damaged"):
        back_up(made, target)
    Path(target, "_backup.json").write_text('{"format": 9}')
    with pytest.raises(NotABackupError, match="a newer delaylake"):
        back_up(made, target)
    assert contents(Tables(target)) == contents(tables)


def test_a_backup_that_was_restored_is_not_written_again(source: tuple[Settings, Tables], tmp_path: Path) -> None:
    made, tables = source
    target = str(tmp_path / "copy")
    back_up(made, target)
    before = contents(tables)
    tables.append("delayed_index", bucket(7, 20, NOW, HOUR), {"job": 7})
    assert restore(target) is not None
    with pytest.raises(BackupError, match="was restored"):
        back_up(made, target)
    remove_marker(target)
    with pytest.raises(BackupError, match="is a warehouse, and no backup"):
        back_up(made, target)
    assert contents(Tables(target)) == before
    assert restore(target) is None


def test_a_backup_deletes_nothing_where_a_rebuild_has_made_a_warehouse_of_it_meanwhile(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    """In object storage they have no lock in common."""
    made, _ = source
    target = tmp_path / "copy"
    back_up(made, str(target))
    written = target / "delayed_index" / "part-of-the-rebuild.parquet"
    run = copying._Backup._copy

    def after_rebuild(*arguments: Any) -> Any:
        restore(str(target))
        remove_marker(str(target))
        written.write_bytes(b"not committed yet")
        return run(*arguments)

    with (
        mock.patch.object(copying._Backup, "_copy", after_rebuild),
        pytest.raises(BackupError, match="was restored"),
    ):
        back_up(made, str(target))
    assert written.exists()
    assert read_marker(str(target)) is None


def test_a_backup_that_was_never_complete_is_not_restored(source: tuple[Settings, Tables], tmp_path: Path) -> None:
    full = mock.patch.object(Storage, "copy_from", side_effect=OSError("no space left"))
    with full, pytest.raises(BackupError, match=r"can't be copied to .*: no space left"):
        back_up(source[0], str(tmp_path / "copy"))
    with pytest.raises(NeverCompleteError):
        restore(str(tmp_path / "copy"))


def test_what_the_last_complete_run_copied_stays_until_the_next_one_is_complete(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    made, tables = source
    target = str(tmp_path / "copy")
    back_up(made, target)
    complete = contents(tables)
    for number, step in enumerate(("write_marker", "change_to"), start=5):
        tables.append("delayed_index", bucket(number, 20, NOW, HOUR), {"job": number})
        tables.append("entries", rows("entries", [{"ledger_id": 1, "entry_id": number}]), {"job": number})
        DeltaTable(tables.path("delayed_index")).optimize.compact()
        with suppress(Killed), mock.patch.object(copying, step, side_effect=Killed):
            back_up(made, target)
        assert contents(Tables(target)) != complete, "its tables were committed before the first run was killed"
    assert restore(target) is not None
    assert contents(Tables(target)) == complete


def test_files_that_the_warehouse_deletes_meanwhile_are_not_missed(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    made, tables = source
    copy_from = Storage.copy_from

    def merge_before(storage: Storage, other: Storage, path: str) -> None:
        if not exists_merged:
            exists_merged.append(True)
            maintain(made, extent=Extent.MERGES)
            tables.append("delayed_index", bucket(9, 400, NOW, HOUR), {"job": 9})
            for name in SCHEMAS:
                DeltaTable(tables.path(name)).optimize.compact()
                DeltaTable(tables.path(name)).vacuum(0, dry_run=False, enforce_retention_duration=False)
        copy_from(storage, other, path)

    exists_merged: list[bool] = []
    with mock.patch.object(Storage, "copy_from", merge_before):
        back_up(made, str(tmp_path / "copy"))
    assert contents(Tables(str(tmp_path / "copy"))) == contents(tables)

    def vacuum_always(storage: Storage, other: Storage, path: str) -> None:
        raise FileNotFoundError(path)

    tables.append("delayed_index", bucket(10, 20, NOW, HOUR), {"job": 10})
    with mock.patch.object(Storage, "copy_from", vacuum_always), pytest.raises(BackupError, match="keep_versions"):
        back_up(made, str(tmp_path / "copy"))


def test_a_backup_whose_files_another_one_deletes_says_so_and_the_other_one_is_whole(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    """Two machines back up to one place in object storage, where they have no lock in common."""
    made, tables = source
    target = str(tmp_path / "copy")
    back_up(made, target)
    tables.append("delayed_index", bucket(5, 20, NOW, HOUR), {"job": 5})
    copy_from = Storage.copy_from
    others: list[str] = []

    def another_after(storage: Storage, other: Storage, path: str) -> None:
        copy_from(storage, other, path)
        if not others:
            others.append(path)
            DeltaTable(tables.path("delayed_index")).optimize.compact()
            back_up(made, target)

    with (
        mock.patch.object(copying, "_alone", return_value=nullcontext()),
        mock.patch.object(Storage, "copy_from", another_after),
        pytest.raises(BackupError, match=r"files of delayed_index are gone .*: is another backup there"),
    ):
        back_up(made, target)
    assert restore(target) is not None
    assert contents(Tables(target)) == contents(tables)


def test_a_backup_that_stood_still_before_it_copied_anything_undoes_no_other_one(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    """Two machines back up to one place in object storage, and the first backup there is killed when it goes on."""
    made, tables = source
    target = str(tmp_path / "copy")

    def another_before(place: str, marker: Marker) -> None:
        with mock.patch.object(copying, "write_marker", write_marker):
            back_up(made, target)
        write_marker(place, marker)
        raise Killed

    with (
        mock.patch.object(copying, "_alone", return_value=nullcontext()),
        mock.patch.object(copying, "write_marker", another_before),
        pytest.raises(Killed),
    ):
        back_up(made, target)
    assert restore(target) is not None
    assert contents(Tables(target)) == contents(tables)
    remove_marker(target)
    assert read_marker(target) is None


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_commit_that_a_loss_of_power_has_torn_ends_neither_the_next_backup_nor_a_restore(
    source: tuple[Settings, Tables], tmp_path: Path, is_restored: bool
) -> None:
    made, tables = source
    target = str(tmp_path / "copy")
    back_up(made, target)
    complete = contents(tables)
    tables.append("delayed_index", bucket(5, 20, NOW, HOUR), {"job": 5})
    with suppress(Killed), mock.patch.object(copying, "write_marker", side_effect=Killed):
        back_up(made, target)
    torn = max(Path(target, "delayed_index", "_delta_log").glob("*.json"))
    torn.write_bytes(torn.read_bytes()[:100])
    if is_restored:
        assert restore(target) is not None
    else:
        back_up(made, target)
    assert contents(Tables(target)) == (complete if is_restored else contents(tables))


@pytest.mark.parametrize("table", ["entries", "delayed_index"])
@pytest.mark.parametrize("is_file_lost", [False, True])
def test_what_is_lost_of_a_complete_backup_is_copied_again_by_the_next_one(
    source: tuple[Settings, Tables], tmp_path: Path, table: str, is_file_lost: bool
) -> None:
    """Of the newest version, of which the table's log has a checkpoint, too."""
    made, tables = source
    target = tmp_path / "copy"
    back_up(made, str(target))
    if is_file_lost:
        next((target / table).glob("*.parquet")).unlink()
    else:
        max((target / table / "_delta_log").glob("*.json")).write_bytes(b"")
    forced: set[Path] = set()
    with mock.patch.object(durable, "_sync", forced.add):
        back_up(made, str(target))
    assert target / table in forced
    assert restore(str(target)) is not None
    assert contents(Tables(str(target))) == contents(tables)


def test_no_file_has_its_name_at_the_place_before_its_content_is_on_the_disk(tmp_path: Path) -> None:
    """A later run would take it for copied, by its size."""
    (tmp_path / "file").write_bytes(b"content")
    with mock.patch.object(durable, "_sync", side_effect=Killed), pytest.raises(Killed):
        Storage(f"file:{tmp_path / 'copy'}").copy_from(Storage(f"file:{tmp_path}"), "file")
    assert not (tmp_path / "copy" / "file").exists()


def test_what_a_complete_backup_names_is_on_the_disk_though_a_killed_one_had_committed_it(
    source: tuple[Settings, Tables], tmp_path: Path
) -> None:
    made, tables = source
    target = tmp_path / "copy"
    back_up(made, str(target))
    tables.append("delayed_index", bucket(5, 20, NOW, HOUR), {"job": 5})
    with suppress(Killed), mock.patch.object(commits, "_sync_version", side_effect=Killed):
        back_up(made, str(target))
    forced: set[Path] = set()
    with mock.patch.object(durable, "_sync", forced.add):
        back_up(made, str(target))
    marker = read_marker(str(target))
    assert marker is not None
    for name, version in marker.tables.items():
        assert target / name / "_delta_log" / f"{version:020}.json" in forced


def test_the_command_says_what_it_copied_and_how_old_the_newest_entry_is(
    source: tuple[Settings, Tables], tmp_path: Path, delaylake_here: Run
) -> None:
    environment = {"DELAYLAKE_WAREHOUSE": source[0].warehouse, "DELAYLAKE_CHECKPOINT": source[0].checkpoint}
    target = f"file:{tmp_path}/copy"
    planned = delaylake_here("backup", target, "--dry-run", env=environment)
    assert (planned.returncode, not Path(tmp_path, "copy").exists()) == (0, True)
    assert "would be copied" in planned.stdout
    done = delaylake_here("backup", target, "--output", "json", env=environment)
    found = json.loads(done.stdout)
    assert found["newest_entry_age_millis"] == found["made_at"] - NOW
    assert sum(table["files_copied"] for table in found["tables"]) == 5
    assert "the newest entry was published" in delaylake_here("backup", target, env=environment).stdout
    failed = delaylake_here("backup", source[0].warehouse, env=environment)
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


class Killed(BaseException):
    """As SIGKILL: nothing is tidied up."""


class Writer:
    """A job and its maintenance, a commit at a time, in the order in which the job commits.

    A message is sealed (or delivered before that), then moved by a command, then its entry is written down; it is
    delivered at some time after it was sealed. Its entry is its number, and the ledger id is 1.
    """

    def __init__(self, folder: Path) -> None:
        self.settings, self.tables = make(folder, delayed_index_millis=1, deliveries_millis=1, entries_millis=1)
        self.tables.take_over(1)
        self.steps: list[Callable[[], None]] = []
        self.messages = 0
        self.delivered: set[int] = set()  # that `deliveries` has, or had until nothing else knew of them
        self.ticks = 0

    def append(self, table: str, message: int, **columns: object) -> None:
        self.ticks += 1
        row = {"ledger_id": 1, "entry_id": message, **columns}
        self.tables.append(table, rows(table, [row]), {"job": self.ticks})

    def come(self, is_moved: bool) -> None:
        """A message comes in; what follows of it are further steps."""
        self.messages += 1
        number = self.messages
        due = NOW + number
        self.steps.append(lambda: self.append("delayed_index", number, operation="DELAY", deliver_at=due))
        if is_moved:
            by: dict[str, object] = {"subscription": "a", "sequence": number}
            self.steps.append(lambda: self.append("outcomes", number, **by, operation="RESCHEDULE", result="APPLIED"))
            self.steps.append(lambda: self.append("delayed_index", number, **by, operation="MOVE", deliver_at=due))
        self.steps.append(lambda: self.append("entries", number, publish_time=NOW))

    def deliver(self, number: int) -> None:
        if number > self.messages or number in self.delivered:
            return
        for name in "ab":
            self.append("deliveries", number, subscription=name, deliver_at=NOW + number, sent_at=NOW + number)
        self.delivered.add(number)

    def maintain(self) -> None:
        maintain(self.settings, now=NOW + 40 * 24 * HOUR)

    def do(self, what: int) -> None:
        """Does something: the next commit of a message most of the time."""
        if self.steps and what % 4:
            self.steps.pop(0)()
        elif what < 60:
            self.come(what % 8 == 0)
        elif what < 90:
            self.deliver(what - 59)
        else:
            self.maintain()


def check(target: str, delivered: set[int]) -> None:
    """Every table can be read, and those of the marker go together.

    Args:
        delivered: the messages that had been delivered before the run began that the marker is of.
    """
    marker = read_marker(target)
    for name in CHOSEN:
        if exists(target, name):
            Tables(target).query(name, f"SELECT * FROM {name}")
    if marker is None or not marker.made_at:
        return
    tables = Tables(target)

    def ids(name: str, condition: str = "true") -> list[int]:
        sql = f"SELECT entry_id FROM {name} WHERE {condition}"
        return tables.query(name, sql, marker.tables[name])["entry_id"].to_pylist()

    entries, sealed = ids("entries"), ids("delayed_index", "operation = 'DELAY'")
    known = ids("deliveries", "subscription = 'a'")
    assert len(set(sealed)) == len(sealed)
    assert set(entries) <= {*sealed, *known}, "what is durable is in the index, or delivered"
    assert set(ids("delayed_index", "operation = 'MOVE'")) <= set(ids("outcomes")), "a move is by a command"
    assert set(sealed) & delivered <= set(known), "what was delivered would go out again"


@settings(max_examples=examples(40))
@given(
    before=st.lists(st.integers(0, 99), max_size=20),
    runs=st.lists(
        st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.integers(0, 12)), max_size=30),
        min_size=1,
        max_size=4,
    ),
)
def test_the_tables_of_a_backup_go_together_whenever_it_ends_and_whatever_is_written_meanwhile(
    before: list[int], runs: list[list[tuple[list[int], int]]]
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        writer, target = Writer(folder), str(folder / "copy")
        for what in before:
            writer.do(what)
        was_delivered: set[int] = set()
        marker = None
        for run in runs:
            moments = iter(run)

            def meanwhile(moments: Iterator[tuple[list[int], int]] = moments) -> None:
                doing, killed = next(moments, ([], 1))
                for what in doing:
                    writer.do(what)
                if killed == 0:
                    raise Killed

            at_start, before_run = set(writer.delivered), read_marker(target)
            with suppress(Killed), _between(meanwhile):
                back_up(writer.settings, target)
            marker = read_marker(target)
            if marker != before_run and marker is not None and marker.made_at:
                was_delivered = at_start
            check(target, was_delivered)
        if marker is not None and marker.made_at:
            tables = Tables(target)
            going_together = {name: content(tables, name, marker.tables[name]) for name in SCHEMAS}
            assert restore(target) == marker
            assert contents(Tables(target)) == going_together
            assert restore(target) == marker, "as often as it takes"
            assert contents(Tables(target)) == going_together
    finally:
        shutil.rmtree(folder)


@contextmanager
def _between(meanwhile: Callable[[], None]) -> Iterator[None]:
    """Calls a function before each step of a backup: it looks at a table, copies or deletes a file, or writes."""

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            meanwhile()
            return function(*arguments, **named)

        return called

    steps: list[tuple[Any, str]] = [(Storage, "copy_from"), (Storage, "delete")]
    steps += [(copying, "files_of"), (copying, "change_to"), (copying, "write_marker")]
    with ExitStack() as patched:
        for owner, name in steps:
            patched.enter_context(mock.patch.object(owner, name, before(getattr(owner, name))))
        yield


def test_the_lock_of_a_backup_to_object_storage_is_where_nobody_else_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "cache"))
    with copying._alone("s3://bucket/backup"):
        with (
            pytest.raises(BackupError, match="another backup to s3://bucket/backup"),
            copying._alone("s3://bucket/backup"),
        ):
            pass
        with copying._alone("s3://bucket/other"):
            assert len(list((tmp_path / "cache").glob("backup-*.lock"))) == 2
