"""Measures how long queries of a delayed index of ten million pending messages take, one in a hundred cancelled.

Its files are as the job writes them: each sorted by time, with times from all over a month. Prints one JSON object: for
each query the milliseconds, the opening of the tables included, as the median and maximum of REPEATED runs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from conf.settings import Settings
from tracker.messages import MESSAGES
from tracker.schemas import CANCEL_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, to_index
from warehouse.queries.listing import PendingFilter
from warehouse.queries.pending_messages import Pending

ROWS, ROWS_A_FILE, KEYS = 10_000_000, 50_000, 1_000_000
FILES = ROWS // ROWS_A_FILE
MONTH_MILLIS = 30 * 86_400_000
REPEATED = 5
TOPIC = "persistent://public/default/orders"


def columns(schema: pa.Schema, n: int, **values: object) -> pa.Table:
    """Returns a table of n rows. A column is given as an array, (n,), or a scalar for all rows; else it is null."""

    def column(field: pa.Field) -> pa.Array:
        value = values.get(field.name)
        if isinstance(value, pa.Array | np.ndarray):
            return pa.array(value).cast(field.type)
        return pa.nulls(n, field.type) if value is None else pa.repeat(pa.scalar(value, field.type), n)

    return pa.table([column(field) for field in schema], schema=schema)


def write(tables: Tables, now: int, files: int = FILES) -> None:
    chance = np.random.default_rng(1)
    n = ROWS_A_FILE
    for number in range(files):
        due = np.sort(now + chance.integers(60_000, MONTH_MILLIS, n))
        message = chance.permutation(np.arange(number * n, (number + 1) * n))
        ledger, entry = 10 + message // n, message % n
        names = pa.array(np.char.add("customer-", (message % KEYS).astype(str)))
        properties = pa.MapArray.from_arrays(
            pa.array(np.arange(n + 1), pa.int32()), pa.repeat("order", n), pa.array(message.astype(str))
        )
        same = {"topic": TOPIC, "partition": -1, "batch_index": -1}
        rows = columns(
            MESSAGES,
            n,
            **same,
            batch_size=1,
            ledger_id=ledger,
            entry_id=entry,
            deliver_at=due,
            publish_time=now,
            event_time=0,
            producer_name="p",
            key=names,
            properties=properties,
            payload=b"x" * 100,
        )
        cancelled = chance.choice(n, n // 100, replace=False)
        cancels = columns(
            CANCEL_ROWS,
            len(cancelled),
            **same,
            operation="CANCEL",
            subscription="a",
            ledger_id=ledger[cancelled],
            entry_id=entry[cancelled],
            deliver_at=due[cancelled],
        )
        index = pa.concat_tables([to_index(rows, number + 1), cancels_to_index(cancels, number + 1)])
        tables.append("delayed_index", index, {"benchmark": number + 1})


def measure(question: Callable[[], object]) -> dict[str, int]:
    took = []
    for _ in range(REPEATED):
        begin = time.perf_counter()
        question()
        took.append((time.perf_counter() - begin) * 1000)
    return {"p50": round(float(np.median(took))), "max": round(max(took))}


def main() -> None:
    now = time.time_ns() // 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        tables = Tables(folder)
        tables.create()
        write(tables, now)
        subscriptions = [{"name": "a"}, {"name": "b"}]
        settings = Settings(warehouse=folder, routes=[{"source": TOPIC, "subscriptions": subscriptions}])  # type: ignore[arg-type]

        def ask(cursor: str | None = None, **wanted: object) -> Pending:
            return Pending(settings, TOPIC, PendingFilter.model_validate(wanted), cursor, now)

        cursor = ask().page(1_000).cursor
        questions: dict[str, Callable[[], object]] = {
            "list_100": lambda: ask().page(100),
            "list_1000": lambda: ask().page(1_000),
            "next_1000": lambda: ask(cursor).page(1_000),
            "by_key": lambda: ask(key="customer-77").page(100),
            "by_property": lambda: ask(properties={"order": "5000000"}).page(100),
            "by_entry": lambda: ask(ledger_id=42, entry_id=4_242).page(100),
            "count_by_key": lambda: ask(key="customer-77").count(),
            "count_all": lambda: ask().count(),
            "stats": lambda: ask().stats(),
        }
        millis = {name: measure(question) for name, question in questions.items()}
    print(json.dumps({"benchmark": "pending", "rows": ROWS, "files": FILES, "millis": millis}))


if __name__ == "__main__":
    main()
