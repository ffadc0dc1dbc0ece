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
from tracker.requests import OPERATION
from warehouse.delta.opening import open_table
from warehouse.delta.snapshot import Snapshot
from warehouse.maintenance.table_files import MERGES
from warehouse.named_queries import TRUE, NamedQueries, Sql, all_of, identifier, is_in
from warehouse.queries.pending_messages import Pending
from warehouse.schemas import SCHEMAS, STATISTICS
from warehouse.views import Warehouse

_STATS_SECONDS = 15.0

_SQL = NamedQueries(__file__)

WHICH_ATTEMPTS = {"": "all", "waiting": "that wait", "dead": "dead letters", "redriven": "re-driven"}
_ATTEMPTS = {which: _SQL(which) for which in ("waiting", "dead", "redriven")}


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
        topics: the source topics.
        asked: values that columns must have; empty ones are ignored. `request_id` may be that of a call, without the
            number of the command, or its idempotency key. Without it and `operation` answers to messages are left out.
        limit: the maximum number of rows.
        n_read: the number of newest outcomes that are read.

    Returns:
        rows with the columns in which a row's outcomes are equal, `request` (the request id without the number of the
        command), `n`, the number of messages, `is_cut` if there may be more, and `ledger_id`, `entry_id` and
        `batch_index` of one of them.

    Raises:
        TableNotFoundError: there is no such table.
    """
    conditions = [is_in("topic", topics)]
    if not (asked.get("operation") or asked.get("request_id")):
        conditions.append(_SQL("is_command", of_messages=OPERATION))
    conditions += [_equals(column, value) for column, value in asked.items() if value and column != "request_id"]
    if request := asked.get("request_id"):
        conditions.append(_SQL("is_call", request=request))
    sql = _SQL("changes", conditions=all_of(conditions), n_read=n_read, n=limit)
    rows: list[dict[str, Any]] = Snapshot(settings.warehouse, {"outcomes": None}).sql(sql).to_pylist()
    return rows


def outcomes_of(
    settings: Settings, topics: Sequence[str], request: str, result: str, subscription: str, limit: int
) -> list[dict[str, Any]]:
    """Returns the outcomes (rows of `outcomes`) of a row of `changes_log`, in the order in which they were applied.

    Raises:
        TableNotFoundError: there is no such table.
    """
    sql = _SQL(
        "outcomes_of_row",
        in_topics=is_in("topic", topics),
        request=request,
        result=result,
        subscription=subscription,
        n=limit,
    )
    rows: list[dict[str, Any]] = Snapshot(settings.warehouse, {"outcomes": None}).sql(sql).to_pylist()
    return rows


def refusals(settings: Settings, topics: Sequence[str], sees_all: bool, limit: int) -> list[dict[str, Any]]:
    """Returns the newest refused calls, newest first: rows of the table `refusals`.

    Args:
        topics: the topics that the caller may see.
        sees_all: whether to return calls for other topics, too, and those that name none.
        limit: the maximum number of rows.
    """
    try:
        snapshot = Snapshot(settings.warehouse, {REFUSALS: None})
    except TableNotFoundError:
        return []
    condition = TRUE if sees_all else is_in("topic", topics)
    rows: list[dict[str, Any]] = snapshot.sql(_SQL("refusals", condition=condition, n=limit)).to_pylist()
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
        topic: the source topic.
        subscription: the subscription; None: all.
        which: a key of WHICH_ATTEMPTS: those that wait, dead letters, those that were re-driven, or all.
        limit: the maximum number of rows.

    Raises:
        TableNotFoundError: there are no tables.
    """
    conditions = [_equals("topic", topic), *([_equals("subscription", subscription)] if subscription else [])]
    conditions += [_ATTEMPTS[which]] if which in _ATTEMPTS else []
    sql = _SQL("attempts", conditions=all_of(conditions), n=limit)
    rows: list[dict[str, Any]] = Warehouse(settings).sql(sql).to_pylist()
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


def _equals(column: str, value: str) -> Sql:
    return _SQL("equals", column=identifier(column), value=value)
