"""Finds the schedule keys whose message waits, and those whose next message comes in again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from recovery.delivered import partition_name
from tracker.commands.rebuilt import LIVE_KEYS, REBUILT_KEPT_MILLIS
from tracker.messages import concat, int64, typed
from warehouse.schemas import DELAYED_INDEX
from warehouse.tables import Tables

# The columns of rows of `delayed_index` of which keys are made.
KEYED_ROWS = pa.schema(
    [
        DELAYED_INDEX.field(name)
        for name in (
            *("topic", "schedule_key", "ledger_id", "entry_id", "partition", "batch_index"),
            *("deliver_at", "key_since"),
        )
    ]
)

_TOPICS = """
SELECT DISTINCT topic FROM (
    SELECT topic FROM delayed_index WHERE schedule_key IS NOT NULL
    UNION ALL SELECT topic FROM outcomes WHERE schedule_key IS NOT NULL
) AS t ORDER BY topic
"""

_SUPERSEDED = """
SELECT topic, schedule_key, superseded_by, max(deliver_at) AS since FROM outcomes WHERE result = 'SUPERSEDED'
GROUP BY topic, schedule_key, superseded_by
"""


def keyed_topics(tables: Tables) -> list[str]:
    """Returns the source topics that have had messages with a schedule key."""
    topics: list[str] = tables.sql(_TOPICS)["topic"].to_pylist()
    return topics


def live_keys(tables: Tables, rows: pa.Table, durable: Mapping[str, Position], now: int) -> pa.Table:
    """Returns the last message of each schedule key that waits, and of keys whose next message comes in again.

    A message that takes the place of another, and comes in again, does not find it waiting any more: for it the key
    goes on since its first message was published.

    Args:
        tables: of the warehouse.
        rows: as KEYED_ROWS, those that a subscription waits for; a message may have several.
        durable: by topic partition the last entry that does not come again from the source topics.
        now: ms since the epoch.

    Returns:
        as LIVE_KEYS, a row for each key.
    """
    waiting = typed(_last_of_keys(rows), LIVE_KEYS)
    again = [
        {
            "topic": row["topic"],
            "schedule_key": row["schedule_key"],
            "ledger_id": -1,
            "entry_id": -1,
            "partition": -1,
            "batch_index": -1,
            "batch_size": 1,
            "deliver_at": now + REBUILT_KEPT_MILLIS,
            "since": row["since"],
        }
        for row in tables.sql(_SUPERSEDED).to_pylist()
        if _comes_again(row["topic"], row["superseded_by"], durable)
    ]
    return concat([pa.Table.from_pylist(_first_of_keys(again), schema=LIVE_KEYS), waiting], LIVE_KEYS)


def _last_of_keys(rows: pa.Table) -> pa.Table:
    """Returns the last row of each key, with the column `since`."""
    names = ("ledger_id", "entry_id", "batch_index")
    rows = rows.take(pa.array(np.lexsort([int64(rows, name) for name in reversed(names)])))
    pairs = zip(*(rows[name].to_pylist() for name in ("topic", "schedule_key")), strict=True)
    rows = rows.take(pa.array(list({pair: i for i, pair in enumerate(pairs)}.values()), pa.int64()))
    # The sizes of batches are not known here: with this one they never become a whole entry.
    sizes = np.where(int64(rows, "batch_index") < 0, 1, np.iinfo(np.int32).max)
    since = pc.coalesce(rows["key_since"], rows["deliver_at"])  # of imported messages it is not known
    return rows.append_column("since", since).append_column("batch_size", pa.array(sizes))


def _first_of_keys(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Returns of each key the row with the least `since`."""
    rows = sorted(rows, key=lambda row: (row["topic"], row["schedule_key"], row["since"]))
    return list({(row["topic"], row["schedule_key"]): row for row in reversed(rows)}.values())


def _comes_again(topic: str, position: str, durable: Mapping[str, Position]) -> bool:
    ledger_id, entry_id, partition, _ = map(int, position.split(":"))
    return Position(ledger_id, entry_id) > durable.get(partition_name(topic, partition), Position(-1, -1))
