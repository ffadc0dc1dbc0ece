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

from tracker.commands.kinds import OPERATIONS, Effect
from tracker.messages import BoolArray, Int64Array, as_int64, int64

_ENTRY = ("ledger_id", "entry_id")

_EFFECTS = {operation.kind.upper(): operation.effect for operation in OPERATIONS.values()}
_APPLIED = ("APPLIED", "SUPERSEDED")
_OF_OPERATION = " ".join(f"WHEN '{operation}' THEN '{effect}'" for operation, effect in _EFFECTS.items())

# SQL for the effect of a row of `outcomes`, a value of Effect; null: it had none. Rows of an earlier version have no
# column for it.
EFFECT = f"coalesce(effect, CASE WHEN result IN {_APPLIED} THEN CASE operation {_OF_OPERATION} END END)"

# SQL condition: a row of `outcomes` cancelled its message or entry.
IS_CANCEL = f"({EFFECT} = '{Effect.CANCEL}' AND occurrence IS NULL)"

# SQL condition: a row of `outcomes` undid earlier cancels of its message, as a retry does, too.
IS_RESTORE = f"({EFFECT} = '{Effect.RESTORE}')"

# SQL condition: a row of `outcomes` is about an occurrence that is not delivered: it was skipped, or its destination
# did not take it.
IS_SKIPPED_OCCURRENCE = f"({EFFECT} = '{Effect.CANCEL}' AND occurrence IS NOT NULL)"

# SQL condition: a row of `outcomes` paused a subscription, or ended its pause.
IS_PAUSE_CHANGE = f"({EFFECT} IN ('{Effect.HOLD}', '{Effect.RESUME}') AND occurrence IS NULL)"

# If a recurring message has no row for its next occurrence this long after the last one, it has ended. Before, it may
# recur so often (every few seconds) that its next occurrence gets no row.
NEXT_IS_THERE_MILLIS = 60_000


def effects_of(outcomes: pa.Table) -> pa.Array:
    """Returns the effects of rows of `outcomes`, as the SQL of EFFECT: strings, (rows,).

    Args:
        outcomes: columns result, as text, and operation; and effect, except of rows that are not written yet.
    """
    known, effects = pa.array(list(_EFFECTS)), pa.array([str(effect) for effect in _EFFECTS.values()])
    of_operation = effects.take(pc.index_in(outcomes["operation"], known))
    is_applied = pc.is_in(outcomes["result"], pa.array(_APPLIED))
    found = pc.if_else(is_applied, of_operation, pa.scalar(None, pa.string()))
    return pc.coalesce(outcomes["effect"], found) if "effect" in outcomes.column_names else found


def last_occurrences(condition: str = "true") -> str:
    """Returns SQL with a row for each subscription and recurring message: its last occurrence that is done.

    Columns beside the message's: `occurrence`, the number of the last one that was delivered or skipped; `due`, when it
    was due by the rule, and `deliver_at`, when in fact; `delivered`, the number of delivered ones; `done_at`, when the
    last one was delivered or skipped.

    Args:
        condition: SQL, that a row of `deliveries` or of `outcomes` counts.
    """
    message = "topic, subscription, ledger_id, entry_id, batch_index"
    return f"""
SELECT {message}, max(occurrence) AS occurrence, max(due) AS due,
       max(CASE WHEN occurrence = newest THEN deliver_at END) AS deliver_at,
       count(sent_at) AS delivered, max(done_at) AS done_at
FROM (
    SELECT *, max(occurrence) OVER (PARTITION BY {message}) AS newest
    FROM (
        SELECT {message}, occurrence, deliver_at, coalesce(occurrence_at, deliver_at) AS due, sent_at,
               sent_at AS done_at
        FROM deliveries WHERE occurrence IS NOT NULL AND {condition}
        UNION ALL
        SELECT {message}, occurrence, deliver_at, deliver_at AS due, CAST(NULL AS BIGINT), applied_at
        FROM outcomes WHERE {IS_SKIPPED_OCCURRENCE} AND {condition}
    ) AS each_one
) AS done
GROUP BY {message}
"""  # noqa: S608


# A row for each subscription and message (or whole entry) named by commands: the sequence of the last command of each
# kind; null: none.
LAST_COMMANDS = f"""
SELECT topic, subscription, ledger_id, entry_id, batch_index,
       max(CASE WHEN effect = '{Effect.CANCEL}' THEN sequence END) AS cancelled,
       max(CASE WHEN effect = '{Effect.RESTORE}' THEN sequence END) AS restored,
       max(CASE WHEN effect = '{Effect.MOVE}' THEN sequence END) AS moved
FROM (
    SELECT topic, subscription, ledger_id, entry_id, batch_index, {EFFECT} AS effect, coalesce(sequence, 0) AS sequence
    FROM outcomes WHERE {IS_CANCEL} OR {IS_RESTORE}
    UNION ALL
    SELECT topic, subscription, ledger_id, entry_id, batch_index, operation AS effect, sequence
    FROM delayed_index WHERE operation = 'MOVE'
) AS commands
GROUP BY topic, subscription, ledger_id, entry_id, batch_index
"""  # noqa: S608


def join_commands(
    commands: str,
    row: str,
    on: str = "true",
    batch_index: str | None = None,
    has_one: bool = True,
    has_whole: bool = True,
) -> str:
    """Returns SQL that joins a row with the commands for its message (as `one`) and for its whole entry (as `whole`).

    `last`, `is_cancelled` and `is_moved_on` need both.

    Args:
        commands: a table or view with the columns of LAST_COMMANDS; the columns of sequences may be repeated with
            suffixes.
        row: the alias of a table with ledger_id and entry_id.
        on: a further condition, in which `{of}` stands for `one` or `whole`.
        batch_index: SQL for the number of the row's message in its entry, from 0; None: by the row's batch_index.
        has_one: whether there may be commands for single messages; without them the join is quicker.
        has_whole: whether there may be commands for whole entries.
    """
    message = batch_index or f"greatest({row}.batch_index, 0)"
    entry = f"{{of}}.ledger_id = {row}.ledger_id AND {{of}}.entry_id = {row}.entry_id AND {on}"
    one = commands if has_one else f"(SELECT * FROM {commands} WHERE false)"  # noqa: S608
    whole = f"(SELECT * FROM {commands} WHERE {'batch_index = -1' if has_whole else 'false'})"  # noqa: S608
    return (
        f"LEFT JOIN {one} AS one ON {entry.format(of='one')} AND one.batch_index = {message} "
        f"LEFT JOIN {whole} AS whole ON {entry.format(of='whole')}"
    )


def last(column: str) -> str:
    """Returns SQL for the greater of a column's values for the message and for its whole entry; -1 if both are null."""
    return f"greatest(coalesce(one.{column}, -1), coalesce(whole.{column}, -1))"


def is_cancelled(suffix: str = "") -> str:
    """Returns the SQL condition that a message is cancelled.

    Args:
        suffix: the suffix of the columns `cancelled` and `restored`.
    """
    return f"{last(f'cancelled{suffix}')} > {last(f'restored{suffix}')}"


def is_moved_on(sequence: str, suffix: str = "") -> str:
    """Returns the SQL condition that the message of a row of `delayed_index` was moved to a later row.

    Args:
        sequence: SQL for the row's sequence; null: the message's first row.
        suffix: the suffix of the column `moved`.
    """
    return f"{last(f'moved{suffix}')} > coalesce({sequence}, 0)"


def are_cancelled(rows: pa.Table, cancels: pa.Table, restores: pa.Table, keys: Sequence[str] = ()) -> BoolArray:
    """Returns a mask of the rows whose messages are cancelled.

    Args:
        rows: columns ledger_id, entry_id, batch_index and the keys.
        cancels: a row for each cancelled message or entry, with the columns of `rows` and the command's sequence.
        restores: a row for each restored message or entry, with the same columns.
        keys: further columns of integers in which a row and a command have to agree.

    Returns:
        bool, (rows,).
    """
    return _last_sequences(rows, cancels, keys) > _last_sequences(rows, restores, keys)


def are_moved_on(rows: pa.Table, moves: pa.Table) -> BoolArray:
    """Returns a mask of the rows of `delayed_index` whose messages were moved to a later row.

    Args:
        rows: columns ledger_id, entry_id, batch_index and sequence.
        moves: MOVE rows with the same columns.

    Returns:
        bool, (rows,).
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
