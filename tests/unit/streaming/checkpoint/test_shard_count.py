"""`tracker.shards: auto` is the number that a checkpoint has, or for a new one a shard for two cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.settings import Settings
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import PreparedState
from streaming.checkpoint.shard_count import with_shard_count


def settings(folder: Path, master: str = "local[6]", shards: int | str = "auto") -> Settings:
    return Settings.model_validate(
        {"checkpoint": f"file:{folder}", "spark": {"master": master}, "tracker": {"shards": shards}}
    )


@pytest.mark.parametrize(
    ("master", "n"),
    [
        ("local", 1),
        ("local[1]", 1),
        ("local[3]", 1),
        ("local[16]", 8),
        ("local[*]", max(1, (os.cpu_count() or 1) // 2)),
        ("spark://a:7077", 2),
    ],
)
def test_a_new_checkpoint_has_a_shard_for_two_cores(tmp_path: Path, master: str, n: int) -> None:
    given = settings(tmp_path, master)
    found = with_shard_count(given)
    assert found.tracker.shard_count == n
    assert given.tracker.shards == "auto"
    assert Settings.model_validate_json(found.model_dump_json()).tracker.shards == n


def test_a_checkpoint_keeps_its_number_until_it_is_made_anew(tmp_path: Path) -> None:
    Checkpoint(tmp_path).shards = 5
    assert with_shard_count(settings(tmp_path)).tracker.shards == 5
    assert with_shard_count(settings(tmp_path), is_new=True).tracker.shards == 3


def test_a_rebuilt_checkpoint_has_the_number_that_the_rebuild_made(tmp_path: Path) -> None:
    PreparedState(tmp_path).complete(Offset(tick=3), {"sealed": [0] * 4, "paused": {}})
    assert with_shard_count(settings(tmp_path)).tracker.shards == 4


def test_a_number_in_the_settings_stays(tmp_path: Path) -> None:
    Checkpoint(tmp_path).shards = 5
    given = settings(tmp_path, shards=2)
    assert with_shard_count(given) is given
    assert with_shard_count(given, is_new=True) is given


def test_settings_that_leave_it_open_are_dumped_as_they_are(tmp_path: Path) -> None:
    given = settings(tmp_path)
    assert Settings.model_validate_json(given.model_dump_json()) == given
