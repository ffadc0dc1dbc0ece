"""Retries: messages on which a consumer failed are delivered once more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import SKIP
from tracker.commands.outcomes import ISSUED_BY
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import Int64Array, attempts_of, empty_table, int64, is_rejected, typed, where, with_columns
from tracker.properties import (
    MAX_BY_BYTES,
    MAX_REASON,
    MAX_REQUEST_BYTES,
    REDRIVE_BY,
    REDRIVE_REQUEST,
    RETRY_OF,
    RETRY_REASON,
    RETRY_SUBSCRIPTION,
    wait_millis,
    with_reason,
)
from tracker.schemas import COMMAND_ROWS, OUTCOME_ROWS, REDRIVE_ID
from tracker.subscriptions import Backoff, Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result

# Operations in outcomes: of messages that were sent back for a retry, and of dead letters that were re-driven.
SENT_BACK = "SENT_BACK"
REDRIVE = "REDRIVE"

BY_WORD = "re-driven, as the message says, by "  # begins the reason of REDRIVE outcomes

_DETAILS = ("request_id", "subscription", "operation", "reason", "issued_by", "retry_of")

# The largest difference of the clocks of the sending and the reading machine. A message that is due later than this
# from now has reached no consumer yet, even if it has been dispatched.
CLOCKS_MILLIS = 1_000


def retry_rows(
    rows: pa.Table,
    commands: pa.Table,
    last_due: Int64Array,
    last_attempts: Int64Array,
    subscriptions: Subscriptions,
    subscription: int,
    now: int,
) -> tuple[pa.Table, Int64Array]:
    """Numbers retries of messages for a subscription, and decides when they are due.

    Args:
        rows: as MESSAGES: the row of each message's last attempt.
        commands: as COMMAND_ROWS, (rows,): the command for each message.
        last_due: int64, (rows,), ms since the epoch: when the message was due last; 0: not known.
        last_attempts: int64, (rows,): the retry number that the state knows; 0: none. After a rebuild the rows may be
            those of the messages as they came.
        subscription: its number.
        now: ms since the epoch.

    Returns:
        the rows with `attempt` and `retry_reasons` of the retries; and when these are due, int64, (rows,), ms since the
        epoch: later than the message was due before.
    """
    given, after, fixed = (commands[name].to_pylist() for name in ("attempt", "after_millis", "deliver_at"))
    attempts, times, reasons = [], [], []
    names = subscriptions.names_of(rows["topic"], subscription).to_pylist()
    columns = [rows[name].to_pylist() for name in ("topic", "ledger_id", "entry_id", "batch_index", "retry_reasons")]
    before = np.maximum(attempts_of(rows), last_attempts).tolist()
    for i, (topic, ledger, entry, batch_index, so_far) in enumerate(zip(*columns, strict=True)):
        attempt = given[i] or before[i] + 1
        message = f"{ledger}:{entry}:{max(batch_index, 0)} {names[i]}"
        wait = _wait_millis(subscriptions.backoff(topic, subscription), attempt, message, after[i])
        attempts.append(attempt)
        times.append(min(fixed[i] or now + wait, MAX_TIME_MILLIS - 1))
        reasons.append(with_reason(so_far, commands["reason"][i].as_py() or ""))
    retried = with_columns(rows, attempt=pa.array(attempts, pa.int32()), retry_reasons=pa.array(reasons, pa.string()))
    # The times differ, because views and listings recognise by its time which row of a message was delivered.
    due = int64(rows, "deliver_at")
    least = np.maximum(last_due, np.where(due <= MAX_TIME_MILLIS, due, 0)) + 1
    return retried, np.maximum(np.array(times, np.int64), least)


def _wait_millis(backoff: Backoff, attempt: int, message: str, asked_millis: int | None) -> int:
    """Returns how long a retry waits, ms: as long as it was asked to, else by the backoff; a dead letter not at all."""
    return 0 if attempt > backoff.attempts else asked_millis or backoff.wait_millis(attempt, message)


@dataclass(frozen=True)
class SentBackMessages:
    """A tick's messages, after the decisions about those that were sent back for a retry, or re-driven.

    Attributes:
        messages: as MESSAGES. Those that were sent back have the time of their retry, or a reason to reject them. Those
            that were re-driven have no attempt any more.
        commands: as COMMAND_ROWS: a message that was sent back is for one subscription, so these commands skip it for
            all others, later ones included.
        outcomes: as OUTCOME_ROWS: one for each message that was sent back and not rejected, in the order of `messages`.
        row: int64, (outcomes,): the index of the message of each outcome.
    """

    messages: pa.Table
    commands: pa.Table
    outcomes: pa.Table
    row: Int64Array


def take_sent_back(messages: pa.Table, subscriptions: Subscriptions, now: int) -> SentBackMessages:
    """Decides when messages that were sent back are due, and for which subscription.

    Args:
        messages: as MESSAGES: those that came in. The ones with an attempt, which may be 0, were sent back.
        now: ms since the epoch.
    """
    none = SentBackMessages(messages, empty_table(COMMAND_ROWS), empty_table(OUTCOME_ROWS), np.zeros(0, np.int64))
    if messages["attempt"].null_count == messages.num_rows:
        return none
    is_sent_back = pc.is_valid(messages["attempt"]).to_numpy(zero_copy_only=False) & ~is_rejected(messages)
    if not is_sent_back.any():
        return none
    times, reasons = int64(messages, "deliver_at").copy(), messages["reason"].to_pylist()
    others = np.zeros(messages.num_rows, np.int64)
    names = ("topic", "ledger_id", "entry_id", "batch_index", "attempt", "properties")
    columns = [messages[name].to_pylist() for name in names]
    details = []
    for i in np.flatnonzero(is_sent_back).tolist():
        topic, ledger, entry, batch_index, attempt, properties = (column[i] for column in columns)
        given = dict(properties)
        name, known = given[RETRY_SUBSCRIPTION], list(subscriptions.names.get(topic, ()))
        number = known.index(name) if name in known else -1
        if number < 0 or not subscriptions.active(topic) >> number & 1:
            reasons[i] = f"{RETRY_SUBSCRIPTION}: the topic has no subscription {name[:100]!r}"
            continue
        wait = 0
        if attempt:
            message = f"{ledger}:{entry}:{max(batch_index, 0)} {name}"
            wait = _wait_millis(subscriptions.backoff(topic, number), attempt, message, wait_millis(given))
        times[i] = min(now + wait, MAX_TIME_MILLIS - 1)
        others[i] = ~(1 << number)
        details.append(_outcome_details(given, attempt))
    numbers = attempts_of(messages)
    attempts = pa.array(numbers, mask=numbers == 0)
    decided = with_columns(
        messages,
        deliver_at=pa.array(times),
        reason=pa.array(reasons, pa.string()),
        attempt=attempts.cast(messages["attempt"].type),
    )
    is_taken = others != 0
    taken = where(decided, is_taken)
    return SentBackMessages(
        decided, _skips(taken, others[is_taken], subscriptions), _outcomes(taken, details), np.flatnonzero(is_taken)
    )


def _outcome_details(properties: dict[str, str], attempt: int) -> dict[str, str | None]:
    """Returns the fields of a retry's outcome that come from the message's properties."""
    details: dict[str, str | None] = {"subscription": properties[RETRY_SUBSCRIPTION], "retry_of": properties[RETRY_OF]}
    if attempt:
        reason = properties.get(RETRY_REASON, "")[:MAX_REASON]
        return details | {"request_id": RETRY_OF, "operation": SENT_BACK, "reason": reason, "issued_by": ISSUED_BY}
    # Whoever may produce on the source topic can write these properties: the issuer is what the message says.
    request_id = f"{REDRIVE_ID}{properties[REDRIVE_REQUEST][:MAX_REQUEST_BYTES]}"
    issuer = properties.get(REDRIVE_BY, "")[:MAX_BY_BYTES]
    reason = f"{BY_WORD}{issuer}" if issuer else ""
    return details | {"request_id": request_id, "operation": REDRIVE, "reason": reason, "issued_by": ISSUED_BY}


def _outcomes(messages: pa.Table, details: list[dict[str, str | None]]) -> pa.Table:
    n = messages.num_rows
    values = {
        **{name: messages[name] for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index")},
        **{name: messages[name] for name in ("deliver_at", "attempt")},
        **{name: pa.array([one[name] for one in details], pa.string()) for name in _DETAILS},
        "result": pa.repeat(int(Result.APPLIED), n),
        "issued_at": messages["publish_time"],
        "sum_up": pa.repeat(True, n),
    }
    return typed(values, OUTCOME_ROWS)


def _skips(messages: pa.Table, masks: Int64Array, subscriptions: Subscriptions) -> pa.Table:
    n = messages.num_rows
    values = {
        **{name: messages[name] for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index")},
        "request_id": pa.repeat(RETRY_OF, n),
        "kind": pa.repeat(SKIP, n),
        "operation": pa.repeat(SKIP.upper(), n),
        "subscriptions": pa.array(masks & by_topic(messages, subscriptions.active)),
        "deliver_at": pa.repeat(0, n),
        "issued_by": pa.repeat(ISSUED_BY, n),
        "issued_at": messages["publish_time"],
        "sum_up": pa.repeat(True, n),
        "also_later": pa.repeat(True, n),
    }
    return typed(values, COMMAND_ROWS)
