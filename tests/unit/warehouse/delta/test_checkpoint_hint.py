"""A hint in a table's log that is wrong: readers pass over it and change nothing, a start removes it and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from conf.errors import UnreadableWarehouseError
from conf.settings import Settings
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.crash_recovery import begin
from tests.support.tracker.messages import TOPIC
from warehouse.delta.checkpoint_hint import drop_wrong_hint
from warehouse.delta.opening import open_newest
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import Tables, exists
from warehouse.schemas import REFUSALS, REJECTS
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

WRONG = {
    "names a checkpoint that is gone": None,
    "is later than the log": b'{"version":70,"size":3}',
    "is empty": b"",
    "is cut off": b'{"version":1',
    "is no JSON": b"\0" * 40,
    "is no object": b"[1]",
    "is no UTF-8": b"\xff\xfe",
    "names no version": b'{"size":3}',
    "names a negative version": b'{"version":-1,"size":3}',
    "names its version as text": b'{"version":"1","size":3}',
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        warehouse=str(tmp_path / "warehouse"),
        checkpoint=str(tmp_path / "checkpoint"),
        routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
    )
    tables = Tables(settings.warehouse)
    tables.create()
    tables.create({"refusals": REFUSALS})
    for name in ("rejects", "refusals"):
        tables.note(name, {"a writer": 1})
        DeltaTable(tables.path(name)).create_checkpoint()
    row = [[TOPIC if field.name == "topic" else None] for field in REJECTS]
    tables.append(
        "rejects", pa.table([pa.array(c, f.type) for c, f in zip(row, REJECTS, strict=True)], schema=REJECTS), {}
    )
    return settings


def log_of(settings: Settings, name: str = "rejects") -> Path:
    return Path(settings.warehouse) / name / "_delta_log"


def make_wrong(log: Path, content: bytes | None) -> None:
    [checkpoint] = log.glob("*.checkpoint.parquet")
    checkpoint.unlink()
    if content is not None:
        (log / "_last_checkpoint").write_bytes(content)


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_table_whose_hint_is_wrong_is_read_as_it_is_and_not_changed(
    settings: Settings, content: bytes | None
) -> None:
    before = Snapshot(settings.warehouse, {"rejects": None}).versions
    make_wrong(log := log_of(settings), content)
    files = {file.name: file.read_bytes() for file in log.iterdir()}
    assert exists(settings.warehouse, "rejects")
    assert Tables(settings.warehouse).query("rejects", "SELECT topic FROM rejects").num_rows == 1
    assert Snapshot(settings.warehouse, {"rejects": None}).versions == before
    assert Warehouse(settings).sql("SELECT topic FROM rejects").num_rows == 1
    assert {file.name: file.read_bytes() for file in log.iterdir()} == files


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_start_removes_a_hint_that_is_wrong_and_says_so(
    settings: Settings, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("rejects", "refusals"):
        make_wrong(log_of(settings, name), content)
    (Path(settings.checkpoint) / "query").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        begin(settings, Tables(settings.warehouse), Checkpoint(Path(settings.checkpoint)))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].rpartition("/")[2] for line in lines] == ["rejects", "refusals"]
    assert all("_last_checkpoint, which names no checkpoint that is there" in line for line in lines)
    for name in ("rejects", "refusals"):
        assert not (log_of(settings, name) / "_last_checkpoint").exists()
        DeltaTable(f"{settings.warehouse}/{name}")


def test_a_hint_stays_that_names_a_checkpoint_or_one_before_a_later_one(settings: Settings) -> None:
    hint = log_of(settings) / "_last_checkpoint"
    earlier = json.loads(hint.read_text())["version"]
    for version in (earlier, earlier - 1):
        hint.write_text(json.dumps({"version": version, "size": 3}))
        drop_wrong_hint(f"{settings.warehouse}/rejects")
        assert hint.exists()
        assert open_newest(f"{settings.warehouse}/rejects").version() > earlier


def test_a_table_that_lacks_commits_besides_is_one_line(settings: Settings) -> None:
    make_wrong(log := log_of(settings), None)
    (log / f"{0:020}.json").unlink()
    with pytest.raises(UnreadableWarehouseError) as raised:
        exists(settings.warehouse, "rejects")
    assert isinstance(raised.value, DeltaError)
    assert len(raised.value.lines) == 1
