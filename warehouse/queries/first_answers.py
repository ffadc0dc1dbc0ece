"""The first answers to commands, from the table `outcomes`, for commands that come again."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import ANSWERS, OTHER_BODY
from tracker.commands.request_log import ANSWERS_KEPT_MILLIS
from tracker.messages import typed
from tracker.wire.delaylake_pb2 import Result
from warehouse.tables import Tables, literal

# What version 0.1.0 wrote down for a repeat, which is not what was answered first.
_REPEATED = "the request id has been applied"


def find_first_answers(tables: Tables, version: int | None, request_ids: Collection[str], now: int) -> pa.Table:
    """The answers that request ids got in the last day, as ANSWERS.

    Args:
        version: of the table `outcomes`: all batches before this one are in it; None: the newest.
        now: ms since the epoch.
    """
    if not request_ids:
        return ANSWERS.empty_table()
    names = ("request_id", "topic", "subscription", "partition", "ledger_id", "entry_id", "batch_index", "operation")
    rows = tables.query(
        "outcomes",
        f"SELECT {', '.join(names)}, result AS name, reason, deliver_at, batch_id AS tick FROM outcomes "  # noqa: S608
        f"WHERE request_id IN ({', '.join(map(literal, sorted(request_ids)))}) "
        f"AND applied_at > {now - ANSWERS_KEPT_MILLIS} "
        f"AND coalesce(reason, '') NOT IN ({literal(OTHER_BODY)}, {literal(_REPEATED)}) "
        "ORDER BY tick, ledger_id, entry_id, batch_index, subscription, result",
        version,
    )
    number = pc.index_in(rows["name"], pa.array(Result.keys()))
    return typed(rows.append_column("result", pc.cast(number, pa.int32())), ANSWERS)
