"""A table whose disk is full takes nothing, stays readable, and goes on with the same rows when there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from status.disk_room import is_of_full_disk
from streaming.checkpoint.batch_input import BatchInput, Received
from streaming.checkpoint.offset import Offset
from tests.support.service.small_disk import SmallDisk, small_disk
from tests.support.tracker.messages import messages
from tracker.messages import MESSAGES
from warehouse.delta.tables import Tables
from warehouse.durable import write_durably
from warehouse.schemas import FENCED, LATER

pytestmark = pytest.mark.slow

ROWS = 50


def rows(schema: pa.Schema) -> pa.Table:
    """Rows with different values in the first column of integers, and null in the others."""
    number = next(field.name for field in schema if pa.types.is_integer(field.type))
    return pa.Table.from_pylist([{number: i} for i in range(ROWS)], schema=schema)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 8 << 20) as made:
        yield made


@pytest.mark.parametrize("room", [0, 4096, 12288])
def test_each_table_loses_and_doubles_nothing(disk: SmallDisk, room: int) -> None:
    tables = Tables(str(disk.folder))
    schemas = FENCED | LATER
    tables.create(schemas)
    for name, schema in schemas.items():
        tables.append(name, rows(schema), {"job": 1})
    for name, schema in schemas.items():
        disk.fill(room)
        refused: list[str] = []
        for tick in (2, 3, 4, 5):  # with some room the file may fit, and the commit not
            try:
                tables.append(name, rows(schema), {"job": tick})
            except Exception as error:
                refused.append(str(error))
        assert refused
        assert all(map(is_of_full_disk, refused)), refused
        count = tables.query(name, f"SELECT count(*) AS n FROM {name}")["n"].to_pylist()[0]
        assert count == ROWS * (5 - len(refused))
        disk.make_room()
        again = Tables(str(disk.folder))
        again.create(schemas)  # as a start does, which removes torn commits
        for tick in (2, 3, 4, 5):
            again.append(name, rows(schema), {"job": tick})
        whole = again.query(name, f"SELECT count(*) AS n FROM {name}")["n"].to_pylist()[0]
        assert whole == ROWS * (1 + 4)


def test_the_checkpoints_files_are_the_old_ones_or_the_new_ones(disk: SmallDisk) -> None:
    file = disk.folder / "state"
    write_durably(file, b"old")
    taken = BatchInput(disk.folder / "input")
    received = Received(messages([(1, i, 7) for i in range(2_000)]), MESSAGES.empty_table())
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_durably(file, b"new" * 10_000)
    with pytest.raises(OSError, match="No space left"):
        taken.write(Offset(tick=1), received)
    assert file.read_bytes() == b"old"
    assert taken.read(Offset(tick=1)) is None
    disk.make_room()
    write_durably(file, b"new")
    taken.write(Offset(tick=1), received)
    found = taken.read(Offset(tick=1))
    assert file.read_bytes() == b"new"
    assert found is not None
    assert found.messages.num_rows == 2_000
