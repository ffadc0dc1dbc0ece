"""What a start says of folders that can't be made, and how it waits for a broker."""

from __future__ import annotations

import threading
from pathlib import Path

import pulsar
import pytest

from conf.files import FolderError
from conf.settings import Settings
from status.alerts import NO_BROKER, Alerts
from streaming import crash_recovery
from streaming.checkpoint.checkpoint import Checkpoint, checkpoint_lock
from streaming.crash_recovery import GivenUpError, Restarts, begin, wait_for_broker
from streaming.start_checks import StartError
from warehouse.delta.tables import Tables


def test_a_folder_that_can_not_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/checkpoint can't be made .*`checkpoint`"):
        checkpoint_lock(tmp_path / "file/checkpoint")
    settings = Settings(warehouse=f"file:{tmp_path}/file/warehouse", checkpoint=f"file:{tmp_path}/checkpoint")
    with pytest.raises(StartError, match=r"can't be made in .*file/warehouse .*`warehouse`"):
        begin(settings, Tables(settings.warehouse), Checkpoint(tmp_path / "checkpoint"))


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
