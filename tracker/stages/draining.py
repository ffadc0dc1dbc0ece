"""Hands out some of the messages that are held back for slow destinations, which stay apart from all others."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.control import Control
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.messages import concat, in_order_of_dues
from tracker.stages.tick_in_progress import TickInProgress


class Draining:
    """Drains what waits for slow destinations, the first messages first.

    Args:
        tracker: has the rows that are not sealed yet.
        control: moves messages.
    """

    def __init__(self, tracker: DelayedDeliveryTracker, control: Control) -> None:
        self._tracker = tracker
        self._control = control

    def drain(self, step: TickInProgress) -> dict[str, dict[str, tuple[int, bool]]]:
        """Moves messages for the targets of `Tick.drains` to now; returns `Effects.drained`.

        The input has as many of the sealed ones as all shards together may hand out. Those that are not sealed yet go
        with those that were due after them, or when the input has all sealed ones.
        """
        found: dict[str, dict[str, tuple[int, bool]]] = {}
        if not step.tick.drains:
            return found
        unsealed = self._tracker.find(())
        for topic, names in step.tick.drains.items():
            for name, most in names.items():
                rows = _held_for(step.input.drained, topic, name)
                others = in_order_of_dues(_held_for(unsealed, topic, name))
                until = step.input.drained_until.get(topic, {}).get(name)
                first = others.slice(0, most) if until is None else _due_by(others, until)
                n = self._control.drain(concat([rows, first]), topic, name, step.moment)
                found.setdefault(topic, {})[name] = n, until is not None or first.num_rows < others.num_rows
        return found


def _due_by(rows: pa.Table, until: int) -> pa.Table:
    return rows.filter(pc.fill_null(pc.less_equal(rows["was_due"], until), False)) if rows.num_rows else rows


def _held_for(rows: pa.Table, topic: str, name: str) -> pa.Table:
    if not rows.num_rows:
        return rows
    is_held = pc.and_(pc.equal(rows["deliver_at"], HELD_DELIVER_AT), pc.equal(rows["topic"], topic))
    return rows.filter(pc.fill_null(pc.and_(is_held, pc.equal(rows["subscription"], name)), False))
