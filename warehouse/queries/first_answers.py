"""Reads the first answers to commands from the table `outcomes`: a repeated command gets the same answer."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import ANSWERS, ANSWERS_KEPT_MILLIS, KEPT_MILLIS, OTHER_BODY
from tracker.messages import typed
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables, literal

# The reason that version 0.1.0 wrote for a repeat. A row with it is not a first answer.
_REPEATED = "the request id has been applied"

_IS_FIRST = f"coalesce(reason, '') NOT IN ({literal(OTHER_BODY)}, {literal(_REPEATED)})"


def find_first_answers(tables: Tables, version: int | None, request_ids: Collection[str], now: int) -> pa.Table:
    """Finds the first answers to request ids within the last ANSWERS_KEPT_MILLIS.

    Args:
        version: a version of the table `outcomes` that has all batches before this one; None: the newest.
        now: the current time, ms since the epoch.

    Returns:
        the answers, as ANSWERS.
    """
    if not request_ids:
        return ANSWERS.empty_table()
    names = (
        *("request_id", "topic", "subscription", "partition", "ledger_id", "entry_id", "batch_index", "operation"),
        *("schedule_key", "superseded_by", "occurrence"),
    )
    rows = tables.query(
        "outcomes",
        f"SELECT {', '.join(names)}, result AS name, reason, deliver_at, batch_id AS tick FROM outcomes "  # noqa: S608
        f"WHERE request_id IN ({', '.join(map(literal, sorted(request_ids)))}) "
        f"AND applied_at > {now - ANSWERS_KEPT_MILLIS} "
        f"AND {_IS_FIRST} ORDER BY tick, ledger_id, entry_id, batch_index, subscription, result",
        version,
    )
    number = pc.index_in(rows["name"], pa.array(Result.keys()))
    return typed(rows.append_column("result", pc.cast(number, pa.int32())), ANSWERS)


def find_bodies(tables: Tables, now: int) -> dict[str, int]:
    """Finds the request ids that have been answered within the last KEPT_MILLIS, for the request log.

    Args:
        now: the current time, ms since the epoch.

    Returns:
        the hash of the first command's body by request id; 0: an earlier version of the program wrote none.
    """
    rows = tables.sql(
        "SELECT request_id, coalesce(max(command_hash), 0) AS body FROM outcomes "  # noqa: S608
        f"WHERE applied_at > {now - KEPT_MILLIS} AND {_IS_FIRST} GROUP BY request_id ORDER BY request_id"
    )
    return dict(zip(rows["request_id"].to_pylist(), rows["body"].to_pylist(), strict=True))
