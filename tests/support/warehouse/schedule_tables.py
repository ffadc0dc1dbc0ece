"""Tables with recurring messages, as the job writes them: for tests of what is read from them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.settings import Settings
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

TOPIC = "persistent://public/default/orders"
DAY = 86_400_000
NINE = int(datetime(2030, 1, 7, 9, tzinfo=UTC).timestamp()) * 1_000  # a Monday
PUBLISHED = NINE - DAY // 2


class ScheduleTables:
    """Tables in a folder; each method appends to them."""

    def __init__(self, folder: Path, subscriptions: tuple[str, ...] = ("a", "b")) -> None:
        self.tables = Tables(str(folder))
        self.tables.create()
        self.settings = Settings.model_validate(
            {
                "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
                "warehouse": f"file:{folder}",
                "routes": [{"source": TOPIC, "subscriptions": [{"name": name} for name in subscriptions]}],
            }
        )
        self._writes = 0

    def came(
        self, entry: int, first: int = NINE, batch_index: int = -1, batch_size: int = 1, **properties: str
    ) -> None:
        """A recurring message came; every day at nine unless `repeat` says otherwise."""
        given = {"repeat": "0 9 * * *", **properties}
        self._append(
            "delayed_index",
            **_position(entry, batch_index),
            operation="DELAY",
            deliver_at=first,
            batch_size=batch_size,
            properties=list(given.items()),
            key=f"k{entry}",
            publish_time=PUBLISHED,
            producer_name="p",
            event_time=0,
            occurrence=1,
        )

    def delivered(
        self,
        subscription: str,
        entry: int,
        number: int,
        at: int,
        batch_index: int = -1,
        by_rule: int | None = None,
    ) -> None:
        """An occurrence was delivered."""
        self._append(
            "deliveries",
            **_position(entry, batch_index),
            subscription=subscription,
            occurrence=number,
            occurrence_at=by_rule,
            deliver_at=at,
            sent_at=at,
        )

    def waits(
        self, subscription: str, entry: int, number: int, at: int, sequence: int, by_rule: int | None = None
    ) -> None:
        """An occurrence has a row of its own."""
        self._append(
            "delayed_index",
            **_position(entry, -1),
            operation="DELAY",
            subscription=subscription,
            sequence=sequence,
            deliver_at=at,
            occurrence=number,
            occurrence_at=by_rule,
        )

    def moved(self, subscription: str, entry: int, at: int, sequence: int) -> None:
        """A row that waits has taken the place of the one before it."""
        of_row = {"subscription": subscription, "sequence": sequence, "deliver_at": at}
        self._append("delayed_index", **_position(entry, -1), operation="MOVE", **of_row)

    def commanded(self, operation: str, subscription: str, entry: int, sequence: int, **columns: Any) -> None:
        """A command was applied to a message."""
        row = {**_position(entry, -1), "operation": operation, "result": "APPLIED", "subscription": subscription}
        self._append("outcomes", **row, sequence=sequence, applied_at=NINE, **columns)

    def _append(self, name: str, **row: Any) -> None:
        self._writes += 1
        self.tables.append(name, pa.Table.from_pylist([row], schema=SCHEMAS[name]), {"test": self._writes})


def _position(entry: int, batch_index: int) -> dict[str, Any]:
    return {"topic": TOPIC, "partition": -1, "ledger_id": 7, "entry_id": entry, "batch_index": batch_index}
