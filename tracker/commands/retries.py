"""Retries: messages that were handed out, and are delivered once more because a consumer failed on them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array, attempts_of, int64, with_columns
from tracker.schedule import MAX_TIME_MILLIS
from tracker.subscriptions import Subscriptions

# The clocks of the machines that send and that read may differ by this. A message that is due later than that from now
# can have reached no consumer, although it may be handed out.
CLOCKS_MILLIS = 1_000

# Characters of a row's reasons, as JSON: the oldest are left out.
_MAX_REASONS = 8_000


def retry_rows(
    rows: pa.Table,
    commands: pa.Table,
    last_due: Int64Array,
    subscriptions: Subscriptions,
    subscription: int,
    now: int,
) -> tuple[pa.Table, Int64Array]:
    """Numbers retries of messages for a subscription, and decides when they go out.

    Args:
        rows: as MESSAGES, the row of each message's last attempt.
        commands: as COMMAND_ROWS, (rows,): the command for each.
        last_due: int64, (rows,), ms since the epoch: when the message was due last, as far as it is known.
        subscriptions: those of each source topic.
        subscription: its number.
        now: ms since the epoch.

    Returns:
        the rows with `attempt` and `retry_reasons` of the retries; and when these are due, int64, (rows,), ms since the
        epoch: later than before.
    """
    given, after, fixed = (commands[name].to_pylist() for name in ("attempt", "after_millis", "deliver_at"))
    attempts, times, reasons = [], [], []
    names = subscriptions.names_of(rows["topic"], subscription).to_pylist()
    columns = [rows[name].to_pylist() for name in ("topic", "ledger_id", "entry_id", "batch_index", "retry_reasons")]
    before = attempts_of(rows).tolist()
    for i, (topic, ledger, entry, batch_index, so_far) in enumerate(zip(*columns, strict=True)):
        backoff = subscriptions.backoff(topic, subscription)
        attempt = given[i] or before[i] + 1
        if attempt > backoff.attempts:
            wait = 0
        else:
            wait = after[i] or backoff.wait_millis(attempt, f"{ledger}:{entry}:{max(batch_index, 0)} {names[i]}")
        attempts.append(attempt)
        times.append(min(fixed[i] or now + wait, MAX_TIME_MILLIS - 1))
        reasons.append(_reasons(json.loads(so_far or "[]"), commands["reason"][i].as_py() or ""))
    retried = with_columns(rows, attempt=pa.array(attempts, pa.int32()), retry_reasons=pa.array(reasons, pa.string()))
    # Views and listings tell by the time which of a message's rows was delivered.
    due = int64(rows, "deliver_at")
    least = np.maximum(last_due, np.where(due <= MAX_TIME_MILLIS, due, 0)) + 1
    return retried, np.maximum(np.array(times, np.int64), least)


def _reasons(so_far: Sequence[str], reason: str) -> str:
    reasons = [*so_far, reason]
    while len(text := json.dumps(reasons, ensure_ascii=False)) > _MAX_REASONS and len(reasons) > 1:
        del reasons[0]
    return text
