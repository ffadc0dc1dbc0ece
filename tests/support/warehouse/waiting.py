"""Tables in which messages wait, as the service's own functions write them, and questions to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from conf.settings import Settings
from tests.support.tracker.messages import TOPIC
from tracker.schemas import CANCEL_ROWS
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, to_index
from warehouse.queries.listing import PendingFilter, PendingMessage
from warehouse.queries.pending_messages import Pending
from warehouse.schemas import DELIVERIES, OUTCOMES

NOW = 1_800_000_000_000
SUBSCRIPTIONS = ("a", "b")


class Warehouse:
    """Tables in a folder, and questions to them."""

    def __init__(self, folder: Path) -> None:
        self.tables = Tables(str(folder))
        self.tables.create()
        self.settings = Settings(
            warehouse=str(folder),
            routes=({"source": TOPIC, "subscriptions": [{"name": name} for name in SUBSCRIPTIONS]},),  # type: ignore[arg-type]
        )
        self._writes = 0

    def seal(self, rows: pa.Table) -> None:
        self._append("delayed_index", to_index(rows, 1))

    def cancel(self, rows: Iterable[tuple[str, int, int, int, int]]) -> None:
        """Rows of (subscription, ledger_id, entry_id, batch_index, deliver_at)."""
        names = ("subscription", "ledger_id", "entry_id", "batch_index", "deliver_at")
        own = {"operation": "CANCEL", "topic": TOPIC, "partition": -1}
        cancels = [{**own, **dict(zip(names, row, strict=True))} for row in rows]
        self._append("delayed_index", cancels_to_index(pa.Table.from_pylist(cancels, schema=CANCEL_ROWS), 1))

    def deliver(self, rows: Iterable[tuple[str, int, int, int, int]], **columns: Any) -> None:
        """Rows of (subscription, ledger_id, entry_id, batch_index, deliver_at)."""
        names = ("subscription", "ledger_id", "entry_id", "batch_index", "deliver_at")
        delivered = [dict(zip(names, row, strict=True)) for row in rows]
        for row in delivered:
            row |= {"topic": TOPIC, "partition": -1, "sent_at": row["deliver_at"], **columns}
        self._append("deliveries", pa.Table.from_pylist(delivered, schema=DELIVERIES))

    def change(self, rows: Iterable[tuple[int, str, str, int, int, int | None]]) -> None:
        """Commands in ledger 1: rows of (sequence, operation, subscription, entry_id, batch_index, deliver_at)."""
        names = ("sequence", "operation", "subscription", "entry_id", "batch_index", "deliver_at")
        done = [{**dict(zip(names, row, strict=True)), "topic": TOPIC, "ledger_id": 1, "partition": -1} for row in rows]
        done = [{**row, "result": "APPLIED", "request_id": str(row["sequence"]), "applied_at": NOW} for row in done]
        self._append("outcomes", pa.Table.from_pylist(done, schema=OUTCOMES))

    def pending(self, wanted: PendingFilter | None = None, cursor: str | None = None, topic: str = TOPIC) -> Pending:
        return Pending(self.settings, topic, wanted, cursor, NOW)

    def listed(self, limit: int = 1_000, **wanted: Any) -> list[PendingMessage]:
        """All pages of a listing."""
        asked = PendingFilter(**wanted)
        page = self.pending(asked).page(limit)
        found = page.messages
        while page.cursor:
            assert len(page.messages) == limit
            page = self.pending(asked, page.cursor).page(limit)
            found = found + page.messages
        return found

    def files(self) -> list[str]:
        """The paths of the delayed index's files."""
        return DeltaTable(self.tables.path("delayed_index")).file_uris()

    def _append(self, name: str, rows: pa.Table) -> None:
        if rows.num_rows:
            self._writes += 1
            self.tables.append(name, rows, {"test": self._writes})
