"""Measures what a release costs beside the sending: from its packed rows to its plan, its deliveries and the report.

usage: release.py [ROWS] [CASE ...]

A release of ROWS (10,000) of 100 bytes with two properties and a key, as a task of a job gets it; no broker runs. CPU
is that of this process, microseconds a row of the release, the least of ROUNDS. Prints a JSON object for each case.
Stages:

  unpack      the packed rows
  plan        destinations, producers, sequence ids and producer batches, and the values that messages are built of
  order       the order in which producers get the messages
  lines       the messages of each producer
  deliveries  rows of the table `deliveries`, packed
  report      what the task reports beside
  job         the driver: the rows' times, sizes and keys
  driver      the driver: the report of the task
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.release.driver.lane_release import LaneRelease, lane_release_of
from streaming.release.driver.release_attempts import ReleaseAttempts
from streaming.release.naming import Recipient
from streaming.release.task.connections import Connections
from streaming.release.task.deliveries import delivery_rows
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from streaming.release.task.producers import lines_of
from tracker.in_flight import IN_ORDER, PLANNED, SENDING, SUBSCRIPTION_MASK
from tracker.messages import MESSAGES
from tracker.packing import pack
from warehouse.routes.known_routes import known_routes

TOPIC = "persistent://public/default/orders"
ROUNDS = 7
NOW = 1_700_000_000_000

_Value = TypeVar("_Value")


class NoConnections(Connections):
    """Gives lines no client, because none is opened."""

    def client_of(self, recipient: Recipient) -> Any:
        return None


def rows_of(n: int, **changes: Any) -> pa.Table:
    """Rows that came in entries of 50, of a second."""
    at = np.arange(n)
    columns: dict[str, Any] = {
        "topic": [TOPIC] * n,
        "partition": np.full(n, -1),
        "ledger_id": np.full(n, 4_711),
        "entry_id": at // 50,
        "batch_index": at % 50,
        "batch_size": np.full(n, 50),
        "first_index": at // 50 * 50,
        "deliver_at": NOW + at * 1_000 // n,
        "publish_time": NOW - 60_000 + at // 100,
        "event_time": np.zeros(n, np.int64),
        "producer_name": ["p-1"] * n,
        "key": [f"customer-{i % 997}" for i in range(n)],
        "properties": [[("deliverAt", str(NOW + i)), ("region", "eu")] for i in range(n)],
        "payload": [b"x" * 100] * n,
        SUBSCRIPTION_MASK: np.ones(n, np.int64),
    } | changes
    schema = MESSAGES.append(pa.field(SUBSCRIPTION_MASK, pa.int64()))
    return pa.table(
        [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(n, f.type) for f in schema], schema=schema
    )


def cases(n: int) -> dict[str, tuple[pa.Table, Settings, dict[str, Any], int]]:
    """Rows, settings, what the offset has beside the routes, and kind, by case."""

    def settings(*subscriptions: dict[str, Any]) -> Settings:
        return Settings(routes=[{"source": TOPIC, "subscriptions": list(subscriptions)}])  # type: ignore[arg-type]

    one, four = settings({"name": "a"}), settings(*({"name": name} for name in "abcd"))
    batches, no_key = {"batch_millis": 5}, {"key": [None] * n}
    held = {"was_due": NOW - 500_000 + np.arange(n) * 10, "deliver_at": np.full(n, NOW)}
    return {
        "keys": (rows_of(n), one, {}, PLANNED),
        "batches": (rows_of(n, **no_key), one, batches, PLANNED),
        "four_subscriptions": (rows_of(n, **no_key, subscription_mask=np.full(n, 15)), four, batches, PLANNED),
        "partitions": (rows_of(n), one, {"destinations": {f"{TOPIC}-a": 8}}, PLANNED),
        "held": (rows_of(n, **no_key, **held), one, batches, PLANNED),
        "retries": (rows_of(n, attempt=np.arange(n) % 3 + 1), one, {}, PLANNED),
        "order": (rows_of(n), settings({"name": "a", "order": "key"}), {}, PLANNED | IN_ORDER),
        "rate": (rows_of(n, **no_key), settings({"name": "a", "rate": {"messages_per_second": 9_000}}), batches, 1),
    }


def measured(n: int, case: tuple[pa.Table, Settings, dict[str, Any], int]) -> dict[str, float]:
    """CPU of each stage, microseconds a row."""
    rows, settings, offset_has, kind = case
    offset = Offset(routes=known_routes(settings).to_json(), now=NOW, lanes=2, **offset_has)
    body = pack(rows.replace_schema_metadata({SENDING: offset.to_tick().sending}))
    assignment = Assignment("app", 0, 7, kind, body)
    attempt = Attempt(is_first=True)
    best: dict[str, float] = {}

    def stage(name: str, work: Callable[[], _Value]) -> _Value:
        began = time.process_time()
        value = work()
        best[name] = min(best.get(name, 1e9), (time.process_time() - began) / n * 1e6)
        return value

    def once() -> None:
        stage("unpack", assignment.rows)
        plan = stage("plan", lambda: plan_release(settings, assignment, attempt))
        pending = stage("order", lambda: by_time([plan]))
        stage("lines", lambda: lines_of(settings, attempt, pending, NoConnections(settings, frozenset())))
        sent_at, every = [send.at for send in pending.sends], np.arange(len(pending))
        deliveries = stage("deliveries", lambda: pack(delivery_rows(pending, every, sent_at)))
        stage("report", lambda: pending.lines_and_plans(every))
        job = stage("job", lambda: lane_release_of(7, kind, [assignment], 7))
        stage("driver", lambda: _driver(job, deliveries))

    for _ in range(ROUNDS):
        gc.collect()
        once()
    best["plan"] -= best["unpack"]  # it unpacks them itself
    return {name: round(value, 2) for name, value in best.items()} | {"all": round(sum(best.values()), 2)}


def _driver(job: LaneRelease, deliveries: bytes) -> None:
    attempts = ReleaseAttempts(job, frozenset(), 2.0, {})
    attempts.next(frozenset(), {}, "")
    reports = [SendReport(deliveries, 0)]
    attempts.decide(reports, attempts.take(reports), [], is_broker_there=True)


if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for name, case in cases(n).items():
        if len(sys.argv) < 3 or name in sys.argv[2:]:
            print(json.dumps({"case": name, "rows": n, "cpu_us_a_row": measured(n, case)}), flush=True)
