"""A disk that is short of room is said before it is full, and then nothing is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conf.settings import Settings
from status import disk_room
from status.alerts import Alerts
from status.disk_room import DiskRoom, is_of_full_disk


def room(folder: Path, least: int, alerts: Alerts, **sections: Any) -> DiskRoom:
    return DiskRoom(
        Settings.model_validate(
            {
                "warehouse": f"file:{folder}/not/made/yet",
                "checkpoint": f"file:{folder}",
                "ingest": {"min_free_bytes": least},
                **sections,
            }
        ),
        alerts,
    )


@pytest.fixture(autouse=True)
def at_each_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_room, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_with_room_nothing_is_said(tmp_path: Path) -> None:
    alerts = Alerts()
    assert room(tmp_path, free(tmp_path) // 4, alerts).why_short() is None
    assert alerts.current() == []
    assert room(tmp_path, 0, alerts).why_short() is None


def test_before_it_is_full_it_is_a_trouble(tmp_path: Path) -> None:
    alerts = Alerts()
    assert room(tmp_path, int(free(tmp_path) / 1.5), alerts).why_short() is None
    assert {(t.kind, t.name) for t in alerts.current()} == {
        ("disk", str(tmp_path)),
        ("disk", f"{tmp_path}/not/made/yet"),
    }
    assert "the source topics are not read" in alerts.current()[0].text


def test_then_nothing_is_read_until_there_is_room(tmp_path: Path) -> None:
    alerts = Alerts()
    made = room(tmp_path, 4 * free(tmp_path), alerts)
    assert made.why_short() == f"the disk of {tmp_path} is full"
    assert "until there is room" in alerts.current()[0].text
    made._least = 0
    assert made.why_short() is None
    assert alerts.current() == []


def test_object_storage_has_no_disk(tmp_path: Path) -> None:
    alerts = Alerts()
    made = room(tmp_path, 4 * free(tmp_path), alerts, warehouse="s3://bucket/warehouse")
    made.why_short()
    assert [t.name for t in alerts.current()] == [str(tmp_path)]


def test_a_disk_of_troubles_that_is_full_itself_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "troubles.tmp").mkdir()  # nothing can be written there
    made = room(tmp_path, 4 * free(tmp_path), Alerts(tmp_path / "troubles.json"))
    assert made.why_short() is not None


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("java.io.IOException: No space left on device", True),
        ("Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)", True),
        ("[Errno 122] Disk quota exceeded", True),
        ("the broker is away", False),
    ],
)
def test_an_error_of_a_full_disk_is_told_by_its_words(text: str, is_full: bool) -> None:
    assert is_of_full_disk(text) is is_full
