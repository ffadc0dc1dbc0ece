"""`run_audit` while the job writes: what it has not written yet is no finding, wherever the audit has got to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from conf.settings import Settings
from warehouse.audit.accounts import run_audit
from warehouse.delta import opening
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

TOPIC = "persistent://public/default/orders"
NOW = 1_900_000_000_000


class Warehouse:
    """Tables of a job for one subscription, as it writes them."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            warehouse=f"file:{folder}/warehouse",
            pulsar={"admin_url": "http://127.0.0.1:9"},  # type: ignore[arg-type]
            routes=[{"source": TOPIC, "subscriptions": [{"name": "mail"}]}],  # type: ignore[arg-type]
        )
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()

    def append(self, table: str, *rows: dict[str, Any]) -> None:
        whole = {"topic": TOPIC, "partition": -1, "ledger_id": 7, "batch_index": -1, "batch_size": 1}
        of_table = {} if table in ("entries", "delayed_index") else {"subscription": "mail"}
        made = [
            whole | of_table | {"deliver_at": NOW, "sent_at": NOW, "position": f"7:{row['entry_id']}:-1:-1"} | row
            for row in rows
        ]
        columns = [pa.array([row.get(field.name) for row in made], field.type) for field in SCHEMAS[table]]
        self.tables.append(table, pa.table(columns, schema=SCHEMAS[table]), {})


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def answer(entry_id: int, operation: str, sequence: int, **columns: Any) -> dict[str, Any]:
    return {"entry_id": entry_id, "operation": operation, "result": "APPLIED", "sequence": sequence, **columns}


def begin(warehouse: Warehouse, batches: int) -> None:
    """Writes two messages for each batch: one that was delivered, and one that was skipped."""
    retried, restored = range(0, 2 * batches, 2), range(1, 2 * batches, 2)
    warehouse.append("deliveries", *({"entry_id": i} for i in retried))
    warehouse.append("outcomes", *(answer(i, "SKIP", 1, batch_id=0) for i in restored))
    warehouse.append("delayed_index", *({"entry_id": i, "operation": "DELAY"} for i in restored))
    warehouse.append("entries", *({"entry_id": i} for i in range(2 * batches)))


def go_on(warehouse: Warehouse, batch: int) -> list[Callable[[], None]]:
    """Returns what the job writes, in its order, when a batch retries its first message, and restores the second."""
    retried, restored = 2 * batch, 2 * batch + 1
    answers = [
        answer(retried, "RETRY", 2, attempt=1, batch_id=batch + 1),
        answer(restored, "RESTORE", 3, batch_id=batch + 1),
    ]
    row = {"entry_id": retried, "operation": "DELAY", "subscription": "mail", "sequence": 2, "attempt": 1}
    return [
        lambda: warehouse.append("outcomes", *answers),
        lambda: warehouse.append("delayed_index", row),
        lambda: warehouse.append("deliveries", {"entry_id": retried, "attempt": 1}, {"entry_id": restored}),
    ]


def test_what_is_retried_or_restored_meanwhile_is_no_finding(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = opening.open_table
    # After how many tables have been opened each of the three is written.
    histories = list(combinations_with_replacement(range(1, len(SCHEMAS)), 3))
    begin(warehouse, len(histories))
    for batch, written_at in enumerate(histories):
        steps = deque(zip(written_at, go_on(warehouse, batch), strict=True))
        opened: list[str] = []

        def write(to: int, steps: deque[tuple[int, Callable[[], None]]] = steps) -> None:
            while steps and steps[0][0] <= to:
                steps.popleft()[1]()

        def open_table(
            folder: str, name: str, opened: list[str] = opened, write: Callable[[int], None] = write
        ) -> DeltaTable:
            write(len(opened))
            opened.append(name)
            return opens(folder, name)

        with monkeypatch.context() as patched:
            patched.setattr(opening, "open_table", open_table)
            found = run_audit(warehouse.settings)
        assert found.is_clean, (written_at, found.findings)
        assert len(opened) == len(SCHEMAS)
        assert not steps, "all was written meanwhile"
    assert run_audit(warehouse.settings).counts[0]["delivered"] == 2 * len(histories)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_retry_that_is_in_no_table_is_lost_when_there_are_later_answers(warehouse: Warehouse, is_last: bool) -> None:
    begin(warehouse, 1)
    go_on(warehouse, 0)[0]()
    if not is_last:
        warehouse.append("outcomes", answer(9, "SKIP", 4, batch_id=2))
    assert list(run_audit(warehouse.settings).findings) == ([] if is_last else ["lost"])
