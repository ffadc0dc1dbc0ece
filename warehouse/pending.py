"""The rule by which a message is pending: as SQL over the tables, and on columns for rows in memory.

A row of `delayed_index` (operation DELAY) is pending for a subscription when

- it is for that subscription, or for all of the topic's (`subscription` is null),
- the message has no later row there: no MOVE has a higher sequence than the row,
- the last command that cancelled the message, or its whole entry, is not later than the last that restored it,
- it has not been delivered there: for a retry, with its `attempt`; for a recurring message, with the row's occurrence
  or a later one.

Commands name a message by its batch_index, or a whole entry, which may be one message, by -1. Ledger ids are unique in
a cluster, and no cluster has those of imported messages, so no two topics or partitions share a ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import OPERATIONS
from tracker.messages import BoolArray, Int64Array, as_int64, int64
from warehouse.named_queries import TRUE, NamedQueries, Sql, identifier, literal

_ENTRY = ("ledger_id", "entry_id")

_EFFECTS = {operation.kind.upper(): operation.effect for operation in OPERATIONS.values()}
_APPLIED = ("APPLIED", "SUPERSEDED", "EXPIRED")

SQL = NamedQueries(
    __file__,
    applied=_APPLIED,
    effect_of_operation=Sql(" ".join(f"WHEN {literal(name)} THEN {literal(to)}" for name, to in _EFFECTS.items())),
)

# SQL for the effect of a row of `outcomes`, and conditions for such a row: see the file.
EFFECT = SQL("effect")
IS_CANCEL = SQL("is_cancel")
IS_RESTORE = SQL("is_restore")
IS_SKIPPED_OCCURRENCE = SQL("is_skipped_occurrence")
IS_PAUSE_CHANGE = SQL("is_pause_change")

# SQL with a row for each subscription and message, or whole entry, that commands have named.
LAST_COMMANDS = SQL("last_commands")

# If a recurring message has no row for its next occurrence this long after the last one, it has ended. Before, it may
# recur so often (every few seconds) that its next occurrence gets no row.
NEXT_IS_THERE_MILLIS = 60_000


def effects_of(outcomes: pa.Table) -> pa.Array:
    """Returns the effects of rows of `outcomes`, as the SQL of EFFECT: strings, (rows,).

    Args:
        outcomes: columns result, as text, and operation; and effect, except of rows that are not written yet.
    """
    known, effects = pa.array(list(_EFFECTS)), pa.array([str(effect) for effect in _EFFECTS.values()])
    operation_effects = effects.take(pc.index_in(outcomes["operation"], known))
    is_applied = pc.is_in(outcomes["result"], pa.array(_APPLIED))
    found = pc.if_else(is_applied, operation_effects, pa.scalar(None, pa.string()))
    return pc.coalesce(outcomes["effect"], found) if "effect" in outcomes.column_names else found


def last_occurrences(condition: Sql = TRUE) -> Sql:
    """Returns SQL with a row for each subscription and recurring message: its last occurrence that is done.

    Args:
        condition: that a row of `deliveries` or of `outcomes` counts.
    """
    return SQL("last_occurrences", condition=condition)


def join_commands(
    commands: str,
    row: str,
    subscription: Sql | None = None,
    message: Sql | None = None,
    has_one: bool = True,
    has_whole: bool = True,
) -> Sql:
    """Returns SQL that joins a row with the commands for its message (as `one`) and for its whole entry (as `whole`).

    `last`, `is_cancelled` and `is_moved_on` need both.

    Args:
        commands: a table or view with the columns of LAST_COMMANDS; the columns of sequences may be repeated with
            suffixes.
        row: the alias of a table with ledger_id and entry_id.
        subscription: the row's subscription; None: the commands are for any.
        message: the number of the row's message in its entry, from 0; None: by the row's batch_index.
        has_one: whether there may be commands for single messages; without them the join is quicker.
        has_whole: whether there may be commands for whole entries.
    """

    def for_subscription(alias: str) -> Sql:
        if subscription is None:
            return TRUE
        return SQL("for_subscription", commands=identifier(alias), subscription=subscription)

    return SQL(
        "join_commands",
        commands=identifier(commands),
        row=identifier(row),
        for_one=for_subscription("one"),
        for_whole=for_subscription("whole"),
        batch_index=message or SQL("message_number", row=identifier(row)),
        has_one=has_one,
        has_whole=has_whole,
    )


def last(column: str) -> Sql:
    """Returns SQL for the greater of a column's values for the message and for its whole entry; -1 if both are null."""
    return SQL("last", column=identifier(column))


def is_cancelled(suffix: str = "") -> Sql:
    """Returns the SQL condition that a message is cancelled.

    Args:
        suffix: the suffix of the columns `cancelled` and `restored`.
    """
    return Sql(f"{last(f'cancelled{suffix}')} > {last(f'restored{suffix}')}")


def is_moved_on(sequence: Sql, suffix: str = "") -> Sql:
    """Returns the SQL condition that the message of a row of `delayed_index` was moved to a later row.

    Args:
        sequence: the row's sequence; null: the message's first row.
        suffix: the suffix of the column `moved`.
    """
    return SQL("comes_after", last=last(f"moved{suffix}"), sequence=sequence)


def are_cancelled(rows: pa.Table, cancels: pa.Table, restores: pa.Table, keys: Sequence[str] = ()) -> BoolArray:
    """Returns a mask of the rows whose messages are cancelled: bool, (rows,).

    Args:
        rows: columns ledger_id, entry_id, batch_index and the keys.
        cancels: a row for each cancelled message or entry, with the columns of `rows` and the command's sequence.
        restores: a row for each restored message or entry, with the same columns.
        keys: further columns of integers in which a row and a command have to agree.
    """
    return _last_sequences(rows, cancels, keys) > _last_sequences(rows, restores, keys)


def are_moved_on(rows: pa.Table, moves: pa.Table) -> BoolArray:
    """Returns a mask of the rows of `delayed_index` whose messages were moved to a later row: bool, (rows,).

    Args:
        rows: columns ledger_id, entry_id, batch_index and sequence.
        moves: MOVE rows with the same columns.
    """
    own = rows["sequence"].fill_null(0).to_numpy()
    moved: BoolArray = _last_sequences(rows, moves, ()) > own
    return moved


def _last_sequences(rows: pa.Table, commands: pa.Table, keys: Sequence[str]) -> Int64Array:
    """Returns the sequence of the last command that named each row's message or entry, int64, (rows,); -1: none."""
    entry = [*keys, *_ENTRY]
    last_ = as_int64(commands, [*entry, "batch_index", "sequence"]).group_by([*entry, "batch_index"])
    found = last_.aggregate([("sequence", "max")])
    sequences = np.full(rows.num_rows, -1, np.int64)
    for index in (np.maximum(int64(rows, "batch_index"), 0), np.full(rows.num_rows, -1)):
        named = as_int64(rows, entry).append_column("batch_index", pa.array(index))
        named = named.append_column("row", pa.array(np.arange(rows.num_rows)))
        pairs = named.join(found, [*entry, "batch_index"], join_type="inner", use_threads=False)
        row = int64(pairs, "row")
        sequences[row] = np.maximum(sequences[row], int64(pairs, "sequence_max"))
    return sequences
