"""What a row of `outcomes` did to what is pending: by its effect, or, in rows of earlier versions, by its operation."""

from __future__ import annotations

import duckdb
import pyarrow as pa

from tracker.commands.kinds import OPERATIONS, Effect
from tracker.wire.delaylake_pb2 import Result
from warehouse.pending import EFFECT, effects_of

RESULTS = ("APPLIED", "SUPERSEDED", "EXPIRED")


def outcomes() -> pa.Table:
    """A row for each operation, and one that is none, and each result; without an effect."""
    operations = [*(kind.upper() for kind in OPERATIONS), "SENT_BACK"]
    rows = [{"operation": o, "result": r} for o in operations for r, _ in Result.items()]
    return pa.Table.from_pylist(rows)


def test_only_what_was_applied_has_an_effect() -> None:
    rows = outcomes()
    for row, effect in zip(rows.to_pylist(), effects_of(rows).to_pylist(), strict=True):
        operation = OPERATIONS.get(row["operation"].lower())
        assert effect == (operation.effect if operation and row["result"] in RESULTS else None), row


def test_sql_and_columns_agree_with_and_without_the_column() -> None:
    rows = outcomes()
    own = pa.array([Effect.MOVE if i % 3 == 0 else None for i in range(rows.num_rows)], pa.string())
    for column in (pa.nulls(rows.num_rows, pa.string()), own):
        of = rows.append_column("effect", column)
        with duckdb.connect() as connection:
            connection.register("outcomes", of)
            by_sql = connection.sql(f"SELECT {EFFECT} FROM outcomes").fetchall()
        assert [effect for (effect,) in by_sql] == effects_of(of).to_pylist()


def test_each_operation_has_an_effect_and_a_path() -> None:
    assert {operation.effect for operation in OPERATIONS.values()} == set(Effect)
    for operation in OPERATIONS.values():
        assert operation.path
        assert operation.done
