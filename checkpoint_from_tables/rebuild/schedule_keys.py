"""Finds the live schedule keys: those with a waiting message, and those whose last message comes in again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from conf.partitions import partition_name
from tracker.messages import attempts_of, concat, int64, is_among, typed, where, with_columns
from tracker.properties import MessagePosition
from tracker.rebuilt import LIVE_KEYS, REBUILT_KEPT_MILLIS
from warehouse.delta.tables import Tables
from warehouse.schemas import DELAYED_INDEX

# The columns of `delayed_index` from which live keys are made.
KEYED_ROWS = pa.schema(
    [
        DELAYED_INDEX.field(name)
        for name in (
            *("topic", "schedule_key", "ledger_id", "entry_id", "partition", "batch_index"),
            *("deliver_at", "key_since", "sequence", "attempt"),
        )
    ]
)

_MESSAGE = ["ledger_id", "entry_id", "batch_index"]

_TOPICS = """
SELECT DISTINCT topic FROM (
    SELECT topic FROM delayed_index WHERE schedule_key IS NOT NULL
    UNION ALL SELECT topic FROM outcomes WHERE schedule_key IS NOT NULL
) AS t ORDER BY topic
"""

# The original times of messages, which their moved rows do not have. A live key needs the original time, with which the
# index is read.
_AS_THEY_CAME = """
SELECT ledger_id, entry_id, batch_index, deliver_at AS came_with FROM delayed_index
WHERE operation = 'DELAY' AND sequence IS NULL AND schedule_key IS NOT NULL
"""

# Messages that have superseded another one of their key, and since when the key lived at that time.
_TAKEN_OVER = """
SELECT topic, schedule_key, superseded_by, max(deliver_at) AS since FROM outcomes
WHERE result = 'SUPERSEDED' GROUP BY topic, schedule_key, superseded_by
"""


def keyed_topics(tables: Tables) -> list[str]:
    """Returns the source topics that have had messages with a schedule key."""
    topics: list[str] = tables.sql(_TOPICS)["topic"].to_pylist()
    return topics


def live_keys(
    tables: Tables,
    rows: pa.Table,
    durable: Mapping[str, Position],
    now: int,
    done: pa.Table,
    names: Mapping[str, Sequence[str]],
) -> pa.Table:
    """Returns the last message of each live schedule key.

    A message that had superseded another one and comes in again no longer finds that message waiting. So its key is
    live as it was before.

    Args:
        rows: the pending rows with a schedule key, as KEYED_ROWS; a message may have several.
        durable: the last entry of each topic partition that does not come again from the source topics.
        now: ms since the epoch.
        done: delivered or cancelled messages, with subscription, ledger_id, entry_id and batch_index; only those
            delivered ones that come in again are needed.
        names: the names of each source topic's subscriptions, in the order of their numbers.

    Returns:
        the keys' messages, as LIVE_KEYS.
    """
    waiting = typed(_as_they_came(tables, _last_of_keys(rows)), LIVE_KEYS)
    came = [
        row for row in tables.sql(_TAKEN_OVER).to_pylist() if _comes_again(row["topic"], row["superseded_by"], durable)
    ]
    n_done = _subscriptions_done([row["superseded_by"] for row in came], done)
    again = [
        {
            "topic": row["topic"],
            "schedule_key": row["schedule_key"],
            **MessagePosition.parse(row["superseded_by"])._asdict(),
            "batch_size": 1,
            "deliver_at": now + REBUILT_KEPT_MILLIS,
            "since": row["since"],
            "comes_again": True,
        }
        for row, n in zip(came, n_done, strict=True)
        if n < len(names.get(row["topic"], ()))
    ]
    return concat([pa.Table.from_pylist(again, schema=LIVE_KEYS), waiting], LIVE_KEYS)


def _last_of_keys(rows: pa.Table) -> pa.Table:
    """Returns a row of the last message of each key, with the columns `since` and `batch_size`; retries do not count.

    If the message has several rows, its original row is returned, if that is pending.
    """
    rows = where(rows, attempts_of(rows) == 0)
    is_moved = pc.is_valid(rows["sequence"]).to_numpy(zero_copy_only=False)
    rows = rows.take(pa.array(np.lexsort([~is_moved, *(int64(rows, name) for name in reversed(_MESSAGE))])))
    pairs = zip(*(rows[name].to_pylist() for name in ("topic", "schedule_key")), strict=True)
    rows = rows.take(pa.array(list({pair: i for i, pair in enumerate(pairs)}.values()), pa.int64()))
    # The number of messages in an entry is not known here. With this one, no set of them counts as the whole entry.
    sizes = np.where(int64(rows, "batch_index") < 0, 1, np.iinfo(np.int32).max)
    since = pc.coalesce(rows["key_since"], rows["deliver_at"])  # imported messages have no `key_since`
    return rows.append_column("since", since).append_column("batch_size", pa.array(sizes))


def _as_they_came(tables: Tables, rows: pa.Table) -> pa.Table:
    """Sets `deliver_at` of moved, held and recurring messages to their original time.

    Where the delayed index no longer has the original row, the time is 0: then the key is never looked up there.

    Args:
        rows: one for each message, as KEYED_ROWS.
    """
    is_moved = pc.is_valid(rows["sequence"]).to_numpy(zero_copy_only=False)
    moved = where(rows, is_moved)
    if not moved.num_rows:
        return rows
    ledgers = pc.min_max(moved["ledger_id"])
    found: dict[tuple[int, ...], int] = {}
    for came in tables.stream(f"{_AS_THEY_CAME} AND ledger_id BETWEEN {ledgers['min']} AND {ledgers['max']}"):
        came = where(came, is_among(came, moved, _MESSAGE))
        *columns, times = (came[name].to_pylist() for name in (*_MESSAGE, "came_with"))
        found |= zip(zip(*columns, strict=True), times, strict=True)
    due = int64(rows, "deliver_at").copy()
    messages = zip(*(moved[name].to_pylist() for name in _MESSAGE), strict=True)
    due[is_moved] = [found.get(message, 0) for message in messages]
    return with_columns(rows, deliver_at=pa.array(due))


def _subscriptions_done(positions: Sequence[str], done: pa.Table) -> list[int]:
    """Returns for each position the number of subscriptions for which the message was delivered or cancelled."""
    ids = [MessagePosition.parse(position) for position in positions]
    entries = pa.table({name: pa.array([one[i] for one in ids], pa.int64()) for i, name in enumerate(_MESSAGE[:2])})
    of_them = where(done, is_among(done, entries, _MESSAGE[:2]))
    found: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for *message, subscription in zip(*(of_them[n].to_pylist() for n in (*_MESSAGE, "subscription")), strict=True):
        found[tuple(message)].add(subscription)
    return [len(found[ledger, entry, -1] | found[ledger, entry, index]) for ledger, entry, _, index in ids]


def _comes_again(topic: str, position: str, durable: Mapping[str, Position]) -> bool:
    at = MessagePosition.parse(position)
    return Position(at.ledger_id, at.entry_id) > durable.get(partition_name(topic, at.partition), Position(-1, -1))
