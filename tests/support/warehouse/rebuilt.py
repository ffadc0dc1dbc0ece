"""Rebuilds without a broker, and what they have prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow as pa

from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import Settings
from streaming.batch_schema import InputKind, fields_of
from streaming.checkpoint.prepared import PreparedState
from tracker.rebuilt import Rebuilt
from warehouse.delta.tables import Tables


def of_one_shard(folder: Path, topic: str, subscriptions: Sequence[str | dict[str, object]]) -> Settings:
    """Settings of a job of one shard, with its warehouse and checkpoint in a folder.

    Args:
        subscriptions: of the topic, by their names, or as in the settings.
    """
    named = [{"name": one} if isinstance(one, str) else one for one in subscriptions]
    return Settings(
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        tracker={"shards": 1},  # type: ignore[arg-type]
        routes=[{"source": topic, "subscriptions": named}],  # type: ignore[arg-type]
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
    """What all shards together begin with; what several shards have is there once."""
    inputs = found.inputs(found.shards)
    tables = {kind: _together([rows[kind] for _, rows in inputs]) for kind in inputs[0][1]}
    of_first: Rebuilt = InputKind.REBUILT.body.read(InputKind.REBUILT.body.pack(inputs[0][0]))
    return replace(
        of_first,
        sealed=sum(meta["sealed"] for meta, _ in inputs),
        unwanted=sum(meta["unwanted"] for meta, _ in inputs),
        **fields_of(Rebuilt, tables),
    )


def _together(of_shards: Sequence[pa.Table]) -> pa.Table:
    """The rows of all shards, without those that an earlier shard has, too."""
    found, known = [], set[str]()
    for rows in of_shards:
        texts = [repr(row) for row in rows.to_pylist()]
        found.append(rows.filter(pa.array([text not in known for text in texts], pa.bool_())))
        known.update(texts)
    return pa.concat_tables(found)
