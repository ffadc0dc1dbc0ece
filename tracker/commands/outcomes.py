"""Builds the outcomes of commands, as OUTCOME_ROWS."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL
from tracker.commands.match import Pairs, each_subscription
from tracker.messages import (
    BoolArray,
    Int64Array,
    empty_table,
    int64,
    typed,
)
from tracker.schemas import OUTCOME_ROWS, SUPERSEDED_ID
from tracker.subscriptions import Subscriptions
from tracker.wire.delaylake_pb2 import Result

# The issuer of outcomes that no command caused, and the request id of outcomes of superseded messages.
ISSUED_BY = "delaylake"


class Verdicts(NamedTuple):
    """What commands get to hear of n pairs of a command and a message that it names. Pairs of one command are adjacent.

    Attributes:
        chosen: int64, (n,): the indexes of these pairs among all `Pairs`.
        result: int64, (n,): numbers of the enum Result.
        reason: n reasons, one line each, or empty.
        is_shared: bool, (n,): the pair shares one result with its entry: that of the command's first pair.
        starts: bool, (n,): the pair is the first of its command.
    """

    chosen: Int64Array
    result: Int64Array
    reason: list[str]
    is_shared: BoolArray
    starts: BoolArray

    @property
    def answered(self) -> Int64Array:
        """The indexes of the pairs that get an outcome of their own, int64."""
        return np.flatnonzero(self.starts | ~self.is_shared)


def outcomes_of(subscriptions: Subscriptions, pairs: Pairs, verdicts: Verdicts, subscription: int | str) -> pa.Table:
    """Builds an outcome for each pair with a verdict, or one for all pairs of an entry that share one result.

    Args:
        pairs: of commands and messages.
        verdicts: on some of them.
        subscription: its number, or ALSO_LATER.

    Returns:
        as OUTCOME_ROWS; deliver_at and sequence are null, batch_index is -1 where a row is for a whole entry.
    """
    answered = verdicts.answered
    is_shared, pair = verdicts.is_shared[answered], verdicts.chosen[answered]
    commands = pairs.commands.take(pa.array(pairs.command[pair]))
    rows = pairs.known.take(pa.array(pairs.row[pair]))
    # A client counts an entry that it named whole as one: so outcomes of its single messages are not summed up.
    is_named = is_shared | (int64(commands, "batch_index") >= 0) | (int64(rows, "batch_index") < 0)
    values = {
        **{name: commands[name] for name in ("request_id", "topic", "operation", "issued_by", "issued_at", "body")},
        "schedule_key": commands["schedule_key"],
        "sum_up": pc.and_(commands["sum_up"], pa.array(is_named)),
        "subscription": subscriptions.names_of(commands["topic"], subscription),
        "partition": rows["partition"],
        "ledger_id": rows["ledger_id"],
        "entry_id": rows["entry_id"],
        "batch_index": pa.array(np.where(is_shared, -1, int64(rows, "batch_index")), pa.int32()),
        "result": pa.array(verdicts.result[answered], pa.int32()),
        "reason": pa.array([verdicts.reason[i] for i in answered.tolist()], pa.string()),
    }
    return typed(values, OUTCOME_ROWS)


def answers_of(
    subscriptions: Subscriptions, commands: pa.Table, result: int | None = None, reason: str = ""
) -> pa.Table:
    """Builds an outcome for each command and subscription; deliver_at and sequence are null.

    Args:
        commands: as COMMAND_ROWS.
        result: a number of the enum Result; None: take `result` and `reason` from the commands.
        reason: one line; only with a result.
    """
    if not commands.num_rows:
        return empty_table(OUTCOME_ROWS)
    index, names = each_subscription(commands, subscriptions.names)
    rows = commands.take(pa.array(index))
    n = rows.num_rows
    values = {name: rows[name] for name in OUTCOME_ROWS.names if name in rows.column_names and name != "deliver_at"}
    values["subscription"] = pa.array(names, pa.string())
    if result is not None:
        values["result"] = pa.array([int(result)] * n, pa.int32())
        values["reason"] = pa.array([reason] * n, pa.string())
    return typed(values, OUTCOME_ROWS)


def command_steps(answers: pa.Table) -> Int64Array:
    """Numbers the commands of some outcomes from 0 on, for `Context.next_sequences`: those of one share a sequence.

    Args:
        answers: as OUTCOME_ROWS; those of one command are adjacent.

    Returns:
        int64, (rows,), rising.
    """
    ids = answers["request_id"]
    is_next = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    steps: Int64Array = np.cumsum(np.append(False, is_next))[: len(ids)]
    return steps


def superseded_outcomes(
    rows: pa.Table, names: pa.Array, yields_to: pa.Array, since: pa.Array, sequence: int, now: int
) -> pa.Table:
    """Builds the outcomes of superseded messages, as OUTCOME_ROWS.

    Args:
        rows: as KNOWN.
        names: strings, (rows,): names of the subscriptions.
        yields_to: strings, (rows,): the position of the message that supersedes each.
        since: int64, (rows,), ms since the epoch: when the first message of the key was published.
        sequence: of all outcomes.
        now: ms since the epoch.
    """
    n = rows.num_rows
    columns = ("topic", "partition", "ledger_id", "entry_id", "batch_index", "schedule_key")
    values = {
        **{name: rows[name] for name in columns},
        "request_id": pa.repeat(SUPERSEDED_ID, n),
        "subscription": names,
        "result": pa.repeat(int(Result.SUPERSEDED), n),
        "reason": pc.binary_join_element_wise("yields to", yields_to, " "),
        "operation": pa.repeat(CANCEL.upper(), n),
        "deliver_at": since,
        "sequence": pa.repeat(sequence, n),
        "issued_by": pa.repeat(ISSUED_BY, n),
        "issued_at": pa.repeat(now, n),
        "superseded_by": yields_to,
    }
    return typed(values, OUTCOME_ROWS)


def out_of_batch_outcomes(
    subscriptions: Subscriptions,
    commands: pa.Table,
    command: Int64Array,
    size: Int64Array,
    is_named: BoolArray,
) -> list[pa.Table]:
    """Builds INVALID outcomes, as OUTCOME_ROWS, for commands whose known entry lacks the batch index that they name.

    Args:
        commands: as COMMAND_ROWS.
        command: int64, (pairs,): the index of a command, for each known message of its entry.
        size: int64, (pairs,): the number of messages in the entry.
        is_named: bool, (pairs,): the command names the message.
    """
    named = np.zeros(commands.num_rows, np.bool_)
    named[command[is_named]] = True
    sizes = np.zeros(commands.num_rows, np.int64)
    sizes[command] = size
    left = np.flatnonzero((sizes > 0) & ~named)
    if not len(left):
        return []
    return [
        answers_of(subscriptions, commands.take(pa.array(left)), Result.INVALID, "the entry has no such batch index")
    ]


# The reason in `rejects` begins with this and the subscription's name.
NOT_DELIVERED = "not delivered to "

NOT_TAKEN = ": the client does not take it: "  # follows the name if the client refused the message
