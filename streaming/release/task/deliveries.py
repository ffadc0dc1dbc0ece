"""Makes the records of messages that a task has sent: rows of the table `deliveries`, and spans of traces."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.traces import Delivery
from tracker.in_flight import PLANNED
from tracker.properties.message_position import position_of
from warehouse.schemas import DELIVERIES


def delivery_rows(pending: list[tuple[PlannedSend, Plan]], sent_at: list[int]) -> pa.Table:
    """Returns rows of the table `deliveries`, one for each message to a destination.

    Args:
        pending: the messages that were sent, with their plans.
        sent_at: for each message when it was sent, ms since the epoch.
    """
    chosen = [(send, plan, at) for (send, plan), at in zip(pending, sent_at, strict=True) if send.subscription]
    columns: dict[str, Any] = {
        name: [plan.columns[name][send.row] for send, plan, _ in chosen]
        for name in (
            *("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at"),
            *("attempt", "shaped_from", "occurrence"),
        )
    }
    columns["occurrence_at"] = [_occurrence_at(plan.columns, send.row) for send, plan, _ in chosen]
    columns["position"] = [str(position_of(plan.columns, send.row)) for send, plan, _ in chosen]
    columns["subscription"] = [send.subscription for send, _, _ in chosen]
    columns["sent_at"] = [at for _, _, at in chosen]
    columns["short_notice"] = [not plan.kind & PLANNED for _, plan, _ in chosen]
    columns["destination"] = [send.topic for send, _, _ in chosen]
    columns["destination_message_id"] = [None] * len(chosen)
    columns["batch_id"] = [plan.tick for _, plan, _ in chosen]
    return pa.table([pa.array(columns[f.name], f.type) for f in DELIVERIES], schema=DELIVERIES)


def _occurrence_at(columns: dict[str, list[Any]], row: int) -> int | None:
    """Returns the time after which a recurring message's next occurrence is due, ms; None: it does not recur."""
    if columns["occurrence"][row] is None:
        return None
    due = columns["deliver_at"][row] if columns["shaped_from"][row] is None else columns["shaped_from"][row]
    return max(int(due), columns["occurrence_at"][row] or 0)


def traced_delivery(send: PlannedSend, plan: Plan, sent_at: int) -> Delivery:
    """Returns the delivery of a message, for a trace; `sent_at` is in ms since the epoch."""
    columns, row = plan.columns, send.row
    return Delivery(
        properties=columns["properties"][row] or (),
        message_id=str(position_of(columns, row)),
        source=columns["topic"][row],
        subscription=str(send.subscription),
        destination=send.topic,
        published_at=columns["publish_time"][row],
        due=columns["deliver_at"][row],
        sent_at=sent_at,
        attempt=columns["attempt"][row],
        occurrence=columns["occurrence"][row],
    )
