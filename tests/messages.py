"""Tables of messages and commands for the tracker's tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.repeats import ANSWERS, OTHER_BODY
from tracker.commands.schema import CANCEL, COMMAND_ROWS, SKIP
from tracker.messages import MESSAGES, concat

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
    body: int = 1,
) -> dict[str, object]:
    """A row of COMMAND_ROWS: of the given kind, else a cancel where a time is given, else a skip."""
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
        "body": body,
        "operation": kind.upper(),
        "subscription": None,
        "result": None,
        "reason": None,
        "also_later": None,
    }


def commands(rows: Iterable[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=COMMAND_ROWS)


class Answers:
    """The outcomes of ticks, as a job finds them in its tables when a request id comes again."""

    def __init__(self) -> None:
        self._rows: list[pa.Table] = []

    def keep(self, outcomes: pa.Table, tick: int) -> None:
        """Keeps what a tick has written down."""
        is_written = pc.invert(pc.fill_null(outcomes["is_repeat"], False))
        rows = outcomes.filter(pc.and_(is_written, pc.not_equal(pc.fill_null(outcomes["reason"], ""), OTHER_BODY)))
        self._rows.append(rows.append_column("tick", pa.repeat(tick, rows.num_rows)))

    def __call__(self, request_ids: Collection[str]) -> pa.Table:
        rows = concat(self._rows, ANSWERS)
        return rows.filter(pc.is_in(rows["request_id"], pa.array(list(request_ids), pa.string())))
