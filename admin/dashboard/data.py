"""Reads the data for the pages from the Delta tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import TableNotFoundError

from admin.security.refusals import TABLE as REFUSALS
from conf.settings import Settings
from status.job_status import known_status
from warehouse.delta.opening import open_table
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import literal
from warehouse.maintenance.table_files import MERGES
from warehouse.queries.waiting import Pending
from warehouse.schemas import SCHEMAS, STATISTICS
from warehouse.views import Warehouse

_STATS_SECONDS = 15.0

# SQL for the request id of a call: those of its commands have a number behind it.
_REQUEST = "regexp_replace(request_id, '[.][0-9]+$', '')"

# SQL for the idempotency key of a call: its request id has a digest of role and topic behind it.
_KEY = "regexp_replace(request_id, '~[0-9a-f]{12}([.][0-9]+)?$', '')"

WHICH_ATTEMPTS = {"": "all", "waiting": "that wait", "dead": "dead letters", "redriven": "re-driven"}
_ATTEMPTS = {"waiting": "sent_at IS NULL AND attempt > 0", "dead": "is_dead_letter", "redriven": "attempt = 0"}


class Stats:
    """Counts of pending messages, cached for 15 s: with ten million messages they take 2 s. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._cached: dict[str, tuple[float, dict[str, Any]]] = {}

    def of(self, topic: str) -> dict[str, Any]:
        """Returns the counts of a topic, as `Pending.stats`.

        Raises:
            PendingError: the topic has no route, or there are no tables.
        """
        with self._lock:
            read_at, stats = self._cached.get(topic, (-_STATS_SECONDS, {}))
            if time.monotonic() - read_at >= _STATS_SECONDS:
                stats = Pending(self._settings, topic).stats()
                self._cached[topic] = time.monotonic(), stats
            return stats


def changes_log(
    settings: Settings, topics: Sequence[str], asked: dict[str, str], limit: int, n_read: int
) -> list[dict[str, Any]]:
    """Returns the newest outcomes of control commands, newest first; equal outcomes of one call are one row.

    Args:
        settings: the settings.
        topics: the source topics.
        asked: values that columns must have; empty ones are ignored. `request_id` may be that of a call, without the
            number of the command, or its idempotency key.
        limit: the maximum number of rows.
        n_read: the number of newest outcomes that are read.

    Returns:
        rows with the columns in which a row's outcomes are equal, `request` (the request id without the number of the
        command), `n`, the number of messages, `is_cut` if there may be more, and `ledger_id`, `entry_id` and
        `batch_index` of one of them.

    Raises:
        TableNotFoundError: there is no such table.
    """
    shared = "request, topic, subscription, operation, result, issued_by, reason"
    conditions = [f"{column} = {literal(value)}" for column, value in asked.items() if value and column != "request_id"]
    if request := asked.get("request_id"):
        conditions.append(f"{literal(request)} IN (request_id, {_REQUEST}, {_KEY})")
    where = " AND ".join([_of_topics(topics), *conditions])
    newest = (
        f"SELECT {shared.replace('request', f'{_REQUEST} AS request', 1)}, ledger_id, entry_id, batch_index, "  # noqa: S608
        f"applied_at, sequence FROM outcomes WHERE {where} ORDER BY applied_at DESC, sequence DESC LIMIT {n_read}"
    )
    found = Snapshot(settings.warehouse, {"outcomes": None}).sql(
        f"SELECT {shared}, max(applied_at) AS applied_at, max(sequence) AS sequence, count(*) AS n, "  # noqa: S608
        "max(ledger_id) AS ledger_id, max(entry_id) AS entry_id, max(batch_index) AS batch_index, "
        f"sum(count(*)) OVER () = {n_read} AND min(applied_at) = min(min(applied_at)) OVER () AS is_cut "
        f"FROM ({newest}) AS o GROUP BY {shared} ORDER BY applied_at DESC, sequence DESC LIMIT {limit}"
    )
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def outcomes_of(
    settings: Settings, topics: Sequence[str], request: str, result: str, subscription: str, limit: int
) -> list[dict[str, Any]]:
    """Returns the outcomes (rows of `outcomes`) of a row of `changes_log`, in the order in which they were applied.

    Raises:
        TableNotFoundError: there is no such table.
    """
    rows: list[dict[str, Any]] = (
        Snapshot(settings.warehouse, {"outcomes": None})
        .sql(
            f"SELECT * FROM outcomes WHERE {_of_topics(topics)} AND {_REQUEST} = {literal(request)} "  # noqa: S608
            f"AND result = {literal(result)} AND coalesce(subscription, '') = {literal(subscription)} "
            f"ORDER BY sequence, entry_id, batch_index LIMIT {limit}"
        )
        .to_pylist()
    )
    return rows


def refusals(settings: Settings, topics: Sequence[str], sees_all: bool, limit: int) -> list[dict[str, Any]]:
    """Returns the newest refused calls, newest first: rows of the table `refusals`.

    Args:
        settings: the settings.
        topics: the topics that the caller may see.
        sees_all: whether to return calls for other topics, too, and those that name none.
        limit: the maximum number of rows.
    """
    try:
        snapshot = Snapshot(settings.warehouse, {REFUSALS: None})
    except TableNotFoundError:
        return []
    where = "true" if sees_all else _of_topics(topics)
    rows: list[dict[str, Any]] = snapshot.sql(
        f"SELECT * FROM {REFUSALS} WHERE {where} ORDER BY refused_at DESC LIMIT {limit}"  # noqa: S608
    ).to_pylist()
    return rows


def lookahead_millis(settings: Settings) -> int:
    """Returns how long before its time a message is handed out now, ms; 0: no job is at work."""
    status = known_status(settings.warehouse)
    return 0 if status is None or status.trouble(time.time_ns() // 1_000_000) else status.lookahead_millis


def attempts_of(
    settings: Settings, topic: str, subscription: str | None, which: str, limit: int
) -> list[dict[str, Any]]:
    """Returns the newest retries of a topic's messages, newest first: rows of the view `attempts`.

    Args:
        settings: the settings.
        topic: the source topic.
        subscription: the subscription; None: all.
        which: a key of WHICH_ATTEMPTS: those that wait, dead letters, those that were re-driven, or all.
        limit: the maximum number of rows.

    Raises:
        TableNotFoundError: there are no tables.
    """
    conditions = [f"topic = {literal(topic)}", *([f"subscription = {literal(subscription)}"] if subscription else [])]
    conditions += [_ATTEMPTS[which]] if which in _ATTEMPTS else []
    rows: list[dict[str, Any]] = (
        Warehouse(settings)
        .sql(
            f"SELECT * FROM attempts WHERE {' AND '.join(conditions)} "  # noqa: S608
            f"ORDER BY applied_at DESC, ledger_id DESC, entry_id DESC LIMIT {limit}"
        )
        .to_pylist()
    )
    return rows


def storage(settings: Settings) -> list[dict[str, Any]]:
    """Returns figures of each table.

    Returns:
        for each table its name, version, numbers of files and rows, size in bytes, `age` since its last write in ms,
        `merged_at`, when its files were last merged, ms since the epoch (None: never), and columns with statistics.

    Raises:
        UnreadableWarehouseError: a table exists and can't be read.
    """
    found = []
    for name in [*SCHEMAS, REFUSALS]:
        try:
            table = open_table(settings.warehouse, name)
        except TableNotFoundError:
            continue
        files = pa.table(table.get_add_actions(flatten=True))
        found.append(
            {
                "name": name,
                "version": int(table.version()),
                "files": files.num_rows,
                "rows": pc.sum(files["num_records"]).as_py() or 0,
                "bytes": pc.sum(files["size_bytes"]).as_py() or 0,
                "age": max(0, time.time_ns() // 1_000_000 - int(table.history(1)[0]["timestamp"])),
                "merged_at": table.transaction_version(MERGES),
                "statistics": STATISTICS[name],
            }
        )
    return found


def _of_topics(topics: Sequence[str]) -> str:
    return f"topic IN ({', '.join(map(literal, topics))})"
