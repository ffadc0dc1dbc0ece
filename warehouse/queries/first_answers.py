"""Reads the first answers to commands from the table `outcomes`: a repeated command gets the same answer."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import ANSWERS, ANSWERS_KEPT_MILLIS, KEPT_MILLIS, OTHER_BODY
from tracker.messages import FIRST_IMPORTED_LEDGER, empty_table, typed
from tracker.requests import OPERATION, request_id_of
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, columns

# The reason that version 0.1.0 wrote for a repeat. A row with it is not a first answer.
_REPEATED = "the request id has been applied"

_SQL = NamedQueries(__file__, reasons_of_repeats=(OTHER_BODY, _REPEATED), of_messages=OPERATION)


def find_first_answers(tables: Tables, version: int | None, request_ids: Collection[str], now: int) -> pa.Table:
    """Finds the first answers to request ids within the last ANSWERS_KEPT_MILLIS.

    Args:
        version: a version of the table `outcomes` that has all batches before this one; None: the newest.
        now: the current time, ms since the epoch.

    Returns:
        the answers, as ANSWERS.
    """
    if not request_ids:
        return empty_table(ANSWERS)
    names = (
        *("request_id", "topic", "subscription", "partition", "ledger_id", "entry_id", "batch_index", "operation"),
        *("schedule_key", "superseded_by", "occurrence"),
    )
    ids, after = sorted(request_ids), now - ANSWERS_KEPT_MILLIS
    sql = _SQL("first_answers", columns=columns(names), request_ids=ids, after=after)
    rows = tables.query("outcomes", sql, version)
    number = pc.index_in(rows["name"], pa.array(Result.keys()))
    return typed(rows.append_column("result", pc.cast(number, pa.int32())), ANSWERS)


def find_bodies(tables: Tables, now: int) -> dict[str, int]:
    """Finds the request ids that have been answered within the last KEPT_MILLIS, for the request log.

    Args:
        now: the current time, ms since the epoch.

    Returns:
        the hash of the first command's body by request id; 0: an earlier version of the program wrote none.
    """
    rows = tables.sql(_SQL("bodies", after=now - KEPT_MILLIS))
    return dict(zip(rows["request_id"].to_pylist(), rows["body"].to_pylist(), strict=True))


def find_message_bodies(tables: Tables, now: int) -> dict[str, dict[str, int]]:
    """Finds the request ids of messages that came within the last KEPT_MILLIS, for the logs of `MessageRequests`.

    Args:
        now: the current time, ms since the epoch.

    Returns:
        by source topic and request id, in the order in which they came: the hash of the first message's content.
    """
    sql = _SQL("message_bodies", after=now - KEPT_MILLIS, first_renumbered=FIRST_IMPORTED_LEDGER)
    found: dict[str, dict[str, int]] = {}
    for row in tables.sql(sql).to_pylist():
        found.setdefault(row["topic"], {})[request_id_of(row["topic"], row["request_id"])] = row["body"]
    return found
