"""Finds the time since which messages may have been sent and not recorded: a lane may have waited for hours."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint_from_tables.rebuild.context import RebuildContext
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS, Delivered, Times, as_done
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import Int64Array, int64, where, with_columns
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Sql, all_of
from warehouse.pending import EFFECT

_SQL = NamedQueries(__file__, effect=EFFECT, held=HELD_DELIVER_AT)


def first_overdue(
    context: RebuildContext, message_state: MessageState, unsealed: pa.Table, delivered: Delivered
) -> Times:
    """Finds the least `deliver_at` of the overdue durable messages that each subscription has not got.

    No durable message that `deliveries` lacks was sent before that time, because no message is sent early. Recurring
    messages do not count here.

    Args:
        context: of the rebuild. Messages that are due up to CLOCKS_MILLIS after its time count as due, because clocks
            differ.
        message_state: has the cancelled and moved messages.
        unsealed: as of `checkpoint_from_tables.rebuild.changes.Changes`.
        delivered: the messages in `deliveries`, which do not count.

    Returns:
        the times, ms since the epoch; subscriptions without such a message are left out.
    """
    tables, names, now = context.tables, context.names, context.now
    first: Times = {}

    def note(topic: str, number: int, times: Int64Array) -> None:
        if len(times):
            first[topic, number] = min(int(times.min()), first.get((topic, number), int(times.min())))

    n = 0
    past = _SQL("single_due_before", end=now + CLOCKS_MILLIS)
    for rows in tables.stream(_SQL("delays", condition=past)):
        n += rows.num_rows
        context.reports.on_progress("delayed_index", "past rows read", n)
        rows = by_ledger(rows)
        masks, _ = subscription_mask_of(rows, message_state, delivered)
        due = int64(rows, "deliver_at")
        for topic in pc.unique(rows["topic"]).to_pylist():
            is_own = pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False)
            for number in range(len(names.get(topic, ()))):
                note(topic, number, due[is_own & (masks >> number & 1 > 0)])
    for topic in pc.unique(unsealed["source"]).to_pylist():
        own = where(unsealed, pc.equal(unsealed["source"], topic).to_numpy(zero_copy_only=False))
        for number in np.unique(int64(own, "subscription")).tolist():
            due = int64(own, "deliver_at")[int64(own, "subscription") == number]
            note(topic, number, due[due < now + CLOCKS_MILLIS])
    # Messages that were parked for a subscription until it was resumed: their rows do not have the time of that.
    for row in tables.sql(_SQL("resumed")).to_pylist():
        topic, name = row["topic"], row["subscription"]
        if name in names.get(topic, ()):
            number = list(names[topic]).index(name)
            if _was_held(tables, topic, name, number, delivered):
                note(topic, number, np.array([row["at"]]))
    return first


def subscription_mask_of(
    rows: pa.Table, message_state: MessageState, delivered: Delivered
) -> tuple[Int64Array, list[pa.Table]]:
    """Finds for each row the subscriptions for which it is pending.

    Args:
        rows: DELAY rows, with the columns of `delays_due`.
        message_state: has the cancelled and moved messages.
        delivered: the messages that have been delivered, or missed.

    Returns:
        (subscription masks, int64, shape (rows,); the delivered rows as DONE, in parts).
    """
    masks = message_state.subscription_masks(rows)
    found = []
    for number, is_delivered in itertools.chain(delivered.find(rows), delivered.missed(rows)):
        masks[is_delivered] &= ~(1 << number)
        done = rows.filter(pa.array(is_delivered))  # a copy, because a slice would keep all rows in memory
        # A row that was parked is never loaded.
        times = np.where(int64(done, "deliver_at") < HELD_DELIVER_AT, int64(done, "deliver_at"), 0)
        found.append(as_done(with_columns(done, deliver_at=pa.array(times)), np.full(done.num_rows, number)))
    return masks, found


def delays_due(start: int, end: int | None) -> Sql:
    """Returns SQL for the DELAY rows that are due from `start` to before `end`, ms since the epoch; None: and later."""
    conditions = [_SQL("due_from", start=start)]
    if end is not None:
        conditions.append(_SQL("due_before", end=end))
    return _SQL("delays", condition=all_of(conditions))


def by_ledger(rows: pa.Table) -> pa.Table:
    """Sorts rows by ledger, which makes look-ups faster."""
    return rows.take(pa.array(np.argsort(int64(rows, "ledger_id"), kind="stable")))


def _was_held(tables: Tables, topic: str, name: str, number: int, delivered: Delivered) -> bool:
    """Whether a subscription has messages that were parked and have not been delivered."""
    sql = _SQL("delays", condition=_SQL("held_for", topic=topic, subscription=name))
    return any(not delivered.contains(number, rows).all() for rows in tables.stream(sql))
