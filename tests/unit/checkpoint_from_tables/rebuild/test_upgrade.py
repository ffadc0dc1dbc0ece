"""The warehouse that an earlier release wrote is taken over, with all that waits in it."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path

import pytest

from checkpoint_from_tables.new_checkpoint import rebuild_checkpoint
from conf.settings import Route, Settings
from streaming.batch_schema import InputKind
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.prepared import PreparedState
from streaming.crash_recovery import begin
from streaming.start_checks import StartError
from tests.fixtures.make_warehouse import DUE, TOPIC
from tests.support.warehouse.rebuilt import without_destinations
from tests.support.warehouse.tables import rows
from tracker.messages import int64
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import Extent, maintain
from warehouse.queries.index_rows import read_segment
from warehouse.schemas import SCHEMAS, VERSION, VERSION_OF

pytestmark = pytest.mark.slow

FIXTURES = sorted((Path(__file__).parents[3] / "fixtures").glob("warehouse-*.tar.xz"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda file: file.name)
def test_a_warehouse_of_an_earlier_release_goes_on(
    fixture: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(fixture) as archive:
        archive.extractall(tmp_path, filter="data")
    route = Route(source=TOPIC, subscriptions=({"name": "billing"}, {"name": "audit"}))  # type: ignore[arg-type]
    settings = Settings(warehouse=f"file:{tmp_path}/warehouse", checkpoint=f"file:{tmp_path}/c", routes=(route,))
    tables, checkpoint = Tables(settings.warehouse), Checkpoint(tmp_path / "c")
    before = {name: tables.query(name, f"SELECT count(*) AS n FROM {name}")["n"][0].as_py() for name in SCHEMAS}
    with caplog.at_level(logging.INFO), pytest.raises(StartError, match="run `delaylake rebuild` first"):
        begin(settings, tables, checkpoint)
    assert "delayed_index: an earlier version made the table; it gets the columns ordering_key_bytes" in caplog.text

    with without_destinations():
        found = rebuild_checkpoint(settings, discards_checkpoint=False)
    assert found["pending"] == 4, "as it came; of the skipped one audit's; of the rescheduled one each its own"
    begin(settings, tables, checkpoint)
    inputs = PreparedState(tmp_path / "c").inputs(settings.tracker.shard_count)
    cancelled = [row for _, kinds in inputs for row in kinds[InputKind.REBUILT_CANCELLED].to_pylist()]
    assert sorted((row["entry_id"], row["subscription"]) for row in cancelled) == [(2, 0), (3, 0), (3, 1)]

    version = tables.version("delayed_index")
    waiting = read_segment(tables, version, DUE, DUE + 10_000)
    assert sorted(set(int64(waiting, "entry_id").tolist())) == [1, 2, 3, 4]
    assert waiting["schema_version"].null_count == waiting.num_rows
    for name in SCHEMAS:
        assert tables.written(name, VERSION_OF) == VERSION
        assert tables.append(name, rows(name, [{}]), {"new": 1})
    maintain(settings, extent=Extent.MERGES)
    after = {name: tables.query(name, f"SELECT count(*) AS n FROM {name}")["n"][0].as_py() for name in SCHEMAS}
    assert after == {name: n + 1 for name, n in before.items()}
