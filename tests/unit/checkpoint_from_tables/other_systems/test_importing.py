"""Items of another system are imported once each, however often and wherever an import is interrupted."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from checkpoint_from_tables.importing.importer import Importer
from checkpoint_from_tables.other_systems import importing
from checkpoint_from_tables.other_systems.importing import ImportPreview, import_items, preview_import
from checkpoint_from_tables.other_systems.item import Item, SourceError, item, rejected_item
from conf.settings import Settings
from tests.support.tracker.messages import TOPIC
from warehouse.backup import copying
from warehouse.backup.copying import CHOSEN, back_up
from warehouse.backup.restoring import restore
from warehouse.delta.tables import Tables
from warehouse.schemas import IMPORTED

pytestmark = pytest.mark.slow

NOW = 1_800_000_000_000
OTHER = "persistent://public/default/other"


class FakeSource:
    def __init__(self, items: list[Item | Exception]) -> None:
        self.all = items
        self.left: Counter[str] = Counter()

    def items(self) -> Iterator[Item]:
        for one in self.all:
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        warehouse=str(tmp_path / "warehouse"),
        routes=tuple({"source": topic, "subscriptions": [{"name": "a"}]} for topic in (TOPIC, OTHER)),  # type: ignore[misc]
        pulsar={"max_message_size_bytes": 65_536, "max_chunked_message_bytes": 0},  # type: ignore[arg-type]
    )
    Tables(settings.warehouse).create()
    return settings


def run(settings: Settings, *items: Item | Exception) -> tuple[int, int, int]:
    importer = Importer(settings, TOPIC)
    import_items(importer, FakeSource(list(items)))
    return importer.done.messages, importer.done.rejected, importer.done.already_there


def looked(settings: Settings, *items: Item | Exception) -> ImportPreview:
    return preview_import(Importer(settings, TOPIC), FakeSource(list(items)))


def rows(settings: Settings, table: str) -> list[dict[str, Any]]:
    return Tables(settings.warehouse).query(table, f"SELECT * FROM {table} ORDER BY ledger_id, entry_id").to_pylist()


def job(i: int) -> Item:
    return item(f"job:{i}", NOW + i, f"payload {i}".encode(), {"colour": i}, f"key {i}")


def test_an_item_is_a_message_with_all_that_it_has_and_what_cannot_be_taken_is_kept_aside(settings: Settings) -> None:
    big = item("big", NOW, bytes(70_000))
    assert run(settings, job(1), rejected_item("x", "no job", b"bytes"), big, job(1)) == (3, 2, 0)
    (message,) = rows(settings, "delayed_index")
    assert (message["deliver_at"], message["payload"], message["key"]) == (NOW + 1, b"payload 1", "key 1")
    assert message["properties"] == [("colour", "1")]
    too_many = "too many bytes to be delivered with their delaylake properties"
    rejected = [(row["reason"], len(row["payload"])) for row in rows(settings, "rejects")]
    assert rejected == [("no job", 5), (too_many, 70_000)]
    assert len(rows(settings, "entries")) == 3
    imported = rows(settings, "imported")
    assert [row["item"] for row in imported] == ["job:1", "x", "big"]
    assert all(row["payload"] is None and row["properties"] is None and row["imported_at"] for row in imported)


def test_items_of_one_id_that_differ_are_counted_and_equal_ones_are_one(settings: Settings) -> None:
    other = item("job:1", NOW + 60_000, b"another job with the id")
    for there in (0, 1):
        source = FakeSource([job(1), job(1), other])
        importer = Importer(settings, TOPIC)
        looked_at = FakeSource(source.all)
        preview_import(importer, looked_at)
        import_items(importer, source)
        assert (importer.done.messages, importer.done.already_there) == (1 - there, there)
        assert looked_at.left == source.left == {importing.OF_SAME_ID: 1}


def test_no_payload_stays_behind_beside_the_tables(settings: Settings) -> None:
    run(settings, item("1", NOW, b"a secret"))
    folder = Path(settings.warehouse) / "imported"
    assert len(list(folder.glob("*.parquet"))) == 1


def test_what_was_imported_is_passed_over_also_after_its_rows_are_gone(settings: Settings) -> None:
    assert run(settings, job(1), job(2)) == (2, 0, 0)
    Tables(settings.warehouse).delete("delayed_index", "true")
    Tables(settings.warehouse).delete("entries", "true")
    found = looked(settings, job(1), job(2), job(2), job(3))
    assert (found.items, found.already_there) == (1, 2)
    assert run(settings, job(1), job(2), job(2), job(3)) == (1, 0, 2)
    assert [row["payload"] for row in rows(settings, "delayed_index")] == [b"payload 3"]
    assert preview_import(Importer(settings, OTHER), FakeSource([job(1)])).items == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before", [True, False], ids=["before a commit", "after a commit"])
def test_wherever_an_import_is_killed_the_next_one_brings_in_the_rest(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """The n-th import is killed at its n-th commit, until one comes through; meanwhile the other system goes on."""
    monkeypatch.setattr(importing, "_ITEMS_AT_ONCE", 3)
    commit = Tables.commit
    keyed = [item(name, NOW + 100, name.encode(), {"scheduleKey": name[0]}) for name in ("k1", "k2", "l1", "l2")]
    items: list[Item | Exception] = [*(job(i) for i in range(7)), rejected_item("x", "no job", b"bytes"), *keyed]
    for n in count(1):
        left = n

        def killed(self: Tables, *args: Any, **kwargs: Any) -> bool:
            nonlocal left
            left -= 1
            if not left and before:
                raise Killed
            done = commit(self, *args, **kwargs)
            if not left:
                raise Killed
            return done

        monkeypatch.setattr(Tables, "commit", killed)
        try:
            run(settings, *items)
        except Killed:
            continue
        finally:
            monkeypatch.setattr(Tables, "commit", commit)
        break
    assert n > 3
    assert run(settings, *items) == (0, 0, 12)
    # Of `k` the first waits when the second's part is imported; of `l`, in one part, the later replaces the other.
    taken = [b"k1", b"l2", *(b"payload %d" % i for i in range(7))]
    assert sorted(row["payload"] for row in rows(settings, "delayed_index")) == taken
    assert sorted(row["payload"] for row in rows(settings, "rejects")) == [b"bytes", b"k2", b"l1"]
    assert len({(row["ledger_id"], row["entry_id"]) for row in rows(settings, "entries")}) == 12
    names = {*(f"job:{i}" for i in range(7)), "x", "k1", "k2", "l1", "l2"}
    assert {row["item"] for row in rows(settings, "imported")} == names


def test_an_item_that_is_gone_from_the_other_system_is_brought_in_if_it_was_written_down(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(importing, "import_rows", killed)
        with pytest.raises(Killed):
            run(settings, job(1))
    assert run(settings) == (1, 0, 0)
    assert [row["payload"] for row in rows(settings, "delayed_index")] == [b"payload 1"]


def test_what_was_read_before_the_other_system_failed_is_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_ITEMS_AT_ONCE", 2)
    with pytest.raises(SourceError):
        run(settings, job(1), job(2), job(3), SourceError("it is gone"))
    assert run(settings, job(1), job(2), job(3)) == (1, 0, 2)


def test_a_look_counts_what_the_import_does_and_changes_nothing(settings: Settings) -> None:
    far = settings.model_copy(update={"tracker": settings.tracker.model_copy(update={"max_delay_millis": 1 << 50})})
    assert run(far, job(1)) == (1, 0, 0)
    items = [
        job(5),
        job(9),
        job(9),
        job(1),
        item("now", None, b"x"),
        item("past", 1, b"y"),
        item("negative", -1, b"xx"),
        item("too far", 1 << 51, b"xx"),
        item("beyond the year 9999", 1 << 59, b"xx"),
        item("no time", float("nan"), b"xx"),
        item("big", NOW, bytes(70_000)),
        item("no text", 1, b"xx", {"colour": "\ud800"}),
        rejected_item("b", "no job", None),
        item("recurs", NOW + 7, b"", {"repeat": "@every 1h"}),
        *(item(f"keyed {i}", NOW + 7, b"", {"scheduleKey": "k", "scheduleMode": "keep"}) for i in range(3)),
    ]
    before = rows(settings, "imported")
    found = looked(far, *items)
    assert rows(settings, "imported") == before
    assert (found.items, found.rejected, found.already_there) == (15, 9, 1)
    assert (found.overdue, found.payload_bytes) == (2, 2 * len(b"payload 5") + 2)
    assert (found.first_due, found.last_due) == (NOW + 5, NOW + 9)
    assert found.examples[0] == "negative: deliver_at is negative"
    assert len(found.examples) == 5
    assert run(far, *items) == (found.items, found.rejected, found.already_there)
    assert Counter(row["reason"] for row in rows(settings, "rejects")) == found.reasons
    assert sum(found.reasons.values()) == found.rejected


@pytest.mark.parametrize("killed_at", range(1, 9))
def test_a_look_after_an_import_was_killed_counts_what_the_next_one_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    items = [job(1), job(2), rejected_item("x", "no job", b"bytes")]
    commit = Tables.commit
    left = killed_at

    def killed(self: Tables, *args: Any, **kwargs: Any) -> bool:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        return commit(self, *args, **kwargs)

    with monkeypatch.context() as killing, suppress(Killed):
        killing.setattr(Tables, "commit", killed)
        run(settings, *items)
    found = looked(settings, *items, job(3))
    assert run(settings, *items, job(3)) == (found.items, found.rejected, found.already_there)


def test_items_that_a_restored_backup_lacks_get_no_id_of_another_item_when_they_are_imported_again(
    settings: Settings, tmp_path: Path
) -> None:
    restored = settings.model_copy(update={"warehouse": str(tmp_path / "restored")})
    shutil.copytree(settings.warehouse, restored.warehouse)
    run(settings, job(1), job(2))
    run(restored, job(3), job(1))  # job 3 has come meanwhile, and is due first
    ids: dict[tuple[int, int], set[bytes]] = {}
    for one in (settings, restored):
        for row in rows(one, "delayed_index"):
            ids.setdefault((row["ledger_id"], row["entry_id"]), set()).add(row["payload"])
    assert all(len(payloads) == 1 for payloads in ids.values()), "a rebuild would take one for the other, delivered"


def test_what_is_imported_again_as_it_was_has_its_ids_again(settings: Settings, tmp_path: Path) -> None:
    restored = settings.model_copy(update={"warehouse": str(tmp_path / "restored")})
    shutil.copytree(settings.warehouse, restored.warehouse)
    for one in (settings, restored):
        run(one, job(1), job(2))
    first, second = (
        [(row["ledger_id"], row["entry_id"]) for row in rows(one, "entries")] for one in (settings, restored)
    )
    assert first == second, "a rebuild finds at the destinations what has come"


def restored(settings: Settings, target: Path) -> Settings:
    assert restore(str(target)) is not None
    return settings.model_copy(update={"warehouse": str(target)})


def check_each_once(settings: Settings, jobs: int) -> None:
    """Checks that each job but the last one, which is rejected, is in the tables once."""
    assert Counter(row["entry_id"] for row in rows(settings, "entries")) == Counter(range(jobs))
    assert Counter(row["entry_id"] for row in rows(settings, "delayed_index")) == Counter(range(jobs - 1))
    assert Counter(row["entry_id"] for row in rows(settings, "rejects")) == Counter([jobs - 1])
    assert len(rows(settings, "imported")) == jobs


def restored_after_import(settings: Settings, target: Path, before: str) -> tuple[Settings, list[Item]]:
    """Restores a backup during which items, which are returned, were imported before a table's version was chosen."""
    items = [job(1), job(2), rejected_item("x", "no job", b"bytes")]
    Tables(settings.warehouse).create({importing.TABLE: IMPORTED})
    choose, left = copying._Version.of, [items]

    def importing_before(warehouse: str, name: str) -> Any:
        if name == before and left:
            run(settings, *left.pop())
        return choose(warehouse, name)

    with mock.patch.object(copying._Version, "of", importing_before):
        back_up(settings, str(target))
    return restored(settings, target), items


@pytest.mark.parametrize("before", CHOSEN)
def test_a_job_whose_import_ends_while_a_backup_chooses_versions_is_imported_once_after_a_restore(
    settings: Settings, tmp_path: Path, before: str
) -> None:
    copy, items = restored_after_import(settings, tmp_path / "copy", before)
    run(copy, *items)
    check_each_once(copy, len(items))


@pytest.mark.parametrize("before", CHOSEN)
def test_with_a_job_that_is_new_after_the_restore_the_others_are_imported_once_too(
    settings: Settings, tmp_path: Path, before: str
) -> None:
    copy, items = restored_after_import(settings, tmp_path / "copy", before)
    run(copy, *items, job(3))
    found = [row["payload"] for name in ("delayed_index", "rejects") for row in rows(copy, name)]
    assert sorted(found) == sorted([b"payload 1", b"payload 2", b"payload 3", b"bytes"])


def test_a_backup_waits_for_no_import_that_writes_all_the_time(settings: Settings, tmp_path: Path) -> None:
    choose, jobs = copying._Version.of, count()

    def importing_before(warehouse: str, name: str) -> Any:
        run(settings, job(next(jobs)))
        return choose(warehouse, name)

    writes = mock.patch.object(copying._Version, "of", importing_before)
    with writes, pytest.raises(copying.BackupError, match="an import writes"):
        back_up(settings, str(tmp_path / "copy"))


def test_a_job_that_only_a_backup_that_was_broken_off_has_is_imported_after_a_restore(
    settings: Settings, tmp_path: Path
) -> None:
    items = [job(1), job(2), rejected_item("x", "no job", b"bytes")]
    back_up(settings, str(tmp_path / "copy"))
    run(settings, *items)
    full = OSError("no space left")
    with mock.patch.object(copying, "write_marker", side_effect=full), pytest.raises(copying.BackupError):
        back_up(settings, str(tmp_path / "copy"))
    copy = restored(settings, tmp_path / "copy")
    assert rows(copy, "entries") == []
    assert run(copy, *items) == (3, 1, 0)
    check_each_once(copy, len(items))
