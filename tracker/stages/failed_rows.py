"""Rejects rows for which a tick has failed, as `tracker.containment` has found out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.holding.giving_up import NOT_DELIVERED, GivenUp, cancelled
from tracker.commands.schema import OUTCOME_ROWS
from tracker.messages import MESSAGES, concat, is_rejected, message_ids, typed, where, with_columns
from tracker.stages.tick_in_progress import TickInProgress
from tracker.subscriptions import Subscriptions


def without_failed(step: TickInProgress, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Splits due rows, as MESSAGES, into those that are handed out, and those for which the tick has failed."""
    if not step.input.fails or not rows.num_rows:
        return rows, rows.slice(0, 0)
    ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
    fails = np.array([one in step.input.fails for one in ids], np.bool_)
    return where(rows, ~fails), where(rows, fails)


def give_up(
    step: TickInProgress, rows: pa.Table, subscriptions: Subscriptions, next_sequence: Callable[[], int]
) -> GivenUp:
    """Gives rows up for all their subscriptions.

    Args:
        step: the tick; its input says why it has failed for each row.
        rows: as MESSAGES.
        subscriptions: the subscriptions of each source topic.
        next_sequence: returns the next sequence of the shard.
    """
    rows = typed(where(rows, ~is_rejected(rows)), MESSAGES)
    rejects, outcomes = [], []
    ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
    whys = pa.array([step.input.why_failed[one] for one in ids], pa.string())
    pairs = pa.table({"topic": rows["topic"], "why": whys}).group_by(["topic", "why"], use_threads=False).aggregate([])
    for topic, why in zip(pairs["topic"].to_pylist(), pairs["why"].to_pylist(), strict=True):
        is_one = pc.and_(pc.equal(rows["topic"], topic), pc.equal(whys, why))
        of_topic = rows.filter(is_one)
        for number, name in enumerate(subscriptions.names.get(topic, ())):
            if subscriptions.active(topic) >> number & 1:
                is_own = pc.equal(pc.fill_null(of_topic["subscription"], name), name)
                found = of_topic.filter(is_own)
                if not found.num_rows:
                    continue
                n, reason = found.num_rows, f"{NOT_DELIVERED}{name}: it {why}"
                outcomes.append(cancelled(found, name, reason, next_sequence(), step.tick.tick, step.tick.now))
                nothing = {"subscription": pa.nulls(n, pa.string()), "sequence": pa.nulls(n, pa.int64())}
                rejects.append(
                    with_columns(found, reason=pa.array([reason] * n), was_due=pa.nulls(n, pa.int64()), **nothing)
                )
    return GivenUp(concat(rejects), concat(outcomes, OUTCOME_ROWS))
