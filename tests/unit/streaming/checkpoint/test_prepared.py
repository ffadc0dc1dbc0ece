"""Which shard gets which rows of a prepared state."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streaming.batch_schema import InputKind
from streaming.checkpoint.checkpoint import CheckpointError
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import FOLDER, PreparedState
from tests.support.tracker.messages import TOPIC
from tracker.messages import BoolArray, int64, typed
from tracker.properties import key_hash
from tracker.rebuilt import LIVE_KEYS, NOT_TO_DELIVER
from tracker.sharding import shard_of

SHARDS = 3
ENTRIES = [0, 64, 128, 1_000, 1_064]


def prepare(folder: Path, keyed: list[str]) -> PreparedState:
    """Prepares a state of delivered messages; the entries from 1,000 on may come again."""
    ids = {"ledger_id": pa.array([7] * len(ENTRIES)), "entry_id": pa.array(ENTRIES)}
    keys = {"topic": pa.array([TOPIC] * len(ENTRIES)), "schedule_key": pa.array(map(str, ENTRIES))}

    def may_come_again(rows: pa.Table) -> BoolArray:
        return int64(rows, "entry_id") >= 1_000

    rows = {
        InputKind.REBUILT_DELIVERED: typed(ids, NOT_TO_DELIVER),
        InputKind.REBUILT_KEYS: typed(ids | keys, LIVE_KEYS),
    }
    found = PreparedState(folder)
    found.write_rows(rows, may_come_again)
    found.complete(Offset(keyed=keyed), {"sealed": [5, 6, 7], "unwanted": [0, 1, 2]})
    return found


def entries(found: PreparedState, kind: InputKind) -> list[list[int]]:
    return [tables[kind]["entry_id"].to_pylist() for _, tables in found.inputs(SHARDS)]


def homes() -> list[int]:
    homes: list[int] = shard_of(np.full(len(ENTRIES), 7), np.array(ENTRIES), SHARDS).tolist()
    return homes


def test_what_may_come_again_goes_to_each_shard_and_the_rest_to_the_home_of_its_entry(tmp_path: Path) -> None:
    found = prepare(tmp_path, [])
    assert entries(found, InputKind.REBUILT_DELIVERED) == [
        [entry for entry, home in zip(ENTRIES, homes(), strict=True) if entry >= 1_000 or home == shard]
        for shard in range(SHARDS)
    ]
    assert [(meta["sealed"], meta["unwanted"]) for meta, _ in found.inputs(SHARDS)] == [(5, 0), (6, 1), (7, 2)]


@pytest.mark.parametrize("keyed", [[], [TOPIC]])
def test_keys_go_to_their_shard_and_where_a_topic_has_had_some_all_else_goes_to_each(
    tmp_path: Path, keyed: list[str]
) -> None:
    found = prepare(tmp_path, keyed)
    assert entries(found, InputKind.REBUILT_KEYS) == [
        [entry for entry in ENTRIES if key_hash(TOPIC, str(entry))[1] % SHARDS == shard] for shard in range(SHARDS)
    ]
    if keyed:
        assert entries(found, InputKind.REBUILT_DELIVERED) == [ENTRIES] * SHARDS


def test_of_a_state_that_an_earlier_version_prepared_each_row_goes_to_the_home_of_its_entry(tmp_path: Path) -> None:
    found = prepare(tmp_path, [])
    file = tmp_path / FOLDER / f"{InputKind.REBUILT_DELIVERED}.parquet"
    pq.write_table(typed(pq.read_table(file), NOT_TO_DELIVER), file)
    assert entries(found, InputKind.REBUILT_DELIVERED) == [
        [entry for entry, home in zip(ENTRIES, homes(), strict=True) if home == shard] for shard in range(SHARDS)
    ]


def test_what_somebody_removes_while_it_is_made_is_not_taken_for_whole(tmp_path: Path) -> None:
    found = PreparedState(tmp_path)
    ids = {"ledger_id": pa.array([7]), "entry_id": pa.array([1])}
    found.write_rows({InputKind.REBUILT_DELIVERED: typed(ids, NOT_TO_DELIVER)}, lambda rows: np.zeros(1, np.bool_))
    shutil.rmtree(tmp_path / "query")
    with pytest.raises(CheckpointError, match="was removed while it was made: run `delaylake rebuild` again"):
        found.complete(Offset(), {"sealed": [1], "unwanted": [0]})
    assert not found.is_there
