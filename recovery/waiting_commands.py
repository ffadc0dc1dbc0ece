"""Commands that wait for their messages, found by the answers that they have had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from tracker.commands.schema import COMMANDS, SKIP
from tracker.messages import subscription_numbers, typed, where
from warehouse.tables import Tables

# The last answer to a skip of a whole entry may be one for each of its messages; a message that is an entry is named by
# the index 0, too.
_WAITING = f"""
SELECT DISTINCT w.request_id, w.topic, w.subscription, w.partition, w.ledger_id, w.entry_id, w.batch_index, w.operation,
       w.issued_by, w.issued_at
FROM outcomes AS w LEFT ANTI JOIN (SELECT * FROM outcomes WHERE result <> 'WAITING') AS a
    ON a.request_id = w.request_id AND a.subscription = w.subscription AND a.ledger_id = w.ledger_id
    AND a.entry_id = w.entry_id AND (a.batch_index = w.batch_index OR w.batch_index <= 0)
WHERE w.result = 'WAITING' AND w.operation = '{SKIP.upper()}'
"""  # noqa: S608


def find_waiting_skips(tables: Tables, names: Mapping[str, Sequence[str]]) -> pa.Table:
    """Skips that were answered WAITING and nothing since; a cancel that waits has a row in `delayed_index`.

    Args:
        tables: of the warehouse.
        names: for each source topic the names of its subscriptions, by number.

    Returns:
        COMMANDS, one for each subscription that still has one.
    """
    rows = tables.sql(_WAITING)
    numbers = subscription_numbers(rows, names)
    rows, numbers = where(rows, numbers >= 0), numbers[numbers >= 0]
    n = rows.num_rows
    given = ("request_id", "topic", "partition", "ledger_id", "entry_id", "batch_index", "operation", "issued_by")
    values = {
        **{name: rows[name] for name in (*given, "issued_at")},
        "kind": pa.repeat(SKIP, n),
        "subscriptions": pa.array(1 << numbers),
        "deliver_at": pa.repeat(0, n),
    }
    return typed(values, COMMANDS)
