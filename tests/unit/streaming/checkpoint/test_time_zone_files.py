"""A batch that is run again by a program with newer time zones says what it said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf import time_zones
from conf.settings import TrackerSettings
from conf.time_zones import TIME_ZONE_DATA_VERSION, TimeZones
from streaming.batch_schema import InputKind, OutputKind, input_rows
from streaming.checkpoint import time_zone_files
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.time_zone_files import TimeZoneFiles
from streaming.operator.processor import Operator
from tests.support.tracker.messages import TOPIC
from tests.support.tracker.recurring import recurring
from tests.support.tracker.time_zones import VERSION, other_version
from tracker.messages import MESSAGES, concat
from tracker.packing import unpack
from warehouse.routes.known_routes import KnownRoute, KnownRoutes, KnownSubscription

HOUR = 3_600_000


@pytest.fixture
def upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The program after an upgrade of `tzdata`: in Berlin it is five hours more than UTC."""
    newer = TimeZones.read(other_version(tmp_path / "newer", 5 * 3600))
    monkeypatch.setattr(time_zones, "packaged", lambda: newer)
    monkeypatch.setattr(time_zone_files, "packaged", lambda: newer)
    monkeypatch.setattr(time_zone_files, "TIME_ZONE_DATA_VERSION", VERSION)
    return monkeypatch


def following(files: TimeZoneFiles, offset: Offset) -> int:
    """Hands out an occurrence in the batch of an offset; returns the UTC hour of the one after it, noon in Berlin."""
    state: dict[Any, Any] = {}
    of_spark = SimpleNamespace(getValue=state.get, updateValue=state.__setitem__, removeKey=state.pop)
    operator = Operator(of_spark, [0], TrackerSettings().model_dump_json(), "file:/nowhere")

    def sealed(offset: Offset, messages: pa.Table) -> dict[int, int]:
        parts = [
            *input_rows(InputKind.TICK, offset.to_json(), [0]),
            *input_rows(InputKind.MESSAGES, messages, [0]),
            *(row for packed in files.other(offset) for row in input_rows(InputKind.TIME_ZONES, packed, [0])),
        ]
        outputs = operator.apply(0, iter([SimpleNamespace(kind=kind, body=body) for _, kind, body in parts]))
        rows = concat([unpack(output.body) for output in outputs if output.kind == OutputKind.BUCKET]).to_pylist()
        return {row["occurrence"]: row["deliver_at"] for row in rows}

    sealed(offset, recurring(0, 0, "0 12 * * *", timeZone="Europe/Berlin"))
    return sealed(replace(offset, tick=2, seal_epoch=2), MESSAGES.empty_table())[2] // HOUR


def a_batch(version: str = TIME_ZONE_DATA_VERSION) -> Offset:
    routes = KnownRoutes({TOPIC: KnownRoute((KnownSubscription("a", "shared", f"{TOPIC}-a"),))}).to_json()
    return Offset(
        tick=1, now=1, cutoff=1, seal_epoch=1, load_horizon=5, near_until=5, run_id="one", routes=routes,
        time_zone_data=version,
    )  # fmt: skip


@pytest.mark.slow
def test_it_is_computed_by_those_it_was_planned_with_and_the_next_one_by_the_newer(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files = TimeZoneFiles(tmp_path / "time_zones")
    files.keep("")
    assert following(files, a_batch()) == 11
    request.getfixturevalue("upgraded")
    assert following(files, a_batch()) == 11
    files.keep(TIME_ZONE_DATA_VERSION)
    assert following(files, a_batch(VERSION)) == 7
    assert following(files, a_batch()) == 11


@pytest.mark.slow
def test_there_are_those_of_the_last_batch_and_of_the_program_and_no_others(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "time_zones"
    files = TimeZoneFiles(folder)
    files.keep("")
    (folder / "2001a").write_bytes(b"")
    [kept] = [file for file in folder.iterdir() if file.name != "2001a"]
    written = kept.stat().st_mtime_ns
    request.getfixturevalue("upgraded")
    files.keep(TIME_ZONE_DATA_VERSION)
    assert {file.name for file in folder.iterdir()} == {TIME_ZONE_DATA_VERSION, VERSION}
    assert kept.stat().st_mtime_ns == written
    files.keep(VERSION)
    assert {file.name for file in folder.iterdir()} == {VERSION}


def test_where_they_were_not_kept_the_program_s_are_used_and_the_log_says_so(
    tmp_path: Path, upgraded: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert following(TimeZoneFiles(tmp_path / "none"), a_batch()) == 7
    assert f"those of {TIME_ZONE_DATA_VERSION} were not kept" in caplog.text
