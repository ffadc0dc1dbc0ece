"""Finds outcomes that may have been written and not published, because the job ended in between."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import typed
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables

# The outcomes of the newest batch with any: a batch writes its outcomes after those of the batch before were published.
# Commands that this batch has read are not acknowledged: they come again, and are answered then.
_LAST = """
SELECT * FROM outcomes AS o LEFT SEMI JOIN (SELECT max(batch_id) AS newest FROM outcomes) ON o.batch_id = newest
WHERE o.command_hash IS NULL
    OR o.request_id IN (SELECT request_id FROM outcomes WHERE batch_id < (SELECT max(batch_id) FROM outcomes))
ORDER BY sequence, request_id, ledger_id, entry_id, batch_index, subscription
"""


def find_last_answers(tables: Tables) -> pa.Table:
    """Finds the outcomes of the newest batch that no command of this batch has caused.

    Returns:
        the outcomes as OUTCOME_ROWS, to be published as repeats.
    """
    rows = tables.sql(_LAST)
    number = pc.index_in(rows["result"], pa.array(Result.keys()))
    values = {name: rows[name] for name in rows.column_names if name in OUTCOME_ROWS.names}
    values |= {"result": number, "is_repeat": pa.repeat(True, rows.num_rows), "body": rows["command_hash"]}
    return typed(values, OUTCOME_ROWS)
