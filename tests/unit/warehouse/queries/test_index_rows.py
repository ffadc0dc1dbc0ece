"""What a command names is found in the tables, whatever time it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tracker.messages import TOPIC, batches, command, commands, messages
from tracker.commands.kinds import RESCHEDULE, RESTORE, RETRY, SKIP
from tracker.entry_log import entries_of
from tracker.keys.cold_keys import GROUP_MILLIS
from tracker.messages import concat, int64, where, with_columns
from tracker.packing import payload_sizes
from warehouse.delta.tables import Tables
from warehouse.queries import index_rows
from warehouse.queries.index_rows import (
    LOOKED_UP,
    _covering,
    find_keyed_messages,
    find_known_messages,
    find_places,
    read_places,
    to_index,
)

pytestmark = pytest.mark.slow

NOW = 1_800_000_000_000
DAY = 86_400_000


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    tables = Tables(str(tmp_path))
    tables.create()
    alone = messages([(1, entry, NOW + entry * DAY) for entry in range(10)])
    batch = batches([(2, 0, 0, 3, NOW), (2, 0, 1, 3, NOW + 5 * DAY), (2, 0, 2, 3, NOW + DAY)])
    gone = messages([(3, 0, NOW)])
    for number, rows in enumerate((alone, batch), 1):
        tables.append("delayed_index", to_index(rows, number), {"test": number})
    for number, rows in enumerate((alone, batch, gone), 1):
        tables.append("entries", entries_of(rows), {"test": number})
    return tables


def found(tables: Tables, *asked: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """The positions and times for skips of (ledger_id, entry_id, deliver_at)."""
    rows = commands(command(f"{i}", ledger, entry) | {"deliver_at": at} for i, (ledger, entry, at) in enumerate(asked))
    versions = [tables.version(name) for name in LOOKED_UP]
    return positions(find_known_messages(tables, versions, rows, []))


@pytest.mark.parametrize("at", [0, NOW + 3 * DAY, NOW + 3 * DAY + 1, 1])
def test_a_message_is_found_by_any_time(tables: Tables, at: int) -> None:
    assert found(tables, (1, 3, at)) == [(1, 3, -1, NOW + 3 * DAY)]


@pytest.mark.parametrize("at", [0, NOW, NOW + DAY, 1])
def test_an_entry_is_found_whole(tables: Tables, at: int) -> None:
    assert found(tables, (2, 0, at)) == [(2, 0, 0, NOW), (2, 0, 1, NOW + 5 * DAY), (2, 0, 2, NOW + DAY)]


def test_many_are_found_together_those_that_are_in_no_bucket_too(tables: Tables) -> None:
    asked = [(1, entry, NOW + entry * DAY) for entry in range(12)]
    assert found(tables, *asked, (3, 0, NOW), (2, 0, NOW), (4, 0, 0)) == [
        *[(1, entry, -1, NOW + entry * DAY) for entry in range(10)],
        *[(2, 0, 0, NOW), (2, 0, 1, NOW + 5 * DAY), (2, 0, 2, NOW + DAY)],
        (3, 0, -1, 0),
    ]


NAMES = ("ledger_id", "entry_id", "batch_index", "deliver_at")


def positions(rows: pa.Table) -> list[tuple[int, ...]]:
    return sorted(tuple(row[name] for name in NAMES) for row in rows.to_pylist())


class Index:
    """Eleven files in the order of time, of which each may have any entry by its ids; the fifth has moved rows, too.

    Args:
        schedule_key: of all messages.
    """

    def __init__(self, folder: Path, schedule_key: str | None = None) -> None:
        self.tables = Tables(str(folder), segment_rows=10)
        self.tables.create()
        self._folder = Path(self.tables.path("delayed_index"))
        due = [(entry, NOW + (entry * 7_919 % 1_000) * DAY) for entry in range(1_000)]
        alone = batches([(1, entry, -1, 1, at) for entry, at in due], schedule_key=schedule_key)
        batch = batches([(1, 1_000, index, 3, NOW + index * 300 * DAY) for index in range(3)])
        gone = batches([(1, 1_001, -1, 1, NOW + 650 * DAY), *((1, 1_002, i, 2, NOW + 650 * DAY) for i in range(2))])
        half = gone.slice(1, 1)  # of the last entry the other message was handed out without being sealed
        self.moved_at = NOW + 450 * DAY
        moved = batches([(1, entry, -1, 1, self.moved_at) for entry in (3, 4)], sequence=7, subscription="a")
        rows = concat([alone, batch, moved, half]).sort_by("deliver_at")
        for start in range(0, rows.num_rows, 100):
            self.tables.append("delayed_index", to_index(rows.slice(start, 100), 1), {})
        self.tables.append("entries", entries_of(concat([alone, batch, gone])), {})
        self.versions = [self.tables.version(name) for name in LOOKED_UP]
        self._files = pa.table(DeltaTable(self._folder).get_add_actions(flatten=True)).to_pylist()

    @contextmanager
    def only_files_of(self, *times: int) -> Iterator[int]:
        """Removes for a while the files in whose span none of the times is; yields how many stay."""
        removed = [
            file["path"]
            for file in self._files
            if not any(file["min.deliver_at"] <= time <= file["max.deliver_at"] for time in times)
        ]
        for path in removed:
            (self._folder / path).rename(self._folder / f"{path}.away")
        yield len(self._files) - len(removed)
        for path in removed:
            (self._folder / f"{path}.away").rename(self._folder / path)

    def known(self, kind: str, entry: int, keyed: Sequence[str] = ()) -> list[tuple[int, ...]]:
        return positions(find_known_messages(self.tables, self.versions, named(kind, entry), keyed))

    def rows(self, kind: str, entry: int) -> list[tuple[int, ...]]:
        places = find_places(self.tables, self.versions, named(kind, entry), [])
        return positions(concat(read_places(self.tables, self.versions[0], places)))


def named(kind: str, entry: int) -> pa.Table:
    """A command by id alone."""
    return commands([command("r", 1, entry) | {"kind": kind, "deliver_at": 0}])


@pytest.mark.parametrize("kind", [SKIP, RESCHEDULE, RESTORE, RETRY])
def test_a_message_that_is_named_by_its_id_alone_is_looked_for_at_its_time(tmp_path: Path, kind: str) -> None:
    index = Index(tmp_path)
    for entry, time in ((3, NOW + 757 * DAY), (5, NOW + 595 * DAY)):
        with index.only_files_of(time) as n_read:
            assert (n_read, index.known(kind, entry)) == (1, [(1, entry, -1, time)])
    with index.only_files_of(*range(NOW, NOW + 601 * DAY, DAY)):
        assert index.known(kind, 1_000) == [(1, 1_000, i, NOW + i * 300 * DAY) for i in range(3)]
    with index.only_files_of(NOW + 650 * DAY) as n_read:
        assert n_read == 1
        assert index.known(kind, 1_001) == [(1, 1_001, -1, 0)], "it was handed out without being sealed"
        assert index.known(kind, 1_002) == [(1, 1_002, 0, NOW + 650 * DAY)]


@pytest.mark.parametrize("kind", [RESCHEDULE, RESTORE, RETRY])
def test_the_rows_of_a_message_are_looked_for_at_its_time_and_where_something_was_moved(
    tmp_path: Path, kind: str
) -> None:
    index = Index(tmp_path)
    for entry, time in ((3, NOW + 757 * DAY), (5, NOW + 595 * DAY)):
        with index.only_files_of(time, index.moved_at) as n_read:
            assert n_read == 2
            moved = [(1, entry, -1, index.moved_at)] if entry == 3 else []
            assert index.rows(kind, entry) == [*moved, (1, entry, -1, time)]
    with index.only_files_of(NOW + 650 * DAY, index.moved_at):
        assert index.rows(kind, 1_001) == []
        assert index.rows(kind, 1_002) == [(1, 1_002, 0, NOW + 650 * DAY)]
    with index.only_files_of():
        assert index.rows(SKIP, 3) == []


def test_a_message_that_its_schedule_key_has_made_due_sooner_is_found_all_the_same(tmp_path: Path) -> None:
    index = Index(tmp_path, schedule_key="k")
    late = batches([(1, 1_003, -1, 1, NOW + 900 * DAY)])
    index.tables.append("delayed_index", to_index(batches([(1, 1_003, -1, 1, NOW + DAY)], schedule_key="k"), 1), {})
    index.tables.append("entries", entries_of(late), {})
    index.versions = [index.tables.version(name) for name in ("delayed_index", "entries")]
    assert index.known(SKIP, 1_003, [TOPIC]) == [(1, 1_003, -1, NOW + DAY)]
    with index.only_files_of(NOW + 757 * DAY) as n_read:
        assert (n_read, index.known(SKIP, 3, [TOPIC])) == (1, [(1, 3, -1, NOW + 757 * DAY)])


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 9)), max_size=99))
def test_ranges_cover_all_spans_and_leave_the_widest_gaps_out(spans: list[tuple[int, int]]) -> None:
    first = np.array([start for start, _ in spans], np.int64)
    last = first + np.array([length for _, length in spans], np.int64)
    ranges = _covering(first, last)
    assert len(ranges) <= 50
    assert all(any(a <= f and u <= b for a, b in ranges) for f, u in zip(first.tolist(), last.tolist(), strict=True))
    covered = {time for f, u in zip(first.tolist(), last.tolist(), strict=True) for time in range(f, u + 1)}
    if len(ranges) < 50:
        assert covered == {time for a, b in ranges for time in range(a, b + 1)}


def test_nothing_is_looked_for_where_nothing_is_named(tables: Tables) -> None:
    assert found(tables) == []


def test_messages_of_schedule_keys_are_found_by_when_they_are_due_in_the_version_that_is_asked_for(
    tables: Tables,
) -> None:
    many = list(range(0, 240, 2))  # more groups than the conditions of a query
    names = ["it's", "other", *(f"k{group}" for group in many)]
    due = [group * GROUP_MILLIS for group in [4, 4, *many]]
    rows = concat(
        batches([(9, i, -1, 1, at)], schedule_key=name, key_since=7)
        for i, (name, at) in enumerate(zip(names, due, strict=True))
    )
    moved = batches([(9, 0, -1, 1, 4 * GROUP_MILLIS)], schedule_key="it's", sequence=5, subscription="a")
    tables.append("delayed_index", to_index(concat([rows, moved]), 3), {"test": 3})
    version = tables.version("delayed_index")
    later = batches([(9, 1_000, -1, 1, 4 * GROUP_MILLIS)], schedule_key="it's")
    tables.append("delayed_index", to_index(later, 4), {"test": 4})

    def entries(names: list[str], groups: list[int], at: int = version) -> list[int]:
        rows = find_keyed_messages(tables, at, [(TOPIC, name) for name in names], groups)
        assert set(rows["key_since"].to_pylist()) <= {7, None}
        return sorted(rows["entry_id"].to_pylist())

    assert entries(["it's"], [4]) == [0]
    assert entries(["it's"], [4], version + 1) == [0, 1_000]
    assert entries(["it's"], [3]) == entries(["it's"], [5]) == entries(["nobody's"], [4]) == []
    assert entries([f"k{group}" for group in many], many) == list(range(2, 2 + len(many)))
    assert not find_keyed_messages(tables, version, [("another topic", "it's")], [4]).num_rows


def test_of_many_ledgers_no_payloads_between_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    rows = concat(messages([(ledger, n, NOW) for n in range(20)], payload=b"x" * 100) for ledger in range(60))
    tables.append("delayed_index", to_index(rows, 1), {})
    asked = commands([command(f"{n}", n, n % 2) | {"kind": RESCHEDULE, "deliver_at": 0} for n in range(60)])
    versions = [tables.version("delayed_index"), tables.version("entries")]
    places = find_places(tables, versions, asked, [])
    read: list[pa.Table] = []
    query = Tables.query
    monkeypatch.setattr(Tables, "query", lambda *arguments: read.append(query(*arguments)) or read[-1])  # type: ignore[func-returns-value]
    (part,) = read_places(tables, versions[0], places)
    assert positions(part) == [(n, n % 2, -1, NOW) for n in range(60)]
    assert sum(one.num_rows for one in read) == 2 * 60


def test_rows_that_commands_move_are_read_in_parts_of_bounded_bytes_without_those_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_rows, "PART_BYTES", 1_000)
    tables = Tables(str(tmp_path))
    tables.create()
    sizes = {entry: 0 if entry % 7 == 0 else 30 * (entry % 20) for entry in range(100)} | {50: 5_000}
    rows = concat(messages([(1, n, NOW + n % 3)], payload=b"x" * size) for n, size in sizes.items())
    rows = with_columns(rows, payload=pc.if_else(pc.equal(pc.binary_length(rows["payload"]), 0), None, rows["payload"]))
    moved = with_columns(rows.slice(10, 20), sequence=pa.array(range(20)), deliver_at=pa.array([NOW + DAY] * 20))
    tables.append("delayed_index", to_index(concat([rows, moved]), 1), {})
    read: list[pa.Table] = []
    query = Tables.query

    def noted(*arguments: Any) -> pa.Table:
        found = query(*arguments)
        read.append(found)
        return found

    monkeypatch.setattr(Tables, "query", noted)
    asked = commands([command(f"{n}", 1, n) | {"kind": RESCHEDULE, "deliver_at": 0} for n in range(0, 100, 2)])
    versions = [tables.version("delayed_index"), tables.version("entries")]
    places = find_places(tables, versions, asked, [])
    assert not any("payload" in one.column_names for one in read), "no payload is read before its size is known"
    parts = list(read_places(tables, versions[0], places))
    assert concat(parts).num_rows == places.num_rows == 50 + 10
    assert positions(concat(parts)) == positions(
        concat([where(one, int64(one, "entry_id") % 2 == 0) for one in (rows, moved)])
    )
    for part, of_query in zip(parts, read[-len(parts) :], strict=True):
        assert int(payload_sizes(part).sum()) <= 1_000 or part.num_rows == 1
        assert int(payload_sizes(of_query).sum()) <= 2_000 or part.num_rows == 1, "a moved one's first row at most"
    assert len(parts) > 10
    assert concat(parts)["sequence"].combine_chunks().is_null().to_pylist() == [True] * 50 + [False] * 10
    assert list(read_places(tables, versions[0], places.slice(0, 0))) == []
