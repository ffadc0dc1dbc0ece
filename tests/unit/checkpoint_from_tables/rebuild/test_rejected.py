"""What a rebuild knows of messages that were rejected, and come again from Pulsar."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from checkpoint_from_tables.rebuild import rejected
from checkpoint_from_tables.rebuild.rebuild import rebuild
from streaming.checkpoint.prepared import PreparedState
from tests.support.tracker.messages import TOPIC, batches, messages, tick_at
from tests.support.warehouse.rebuilt import of_all_shards, of_one_shard, without_destinations
from tracker.entry_log import entries_of
from tracker.messages import concat, position_texts, with_columns
from tracker.rebuilt import Rebuilt
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import to_rejects

pytestmark = pytest.mark.slow


def bad(rows: pa.Table, reason: str = "bad") -> pa.Table:
    return with_columns(rows, reason=pa.array([reason] * rows.num_rows))


def test_what_table_and_topic_have_is_not_rejected_again_and_what_the_table_alone_has_is(tmp_path: Path) -> None:
    settings = of_one_shard(tmp_path, TOPIC, ["a"])
    tables = Tables(settings.warehouse)
    tables.create()
    durable = bad(messages([(1, 0, 0)]))
    sent = bad(concat([messages([(1, 1, 0)]), batches([(1, 2, 0, 2, 0)])]))
    not_sent = bad(concat([batches([(1, 2, 1, 2, 0)]), messages([(1, 3, 0)])]))
    left_out = bad(messages([(1, 4, 0)]), "replicated from west")
    others = [
        bad(messages([(1, 5, 0)]), "not seen: expired"),
        bad(messages([(1, 6, 0)]), "not delivered to a: the client does not take it: MessageTooBig"),
        bad(messages([(9, 0, 0)], topic=f"{TOPIC}_control")),
    ]
    rows = concat([durable, sent, not_sent, left_out, *others])
    tables.append("rejects", to_rejects(rows, 1), {"test": 1})
    tables.append("entries", entries_of(durable), {"test": 1})
    of_topic = position_texts(concat([sent, durable])).to_pylist()
    with without_destinations(), mock.patch.object(rejected, "_sent", return_value=of_topic):
        rebuild(settings, tables, tmp_path / "checkpoint", now=1_000)
    left = tables.query("rejects", "SELECT position FROM rejects")["position"].to_pylist()
    assert sorted(left) == sorted(position_texts(concat([durable, sent, left_out, *others])).to_pylist())

    store, accepted = MemoryStore(), messages([(1, 7, 5)])

    def step(tick: int, rows: pa.Table, rebuilt: Rebuilt | None = None) -> Effects:
        tick_input = TickInput(messages=rows, rebuilt=rebuilt)
        return Shard(store, {TOPIC: ["a"]}, 1_000_000).apply(tick_at(tick, 10 + tick), tick_input)

    effects = step(
        1, concat([sent, not_sent, left_out, accepted]), of_all_shards(PreparedState(tmp_path / "checkpoint"))
    )
    again = sorted(position_texts(not_sent).to_pylist())
    assert sorted(position_texts(effects.rejects).to_pylist()) == again
    [release] = effects.releases
    assert sorted(position_texts(release.rows).to_pylist()) == sorted([*again, *position_texts(accepted).to_pylist()])
    later = step(2, bad(messages([(1, 8, 0)])))
    assert later.rejects["entry_id"].to_pylist() == [8], "new ones are rejected as ever"
