"""A rebuild puts a new checkpoint in the place of an old one."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from broker.entries.continuity import Gap
from broker.position import Position, SourceTopic
from checkpoint_from_tables import new_checkpoint
from checkpoint_from_tables.new_checkpoint import RebuildError, rebuild_checkpoint
from checkpoint_from_tables.rebuild.rejected import find_rejected
from conf.settings import Settings
from status.job_status import JobStatus, write_status
from streaming.checkpoint.checkpoint import Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import PreparedState
from streaming.checkpoint.shard_count import with_shard_count
from streaming.crash_recovery import begin
from streaming.source.watch.beginnings import Beginning, Beginnings
from streaming.source.watch.undecided_gaps import UndecidedGaps
from streaming.start_checks import StartError
from tests.support.warehouse.rebuilt import of_all_shards, without_destinations
from tests.support.warehouse.tables import NOW, TOPIC, make, rows
from warehouse.backup.copying import back_up
from warehouse.backup.marker import read_marker
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow


def test_of_the_checkpoints_that_were_moved_aside_only_the_newest_stay(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    second = datetime(2026, 11, 23, 10, tzinfo=UTC)
    for i in range(5):
        (tmp_path / "checkpoint" / "query").mkdir(parents=True)
        (tmp_path / "checkpoint" / "query" / f"of {i}").touch()
        with without_destinations(), mock.patch("checkpoint_from_tables.new_checkpoint.datetime") as clock:
            clock.now.return_value = second + timedelta(milliseconds=i)
            rebuild_checkpoint(made, discards_checkpoint=True)
        assert (tmp_path / "checkpoint" / f"query.20261123T10000000{i}000" / f"of {i}").exists()
        for file in (tmp_path / "checkpoint" / "query").rglob("*"):
            if file.is_file():
                file.unlink()
        (tmp_path / "checkpoint" / "query").rename(tmp_path / f"rebuilt {i}")
    kept = sorted(folder.name for folder in (tmp_path / "checkpoint").glob("query.*"))
    assert kept == ["query.20261123T100000003000", "query.20261123T100000004000"]


def test_a_rebuild_that_is_refused_leaves_a_backup_as_it_was(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    back_up(made, str(tmp_path / "copy"))
    (tmp_path / "checkpoint" / "query").mkdir(parents=True)
    copy = made.model_copy(update={"warehouse": str(tmp_path / "copy")})
    with pytest.raises(RebuildError, match="there is a checkpoint"):
        rebuild_checkpoint(copy, discards_checkpoint=False)
    assert read_marker(copy.warehouse) is not None
    back_up(made, copy.warehouse)


def test_a_rebuild_takes_over_where_topics_began_that_were_not_read_yet(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    began = Beginning(Position(7, -1), -1)
    for name in ("empty", "read"):
        Beginnings(made).keep(name, began)
    offsets = tmp_path / "checkpoint" / "query" / "offsets"
    offsets.mkdir()
    (offsets / "0").write_text(f"v1\n{{}}\n{json.dumps(Offset(tick=1, positions={'read': '7:3'}).to_json())}")
    with without_destinations():
        rebuild_checkpoint(made, discards_checkpoint=True)
    assert Beginnings(made).all() == {"empty": began}


def test_a_rebuild_takes_over_the_gaps_of_which_the_broker_has_not_told_what_is_missing(tmp_path: Path) -> None:
    """Entries after them may be durable: then they do not come again, and nobody would find the gaps."""
    made, _ = make(tmp_path)
    gap = SourceTopic(TOPIC, TOPIC, -1), Gap(Position(7, 3), Position(7, 6))
    UndecidedGaps(made).add([gap])
    with without_destinations():
        rebuild_checkpoint(made, discards_checkpoint=True)
    assert UndecidedGaps(made).first(9) == [gap]


def test_with_auto_a_rebuild_makes_a_shard_for_two_cores_whatever_the_old_checkpoint_had(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    Checkpoint(tmp_path / "checkpoint").shards = 2
    auto = {"tracker": {"shards": "auto"}, "spark": {"master": "local[6]"}}
    made = Settings.model_validate(made.model_dump() | auto)
    with without_destinations():
        rebuild_checkpoint(made, discards_checkpoint=True)
    assert with_shard_count(made).tracker.shards == PreparedState(tmp_path / "checkpoint").shards == 3


@pytest.mark.parametrize("step", ["write_rows", "complete"])
def test_no_job_starts_on_what_a_killed_rebuild_has_left(tmp_path: Path, step: str) -> None:
    """Of a message that was delivered before its entry was durable only `deliveries` knows: it would come twice."""
    made, tables = make(tmp_path)
    own = Checkpoint(tmp_path / "checkpoint")
    begin(made, tables, own)
    row = {"subscription": "a", "ledger_id": 1, "entry_id": 3, "delivered_at": NOW}
    tables.append("deliveries", rows("deliveries", [row]), {own.app_id: 1})
    for _ in range(2):
        killed = mock.patch.object(PreparedState, step, side_effect=KeyboardInterrupt)
        with without_destinations(), killed, pytest.raises(KeyboardInterrupt):
            rebuild_checkpoint(made, discards_checkpoint=True)
        with pytest.raises((StartError, CheckpointError), match="delaylake rebuild"):
            begin(made, Tables(made.warehouse), Checkpoint(tmp_path / "checkpoint"))
    with without_destinations():
        rebuild_checkpoint(made, discards_checkpoint=True)
    begin(made, Tables(made.warehouse), Checkpoint(tmp_path / "checkpoint"))
    done = of_all_shards(PreparedState(tmp_path / "checkpoint")).delivered
    assert done["entry_id"].to_pylist() == [3]


def test_a_rebuild_during_which_a_job_starts_elsewhere_does_not_say_that_it_is_done(tmp_path: Path) -> None:
    made, tables = make(tmp_path)

    def start_a_job(*of: Any) -> pa.Table:
        tables.take_over(tables.newest_epoch() + 1)
        return find_rejected(*of)

    started = mock.patch("checkpoint_from_tables.rebuild.rebuild.find_rejected", start_a_job)
    with without_destinations(), started, pytest.raises(FencedError, match="another start of the job"):
        rebuild_checkpoint(made, discards_checkpoint=True)


@pytest.mark.parametrize("state", ["running", "failed"])
@pytest.mark.parametrize(("is_on_cluster", "waited"), [(False, 0.0), (True, 30.0)])
def test_after_a_job_on_a_cluster_that_has_ended_a_rebuild_waits_for_executors_that_may_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_cluster: bool, waited: float, state: str
) -> None:
    made, _ = make(tmp_path)
    made = made.model_copy(update={"release": made.release.model_copy(update={"max_lookahead_millis": 30_000})})
    slept: list[float] = []
    clock = SimpleNamespace(time_ns=lambda: round((NOW / 1000 + sum(slept)) * 1e9), sleep=slept.append)
    monkeypatch.setattr(new_checkpoint, "time", clock)
    killed = subprocess.Popen(["true"])
    killed.wait()
    status = JobStatus(state=state, updated_at=NOW, started_at=NOW, host=socket.gethostname(), process_id=killed.pid)
    write_status(made.warehouse, replace(status, is_on_cluster=is_on_cluster))
    with without_destinations() as destinations:
        rebuild_checkpoint(made, discards_checkpoint=False)
    destinations.assert_called_once()
    assert sum(slept) == pytest.approx(waited)
