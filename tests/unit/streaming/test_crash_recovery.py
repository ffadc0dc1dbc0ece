"""What a start says of folders that can't be made, and how it waits for a broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pulsar
import pytest

from conf.files import FolderError
from conf.settings import Settings
from jobs.commands.run import _update_routes
from jobs.options import Output
from jobs.reporter import Reporter
from status.alerts import NO_BROKER, Alerts
from status.status_writer import StatusWriter
from streaming import crash_recovery
from streaming.checkpoint.checkpoint import VERSION, Checkpoint, CheckpointError, checkpoint_lock
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import FOLDER, PreparedState, last_routes
from streaming.crash_recovery import GivenUpError, Restarts, begin, check_checkpoint, wait_for_broker
from streaming.start_checks import StartError
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables


def test_a_folder_that_can_not_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/checkpoint can't be made .*`checkpoint`"):
        checkpoint_lock(tmp_path / "file/checkpoint")
    settings = Settings(warehouse=f"file:{tmp_path}/file/warehouse", checkpoint=f"file:{tmp_path}/checkpoint")
    with pytest.raises(StartError, match=r"can't be made in .*file/warehouse .*`warehouse`"):
        begin(settings, Tables(settings.warehouse), Checkpoint(tmp_path / "checkpoint"))


def test_the_version_of_a_checkpoint_is_looked_at_before_a_prepared_offset_that_only_its_program_can_read(
    tmp_path: Path,
) -> None:
    settings = Settings(checkpoint=f"file:{tmp_path}/checkpoint", warehouse=f"file:{tmp_path}/warehouse")
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.write_version()
    PreparedState(checkpoint.folder).complete(
        Offset(tick=3), {"sealed": [0] * settings.tracker.shard_count, "paused": {}}
    )
    check_checkpoint(settings, checkpoint)

    meta = tmp_path / "checkpoint" / FOLDER / "meta.json"
    content = json.loads(meta.read_text())
    content["offset"]["of_a_later_program"] = 1
    meta.write_text(json.dumps(content))
    (tmp_path / "checkpoint/query/version").write_text(str(VERSION + 1))
    starts: list[Callable[[], object]] = [
        lambda: check_checkpoint(settings, checkpoint),
        lambda: begin(settings, Tables(settings.warehouse), checkpoint),
        lambda: _update_routes(settings, Reporter(Output.TEXT, 0, 1), StatusWriter(settings.warehouse, 1, list)),
    ]
    for start in starts:
        with pytest.raises(CheckpointError, match="a newer delaylake has written the checkpoint"):
            start()
    with pytest.raises(CheckpointError, match=r"the prepared state in .* is damaged"):
        last_routes(checkpoint.folder)


@pytest.mark.slow
def test_what_an_older_job_commits_until_it_is_overtaken_is_seen_by_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from a copy of the checkpoint. The tables would take the rows of this job's tick for its rows."""
    settings = Settings(checkpoint=f"file:{tmp_path}/checkpoint", warehouse=f"file:{tmp_path}/warehouse")
    checkpoint, older = Checkpoint(tmp_path / "checkpoint"), Tables(settings.warehouse)
    begin(settings, older, checkpoint)
    offsets = tmp_path / "checkpoint/query/offsets"
    offsets.mkdir()
    (offsets / "0").write_text(f"v1\n{{}}\n{json.dumps(Offset(tick=5).to_json())}")
    older.note("rejects", {checkpoint.app_id: 5})
    takes_over = Tables.take_over

    def commits_first(tables: Tables, epoch: int) -> None:
        older.note("rejects", {checkpoint.app_id: 6})
        takes_over(tables, epoch)

    with monkeypatch.context() as patched:
        patched.setattr(Tables, "take_over", commits_first)
        with pytest.raises(CheckpointError, match="it ends with tick 5, rejects with 6"):
            begin(settings, Tables(settings.warehouse), checkpoint)
    with pytest.raises(CheckpointError, match="it ends with tick 5, rejects with 6"):
        begin(settings, Tables(settings.warehouse), checkpoint)
    with pytest.raises(FencedError):
        older.note("rejects", {checkpoint.app_id: 7})


class Client:
    """Answers with one thing after the other; an exception is raised."""

    def __init__(self, answers: list[object]) -> None:
        self.answers = answers

    def get_topic_partitions(self, topic: str) -> object:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        pass


@pytest.mark.parametrize("last", [["t"], pulsar.AuthorizationError()])
def test_a_start_waits_for_the_broker_and_says_so_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, last: object
) -> None:
    alerts, told = Alerts(), []
    client = Client([pulsar.Timeout(), pulsar.ConnectError(), last])
    monkeypatch.setattr(crash_recovery, "connect", lambda settings, **options: client)

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            told.append([(trouble.kind, trouble.name) for trouble in alerts.current()])
            return False

    settings = Settings()
    wait_for_broker(settings, alerts, Stopping())
    assert told == [[(NO_BROKER, settings.pulsar.service_url)]] * 2
    assert (client.answers, alerts.current()) == ([], [])


def test_a_start_that_is_told_to_stop_does_not_wait_for_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping, alerts = threading.Event(), Alerts()

    class Stops(Client):
        def get_topic_partitions(self, topic: str) -> object:
            stopping.set()
            return super().get_topic_partitions(topic)

    client = Stops([pulsar.Timeout()])
    monkeypatch.setattr(crash_recovery, "connect", lambda settings, **options: client)
    settings = Settings()
    wait_for_broker(settings, alerts, stopping)
    assert client.answers == []
    assert [trouble.name for trouble in alerts.current()] == [settings.pulsar.service_url]


def test_a_query_that_fails_starts_again_later_and_later_until_it_has_failed_ten_times_in_a_row() -> None:
    restarts = Restarts()
    assert [restarts.pause_after("why", 5, is_disk_full=False) for _ in range(3)] == [1, 2, 3]
    assert restarts.pause_after("why", 61, is_disk_full=False) == 1, "a good run ends the row"
    assert [restarts.pause_after("full", 5, is_disk_full=True) for _ in range(20)] == [5] * 20, "it counts as none"
    assert [restarts.pause_after("why", 5, is_disk_full=False) for _ in range(8)] == [2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(GivenUpError, match="the query failed 10 times in a row: why"):
        restarts.pause_after("why", 5, is_disk_full=False)
