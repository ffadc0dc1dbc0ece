"""Tables of messages and commands for the tracker's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from tracker.commands import CANCEL, COMMANDS, SKIP
from tracker.messages import MESSAGES

TOPIC = "persistent://public/default/t"


def messages(rows: Iterable[tuple[int, int, int]], **columns: object) -> pa.Table:
    """Messages alone in their entries, of (ledger_id, entry_id, deliver_at); further columns are the same for all."""
    return batches([(ledger, entry, -1, 1, due) for ledger, entry, due in rows], **columns)


def batches(rows: Iterable[tuple[int, int, int, int, int]], **columns: object) -> pa.Table:
    """Messages of (ledger_id, entry_id, batch_index, batch_size, deliver_at)."""
    defaults = {
        "topic": TOPIC,
        "partition": -1,
        "first_index": None,
        "publish_time": 0,
        "event_time": 0,
        "producer_name": "p",
        "key": None,
        "ordering_key": None,
        "properties": [],
        "payload": b"",
        "reason": None,
        "ordering_key_bytes": None,
        "key_encoding": None,
        "schema_version": None,
    }
    names = ("ledger_id", "entry_id", "batch_index", "batch_size", "deliver_at")
    return pa.Table.from_pylist(
        [{**defaults, **columns, **dict(zip(names, row, strict=True))} for row in rows], schema=MESSAGES
    )


def positions(rows: pa.Table) -> list[tuple[int, int]]:
    return list(zip(rows["ledger_id"].to_pylist(), rows["entry_id"].to_pylist(), strict=True))


def times(rows: pa.Table) -> list[int]:
    due: list[int] = rows["deliver_at"].to_pylist()
    return due


def command(
    request_id: str,
    ledger_id: int,
    entry_id: int,
    subscriptions: Sequence[int] = (0,),
    batch_index: int = -1,
    cancel_at: int | None = None,
    topic: str = TOPIC,
    partition: int = -1,
    kind: str | None = None,
) -> dict[str, object]:
    """A row of COMMANDS: of the given kind, else a cancel where a time is given, else a skip."""
    kind = kind or (SKIP if cancel_at is None else CANCEL)
    return {
        "request_id": request_id,
        "kind": kind,
        "topic": topic,
        "partition": partition,
        "subscriptions": sum(1 << s for s in subscriptions),
        "ledger_id": ledger_id,
        "entry_id": entry_id,
        "batch_index": batch_index,
        "deliver_at": cancel_at or 0,
        "issued_by": "tester",
        "issued_at": 1,
        "operation": kind.upper(),
        "subscription": None,
        "result": None,
        "reason": None,
    }


def commands(rows: Iterable[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=COMMANDS)
