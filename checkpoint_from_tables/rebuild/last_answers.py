"""Finds outcomes that may have been written and not published, because the job ended in between."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS
from tracker.messages import typed
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries
from warehouse.schemas import MOVED_AT

_SQL = NamedQueries(__file__)


def find_last_answers(tables: Tables) -> pa.Table:
    """Finds the outcomes of the newest batch that no command has caused which this batch has read, and comes again.

    Returns:
        the outcomes as OUTCOME_ROWS, to be published as repeats.
    """
    moved_at = tables.written("entries", MOVED_AT)
    of_earlier_broker = moved_at + CLOCKS_MILLIS if moved_at > 0 else 0
    rows = tables.sql(_SQL("last", of_earlier_broker=of_earlier_broker))
    number = pc.index_in(rows["result"], pa.array(Result.keys()))
    values = {name: rows[name] for name in rows.column_names if name in OUTCOME_ROWS.names}
    values |= {"result": number, "is_repeat": pa.repeat(True, rows.num_rows), "body": rows["command_hash"]}
    return typed(values, OUTCOME_ROWS)
