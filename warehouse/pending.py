"""The rule by which a message is pending: as SQL over the tables, and on columns for rows in memory.

A row of `delayed_index` (operation DELAY) is pending for a subscription when

- it is for that subscription, or for all of the topic's (`subscription` is null),
- the message has no later row there: no MOVE has a higher sequence than the row,
- the last command that cancelled the message, or its whole entry, is not later than the last that restored it,
- it has not been delivered there.

Commands name a message by its batch_index, or by -1 a whole entry, which may be one message. Ledger ids are unique in a
cluster, and those of imported messages are none of it, so that no two topics or partitions share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array, as_int64, int64

_ENTRY = ("ledger_id", "entry_id")

# A row a message, or whole entry, and subscription: the sequences of the last commands of each kind; null: none.
LAST_COMMANDS = """
SELECT topic, subscription, ledger_id, entry_id, batch_index,
       max(CASE WHEN operation IN ('CANCEL', 'SKIP') THEN sequence END) AS cancelled,
       max(CASE WHEN operation = 'RESTORE' THEN sequence END) AS restored,
       max(CASE WHEN operation = 'MOVE' THEN sequence END) AS moved
FROM (
    SELECT topic, subscription, ledger_id, entry_id, batch_index, operation, coalesce(sequence, 0) AS sequence
    FROM outcomes WHERE result = 'APPLIED' AND operation IN ('CANCEL', 'SKIP', 'RESTORE')
    UNION ALL
    SELECT topic, subscription, ledger_id, entry_id, batch_index, operation, sequence
    FROM delayed_index WHERE operation = 'MOVE'
) AS commands
GROUP BY topic, subscription, ledger_id, entry_id, batch_index
"""


def join_commands(commands: str, row: str, on: str = "true", batch_index: str | None = None) -> str:
    """SQL that joins the commands for a row's message (`one`) and its entry (`whole`): the conditions below need both.

    Args:
        commands: a table or view with the columns of LAST_COMMANDS, or with several of each.
        row: the alias of a table with positions.
        on: a further condition, for `{of}`.
        batch_index: the number of the row's message in its entry, where the row has no batch_index.
    """
    message = batch_index or f"greatest({row}.batch_index, 0)"
    entry = f"{{of}}.ledger_id = {row}.ledger_id AND {{of}}.entry_id = {row}.entry_id AND {on}"
    whole = f"(SELECT * FROM {commands} WHERE batch_index = -1)"  # noqa: S608
    return (
        f"LEFT JOIN {commands} AS one ON {entry.format(of='one')} AND one.batch_index = {message} "
        f"LEFT JOIN {whole} AS whole ON {entry.format(of='whole')}"
    )


def last(column: str) -> str:
    """SQL for the greater value of a message and its entry in a column, -1 where both are null."""
    return f"greatest(coalesce(one.{column}, -1), coalesce(whole.{column}, -1))"


def is_cancelled(suffix: str = "") -> str:
    """SQL condition: a message is cancelled. `suffix`: of the columns `cancelled` and `restored`."""
    return f"{last(f'cancelled{suffix}')} > {last(f'restored{suffix}')}"


def is_moved_on(sequence: str, suffix: str = "") -> str:
    """SQL condition: a message has a later row than the one with a sequence; null: the row that it came with."""
    return f"{last(f'moved{suffix}')} > coalesce({sequence}, 0)"


def are_cancelled(rows: pa.Table, cancels: pa.Table, restores: pa.Table, keys: Sequence[str] = ()) -> BoolArray:
    """A mask of the rows whose messages are cancelled.

    Args:
        rows: with ledger_id, entry_id, batch_index and the keys.
        cancels: the same, and the sequence of the command.
        restores: the same.
        keys: further columns of integers that tell rows apart.
    """
    return _last_sequences(rows, cancels, keys) > _last_sequences(rows, restores, keys)


def are_moved_on(rows: pa.Table, moves: pa.Table) -> BoolArray:
    """A mask of the rows whose messages have a later row.

    Args:
        rows: with ledger_id, entry_id, batch_index and sequence.
        moves: the same: MOVE rows.
    """
    own = rows["sequence"].fill_null(0).to_numpy()
    moved: BoolArray = _last_sequences(rows, moves, ()) > own
    return moved


def _last_sequences(rows: pa.Table, commands: pa.Table, keys: Sequence[str]) -> Int64Array:
    """For each row the sequence of the last command that named its message or its entry, -1 where there is none."""
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
