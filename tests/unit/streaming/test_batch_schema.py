"""What passes between source, operator and sinks: one declaration for both sides."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streaming.batch_schema import (
    RELEASE_KINDS,
    BatchOutput,
    InputKind,
    InputRow,
    OutputKind,
    OutputRow,
    Rows,
    ShardStatus,
    command_copies,
    fields_of,
    input_rows,
    output_rows,
    read_input,
    shard_keys,
    status_row,
)
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import FOLDER, PreparedState
from streaming.operator.processor import NoTickError, Operator
from streaming.operator.schemas import INPUT_SCHEMA, OUTPUT_SCHEMA
from streaming.source.reader import to_batches
from tests.support.tracker.messages import TOPIC, batches, command, commands, messages
from tracker.commands.kinds import REPEAT
from tracker.in_flight import Release
from tracker.message_state.parking import Round
from tracker.messages import MESSAGES, concat, typed, with_columns
from tracker.properties import key_hash
from tracker.rebuilt import NOT_TO_DELIVER, Rebuilt
from tracker.schemas import COMMAND_ROWS, KNOWN, PauseChange
from tracker.sharding import shard_of, shards_of
from tracker.tick import Effects, TickInput

KEYS = shard_keys(3)


def read(rows: list[InputRow], shard: int) -> dict[InputKind, Any]:
    return read_input(SimpleNamespace(kind=kind, body=body) for key, kind, body in rows if key == KEYS[shard])


def test_the_values_of_kinds_are_their_names() -> None:
    for kind in (*InputKind, *OutputKind):
        assert kind.value == kind.name.lower()


@pytest.mark.parametrize("taker", [TickInput, Rebuilt])
def test_each_table_that_a_shard_takes_is_declared_with_its_columns(taker: type) -> None:
    empty = taker()
    kinds = [kind for kind in InputKind if kind.taker is taker]
    declared = {kind.field: kind.body.schema for kind in kinds if isinstance(kind.body, Rows)}
    # The containment of failures makes this one itself.
    tables = {f.name for f in fields(taker) if isinstance(getattr(empty, f.name), pa.Table)} - {"failed"}
    assert declared.keys() == tables
    assert {name: getattr(empty, name).schema for name in tables} == declared
    assert {kind.field for kind in kinds} <= {f.name for f in fields(taker)}


def test_each_table_of_a_ticks_effects_is_declared_with_its_columns() -> None:
    effects = Effects()
    tables = {f.name: getattr(effects, f.name).schema for f in fields(Effects)
              if isinstance(getattr(effects, f.name), pa.Table)}  # fmt: skip
    own = {kind.field: kind.schema for kind in OutputKind if kind.field not in ("", "releases")}
    assert own == tables


def test_sparks_columns_are_those_of_the_rows() -> None:
    [batch] = to_batches([(5, InputKind.TICK.value, b"{}")])
    assert batch.schema.names == INPUT_SCHEMA.names
    assert [pa.types.is_int32(batch.schema.types[0]), *map(str, batch.schema.types[1:])] == [True, "string", "binary"]
    assert OUTPUT_SCHEMA.names == ["shard", "kind", "tick", "body"]


def keyed(rows: pa.Table, keys: list[str | None]) -> pa.Table:
    return with_columns(rows, schedule_key=pa.array(keys, pa.string()))


def test_content_comes_to_the_shards_that_its_routing_names_and_to_no_other() -> None:
    rows = keyed(messages([(64 * i, 0, 0) for i in range(40)]), [None if i % 2 else f"k{i}" for i in range(40)])
    homes = shard_of(rows["ledger_id"].to_numpy(), rows["entry_id"].to_numpy(), 3)
    owners = shards_of(rows, 3)
    content = input_rows(InputKind.MESSAGES, rows, KEYS)
    content += input_rows(InputKind.NOTES, rows.select(InputKind.NOTES.body.schema.names), KEYS)  # type: ignore[union-attr]
    content += input_rows(InputKind.ROUNDS, {"t": {"a": Round(5, 1, 2)}}, KEYS)
    content += input_rows(InputKind.REBUILT_CANCELLED, {1: NOT_TO_DELIVER.empty_table()}, KEYS)
    for shard in range(3):
        received = read(content, shard)
        own, noted = (set(received[kind]["ledger_id"].to_pylist()) for kind in (InputKind.MESSAGES, InputKind.NOTES))
        assert own == {row["ledger_id"] for row, owner in zip(rows.to_pylist(), owners, strict=True) if owner == shard}
        elsewhere = zip(rows.to_pylist(), owners, homes, strict=True)
        assert noted == {row["ledger_id"] for row, owner, home in elsewhere if home == shard != owner}
        assert received[InputKind.ROUNDS] == {"t": {"a": Round(5, 1, 2)}}
        assert InputKind.REBUILT_CANCELLED not in received, "no rows need no body"
    assert input_rows(InputKind.KNOWN_MESSAGES, KNOWN.empty_table(), KEYS) == []


def test_large_content_comes_in_several_rows_and_is_one_table_again() -> None:
    rows = with_columns(messages([(1, i, 0) for i in range(3)]), payload=pa.array([b"x" * (5 << 20)] * 3, pa.binary()))
    content = input_rows(InputKind.SEGMENT, rows, [7])
    assert len(content) > 1
    received = read_input(SimpleNamespace(kind=kind, body=body) for _, kind, body in content)
    assert received[InputKind.SEGMENT]["entry_id"].to_pylist() == [0, 1, 2]


def test_fields_are_those_of_the_batch_and_the_others_keep_their_defaults() -> None:
    changes = [PauseChange("id", "t", 1, is_paused=True)]
    content = input_rows(InputKind.PAUSE_CHANGES, changes, KEYS) + input_rows(InputKind.TICK, {}, KEYS)
    found = TickInput(**fields_of(TickInput, read(content, 2)))
    assert list(found.pause_changes) == changes
    assert (found.commands.schema, found.commands.num_rows) == (COMMAND_ROWS, 0)


@pytest.mark.parametrize("turn", [1, -1])
def test_of_the_rounds_of_two_tasks_those_that_go_further_count_in_whichever_order_they_come(turn: int) -> None:
    one = {"t": {"a": Round(5, 1), "b": Round(9, 1)}}
    other = {"t": {"a": Round(), "b": Round(3, 7)}, "u": {"c": Round(0, 4)}}
    content = [row for rounds in (one, other)[::turn] for row in input_rows(InputKind.ROUNDS, rounds, KEYS)]
    assert read(content, 0)[InputKind.ROUNDS] == {"t": {"a": Round(), "b": Round(9, 1)}, "u": {"c": Round(0, 4)}}


def test_a_batch_without_a_tick_is_refused() -> None:
    operator = Operator(None, KEYS, "{}", "file:/nowhere")
    with pytest.raises(NoTickError, match="a batch without a tick for the shard of key 0"):
        list(operator.apply(0, iter([])))


def test_a_prepared_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    row = {"subscription": 0, "ledger_id": 7, "entry_id": 3, "batch_index": -1, "until": 9}
    pq.write_table(pa.Table.from_pylist([row], schema=NOT_TO_DELIVER), folder / "rebuilt_taken.parquet")
    meta = {"sealed": [1], "unwanted": [0], "request_ids": ["id"], "paused": {}, "released": 5}
    (folder / "meta.json").write_text(json.dumps({"offset": Offset(tick=3).to_json(), **meta}))
    [(values, tables)] = PreparedState(tmp_path).inputs(1)
    content = input_rows(InputKind.REBUILT, {0: values}, [0])
    for kind, rows in tables.items():
        content += input_rows(kind, {0: rows}, [0])
    received = read_input(SimpleNamespace(kind=kind, body=body) for _, kind, body in content)
    found = received[InputKind.REBUILT]
    assert (found.sealed, found.request_ids, found.shaped_until) == (1, {"id": 0}, {})
    assert fields_of(Rebuilt, received)["cancelled"].to_pylist() == [row]


def test_the_sink_reads_what_shards_put_out() -> None:
    rows = messages([(1, i, 0) for i in range(2)])
    status = {
        "tick": 9, "now": 1, "cutoff": 2, "run_id": "r", "unwritable": {}, "changed": {}, "next_due": 3,
        "counts": {"taken": 2}, "shaped_until": {}, "drained": {"t": {"a": (1, True)}}, "waiting": {}, "paused": {},
        "resuming": {"t": {"b": [3, 7, 1]}},
        "failures": [("t", "m", "why")],
    }  # fmt: skip
    output: list[OutputRow] = []
    for shard in (1, 0):
        releases = [Release(tick=8, kind=kind, rows=rows) for kind in RELEASE_KINDS]
        output += output_rows(shard, 9, Effects(releases=releases, bucket=rows))
        output.append(status_row(ShardStatus(shard=shard, **status)))  # type: ignore[arg-type]
    found = BatchOutput(pa.table(dict(zip(OUTPUT_SCHEMA.names, map(list, zip(*output, strict=True)), strict=True))))
    assert [one.shard for one in found.statuses()] == [0, 1]
    assert [tuple(failure) for failure in found.statuses()[0].failures] == [("t", "m", "why")]
    assert [(shard, tick, kind) for shard, tick, kind, _ in found.releases()] == [
        (shard, 8, kind) for kind in range(4) for shard in (1, 0)
    ]
    assert found.rows(OutputKind.BUCKET).equals(concat([rows, rows]))
    assert found.rows(OutputKind.REJECTS).schema == MESSAGES


def copied_to(known: pa.Table, kind: str | None = None) -> set[int]:
    """The shards to which a command goes that names an entry of three messages, the second one with a key."""
    rows = command_copies(commands([command("r", 1, 0, kind=kind)]), typed(known, KNOWN), [TOPIC], KEYS)
    return {KEYS.index(key) for key, _, _ in rows}


def test_a_command_goes_to_all_shards_until_the_tables_have_each_message_of_its_entry() -> None:
    rows = batches([(1, 0, 0, 3, 5_000), (1, 0, 1, 3, 5_000), (1, 0, 2, 3, 5_000)])
    home = int(shard_of(np.array([1]), np.array([0]), 3)[0])
    others = {0, 1, 2} - {home}
    key = next(key for key in map(str, range(50)) if key_hash(TOPIC, key)[1] % 3 != home)
    rows = with_columns(rows, schedule_key=pa.array([None, key, None]))
    assert copied_to(rows.slice(0, 0)) == others
    assert copied_to(rows) == {key_hash(TOPIC, key)[1] % 3}
    # The second one was dispatched before it was sealed, or is in the bucket that the key's shard has not sealed yet.
    assert copied_to(rows.take([0, 2])) == others


def test_a_command_that_comes_again_at_once_goes_where_the_first_one_goes() -> None:
    home = int(shard_of(np.array([1]), np.array([0]), 3)[0])
    key = next(key for key in map(str, range(50)) if key_hash(TOPIC, key)[1] % 3 != home)
    rows = with_columns(batches([(1, 0, -1, 1, 5_000)]), schedule_key=pa.array([key]))
    assert copied_to(rows) == copied_to(rows, REPEAT) == {key_hash(TOPIC, key)[1] % 3}
