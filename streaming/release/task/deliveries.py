"""Makes the records of messages that a task has sent: rows of the table `deliveries`, and spans of traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.planning.sending_order import Pending
from streaming.release.task.traces import Delivery
from tracker.in_flight import PLANNED
from tracker.messages import MESSAGES, Int64Array, empty_table, has_occurrences, position_texts, typed
from tracker.properties import position_of
from warehouse.schemas import DELIVERIES


def delivery_rows(pending: Pending, taken: Int64Array, sent_at: Sequence[int]) -> pa.Table:
    """Returns rows of the table `deliveries`, one for each message to a destination.

    Args:
        pending: the messages of a task.
        taken: int64: the indexes of those that were sent.
        sent_at: for each message in `pending` when it was sent, ms since the epoch.
    """
    lines = pending.lines
    is_delivery = np.array([line.subscription is not None for line in lines], np.bool_)
    taken = taken[is_delivery[pending.columns.line[taken]]]
    if not len(taken):
        return empty_table(DELIVERIES)
    names = [name for name in MESSAGES.names if name in (*DELIVERIES.names, "shaped_from")]
    tables = [typed(plan.rows, MESSAGES).select(names) for plan in pending.plans]
    begins = np.cumsum([0, *(table.num_rows for table in tables)])
    rows = pa.concat_tables(tables).take(pa.array(begins[pending.plan[taken]] + pending.columns.row[taken]))
    of_line = pa.array(pending.columns.line[taken])
    planned = np.array([bool(plan.kind & PLANNED) for plan in pending.plans], np.bool_)
    ticks = np.array([plan.tick for plan in pending.plans], np.int64)
    made = {
        "occurrence_at": _occurrence_at(rows),
        "position": position_texts(rows),
        "subscription": pa.array([line.subscription for line in lines], pa.string()).take(of_line),
        "sent_at": pa.array(np.array(sent_at, np.int64)[taken]),
        "short_notice": pa.array(~planned[pending.plan[taken]]),
        "destination": pa.array([line.topic for line in lines], pa.string()).take(of_line),
        "destination_message_id": pa.nulls(len(taken), pa.string()),
        "batch_id": pa.array(ticks[pending.plan[taken]]),
    }
    columns = [made[field.name] if field.name in made else rows[field.name] for field in DELIVERIES]
    return pa.table(columns, schema=DELIVERIES)


def _occurrence_at(rows: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Returns the time after which a recurring message's next occurrence is due, ms; null: it does not recur."""
    if not has_occurrences(rows):
        return pa.nulls(rows.num_rows, pa.int64())
    due = pc.coalesce(rows["shaped_from"], rows["deliver_at"])
    by_rule = pc.max_element_wise(due, pc.fill_null(rows["occurrence_at"], 0))
    return pc.if_else(pc.is_valid(rows["occurrence"]), by_rule, pa.scalar(None, pa.int64()))


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
