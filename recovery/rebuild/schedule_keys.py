"""Finds the schedule keys whose message waits, and those whose next message comes in again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from recovery.rebuild.delivered import partition_name
from tracker.commands.message_state.rebuilt import LIVE_KEYS, REBUILT_KEPT_MILLIS
from tracker.messages import attempts_of, concat, int64, is_among, typed, where, with_columns
from tracker.properties.message_position import MessagePosition
from warehouse.delta.tables import Tables
from warehouse.schemas import DELAYED_INDEX

# The columns of rows of `delayed_index` of which keys are made.
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

# The times with which messages came, as `LastMessage.deliver_at` has them; a moved row has another one.
_AS_THEY_CAME = """
SELECT ledger_id, entry_id, batch_index, deliver_at AS came_with FROM delayed_index
WHERE operation = 'DELAY' AND sequence IS NULL AND schedule_key IS NOT NULL
"""

# Messages to which another one of their key has yielded, and since when the key went on then.
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
    """Returns the last message of each schedule key that waits, and those that had taken a key over and come in again.

    Such a message does not find waiting any more what yielded to it: for it the key goes on as before.

    Args:
        tables: of the warehouse.
        rows: as KEYED_ROWS, those that a subscription waits for; a message may have several.
        durable: by topic partition the last entry that does not come again from the source topics.
        now: ms since the epoch.
        done: with subscription, ledger_id, entry_id and batch_index: what was delivered or cancelled. Of what was
            delivered it is enough to have what comes in again.
        names: for each source topic the names of its subscriptions.

    Returns:
        as LIVE_KEYS.
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

    Of several rows of that message it is the one with which it came, where a subscription waits for this one.
    """
    rows = where(rows, attempts_of(rows) == 0)
    is_moved = pc.is_valid(rows["sequence"]).to_numpy(zero_copy_only=False)
    rows = rows.take(pa.array(np.lexsort([~is_moved, *(int64(rows, name) for name in reversed(_MESSAGE))])))
    pairs = zip(*(rows[name].to_pylist() for name in ("topic", "schedule_key")), strict=True)
    rows = rows.take(pa.array(list({pair: i for i, pair in enumerate(pairs)}.values()), pa.int64()))
    # The sizes of batches are not known here: with this one they never become a whole entry.
    sizes = np.where(int64(rows, "batch_index") < 0, 1, np.iinfo(np.int32).max)
    since = pc.coalesce(rows["key_since"], rows["deliver_at"])  # of imported messages it is not known
    return rows.append_column("since", since).append_column("batch_size", pa.array(sizes))


def _as_they_came(tables: Tables, rows: pa.Table) -> pa.Table:
    """Gives rows of moved, held and recurring messages the time with which these have come.

    Where the delayed index does not have that any more, it is 0: the key is never looked up there then.

    Args:
        tables: of the warehouse.
        rows: as KEYED_ROWS, one for each message.
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
    """Returns for how many subscriptions each message was delivered or cancelled."""
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
