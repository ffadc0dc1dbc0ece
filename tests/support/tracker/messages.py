"""Tables of messages and commands, ticks and releases for the tracker's tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL, SKIP
from tracker.commands.repeats import ANSWERS, OTHER_BODY
from tracker.in_flight import SENDING, SUBSCRIPTION_MASK
from tracker.message_state.changes import select_parked
from tracker.message_state.parking import Round
from tracker.messages import MESSAGES, concat
from tracker.schemas import COMMAND_ROWS
from tracker.tick import Effects, Tick

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


def resumed(stored: pa.Table, *names: str) -> dict[str, Any]:
    """The fields of a tick's input with one round of all that is parked for subscriptions of TOPIC."""
    return {"drained": select_parked(stored), "rounds": {TOPIC: {name: Round() for name in names}}}


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


def tick_at(number: int, cutoff: int, **others: Any) -> Tick:
    """A tick that ends a seal epoch, with nothing confirmed and nothing durable, but for what `others` say."""
    fields: dict[str, Any] = {
        "tick": number,
        "cutoff": cutoff,
        "seal_epoch": number,
        "load_horizon": cutoff + 1_000,
        "near_until": cutoff + 500,
        "run_id": "run",
        "confirmed": 0,
        "durable_through": 0,
        "now": cutoff,
    }
    return Tick(**(fields | others))


def release_rows(rows: pa.Table, masks: int | Sequence[int] = 1, sending: str = "{}") -> pa.Table:
    """Messages as the rows of a release.

    Args:
        masks: the subscriptions that all rows, or each of them, go to, as bits.
        sending: JSON, as `Tick.sending`.
    """
    of_rows = [masks] * rows.num_rows if isinstance(masks, int) else masks
    rows = rows.append_column(SUBSCRIPTION_MASK, pa.array(of_rows, pa.int64()))
    return rows.replace_schema_metadata({SENDING: sending})


def handed_out(effects: Effects) -> list[tuple[int, int]]:
    """Entry and subscription mask of each row that is handed out."""
    return [
        (row["entry_id"], row[SUBSCRIPTION_MASK]) for release in effects.releases for row in release.rows.to_pylist()
    ]


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
