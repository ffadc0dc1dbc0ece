"""Rebuilds without a broker, and what they have prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pyarrow as pa

from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import Settings
from streaming.batch_schema import InputKind
from streaming.checkpoint.prepared import PreparedState
from tracker.rebuilt import Rebuilt
from warehouse.delta.tables import Tables


def of_one_shard(folder: Path, topic: str, names: Sequence[str]) -> Settings:
    """Settings of a job of one shard, with its warehouse and checkpoint in a folder."""
    return Settings(
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        tracker={"shards": 1},  # type: ignore[arg-type]
        routes=[{"source": topic, "subscriptions": [{"name": name} for name in names]}],  # type: ignore[arg-type]
    )


@contextmanager
def without_destinations() -> Iterator[mock.MagicMock]:
    """While the block runs, a rebuild reads no destinations and rejects topics, for which it needs a broker."""
    of_rebuild = "checkpoint_from_tables.rebuild"
    with (
        mock.patch(f"{of_rebuild}.rebuild.write_missing_deliveries", return_value=0) as patched,
        mock.patch(f"{of_rebuild}.rejected._sent", return_value=()),
    ):
        yield patched


def prepared(settings: Settings, folder: Path, now: int) -> PreparedState:
    """Rebuilds a checkpoint in a folder, without destinations."""
    with without_destinations():
        rebuild(settings, Tables(settings.warehouse), folder, now=now)
    return PreparedState(folder)


def of_all_shards(found: PreparedState) -> Rebuilt:
    """What all shards together begin with."""
    inputs = found.inputs(found.shards)
    meta = inputs[0][0]
    tables = {kind: pa.concat_tables(of_shard[kind] for _, of_shard in inputs) for kind in inputs[0][1]}
    return Rebuilt(
        sealed=sum(of_shard["sealed"] for of_shard, _ in inputs),
        unwanted=sum(of_shard["unwanted"] for of_shard, _ in inputs),
        cancelled=tables[InputKind.REBUILT_CANCELLED],
        delivered=tables[InputKind.REBUILT_DELIVERED],
        rejected=tables[InputKind.REBUILT_REJECTED],
        request_ids=meta["request_ids"],
        message_requests=meta["message_requests"],
        moved=tables[InputKind.REBUILT_MOVED],
        paused=meta["paused"],
        waiting=tables[InputKind.REBUILT_WAITING],
        released=meta["released"],
        occurrences=tables[InputKind.REBUILT_OCCURRENCES],
        keys=tables[InputKind.REBUILT_KEYS],
    )
