"""Messages that can't be sent by their end: they are not sent, and get the outcome EXPIRED.

A message is judged when it is dispatched, by the tick's time: what is dispatched before is sent, however long that
takes. What is parked is judged at the end of a seal epoch, so that it expires where it is.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.context import Context
from tracker.ends import ends_of, may_expire
from tracker.giving_up import cancelled
from tracker.message_state.state import MessageState
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    are_recurring,
    concat,
    int64,
    message_ids,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from tracker.schemas import EXPIRED_ID, OUTCOME_ROWS
from tracker.subscriptions import numbers_in
from tracker.wire.delaylake_pb2 import Result


class Expiring:
    """Finds the messages of a tick that have expired, and what is answered of them.

    Args:
        context: of the shard, in a tick.
        state: learns of messages that expire where they are parked.

    Attributes:
        outcomes: as OUTCOME_ROWS, of the messages that have expired in this tick.
        n: how many messages have expired in this tick, counted for each subscription.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._state = state
        self.outcomes: list[pa.Table] = []
        self.n = 0

    def find_ended(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Returns the subscriptions for which due rows have expired, as bits, int64, (rows,).

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): the subscriptions to which each row would go, as bits.
        """
        ended = np.zeros(rows.num_rows, np.int64)
        if may_expire(rows, self._context.subscriptions):
            for number in numbers_in(masks):
                has_ended = ends_of(rows, number, self._context.subscriptions) <= self._context.now
                ended |= np.where(has_ended, masks & 1 << number, 0)
        return ended

    def wait_for_end(self, rows: pa.Table) -> BoolArray:
        """Tells which due rows are for nothing but to expire, and have not yet: bool, (rows,).

        Such a row is for one subscription, and due at its end, which no place is before, or later.
        """
        waits = np.zeros(rows.num_rows, np.bool_)
        subscriptions = self._context.subscriptions
        if rows["sequence"].null_count == rows.num_rows or not may_expire(rows, subscriptions):
            return waits
        numbers, due = subscription_numbers(rows, subscriptions.names), int64(rows, "deliver_at")
        for number in np.unique(numbers[numbers >= 0]).tolist():
            ends = ends_of(rows, number, subscriptions)
            waits |= (numbers == number) & (ends <= due) & (ends > self._context.now)
        return waits

    def expire_rows(self, rows: pa.Table, ended: Int64Array) -> None:
        """Has due rows expire for subscriptions; the caller does not send them there.

        Args:
            rows: as MESSAGES.
            ended: int64, (rows,): these subscriptions, as bits.
        """
        for number in numbers_in(ended):
            chosen = np.flatnonzero(ended >> number & 1)
            if len(chosen):
                found = typed(rows.take(pa.array(chosen)), MESSAGES)
                ends = ends_of(found, number, self._context.subscriptions)
                self.note_expired(found.append_column("ends_at", pa.array(ends)), number, self._context.next_sequence())

    def are_current(self, rows: pa.Table, number: int) -> BoolArray:
        """Tells which parked rows, as MESSAGES with a sequence, still count for a subscription: bool, (rows,)."""
        ids, state = message_ids(rows), self._state
        are: BoolArray = state.moved.find_moves(number, ids)[0] == int64(rows, "sequence")
        are &= ~state.cancelled.contains(number, ids)
        are &= ~state.delivered.contains(number, ids)
        return are

    def expire_parked(self, rows: pa.Table, number: int, sequence: int) -> None:
        """Has messages expire where they are parked for a subscription: their rows are not dispatched any more.

        Args:
            rows: as PARKED_ENDS: the rows that count. Of recurring messages the caller skips the occurrence.
            number: of the subscription.
            sequence: of the outcomes.
        """
        if (once := where(rows, ~are_recurring(rows))).num_rows:
            until = int64(once, "deliver_at") + self._context.remembered_millis
            self._state.cancel_messages(number, once, np.zeros(once.num_rows, np.bool_), until)
        self._state.unwanted_moves += rows.num_rows
        self.note_expired(rows, number, sequence)

    def note_expired(self, rows: pa.Table, number: int, sequence: int) -> None:
        """Makes the outcomes of messages that have expired, and tells the delayed index.

        Args:
            rows: as PARKED_ENDS: with the ends that have come, whatever the settings say by now.
            number: of the subscription.
            sequence: of the outcomes.
        """
        context = self._context
        reason = pc.binary_join_element_wise("not sent by", rows["ends_at"].cast(pa.string()), " ")
        rows = typed(rows, MESSAGES)
        names = context.subscriptions.names_of(rows["topic"], number)
        outcomes = with_columns(
            cancelled(rows, "", "", sequence, context.tick, context.now),
            subscription=names,
            reason=reason,
            request_id=pa.repeat(EXPIRED_ID, rows.num_rows),
            result=pa.repeat(int(Result.EXPIRED), rows.num_rows).cast(pa.int32()),
            schedule_key=rows["schedule_key"],
            attempt=rows["attempt"],
        )
        self.outcomes.append(outcomes)
        self.n += rows.num_rows
        messages = where(with_columns(rows, subscription=names), ~are_recurring(rows))
        if messages.num_rows:
            self._state.record_operation("CANCEL", messages, sequence, int64(messages, "deliver_at"))

    def all_outcomes(self) -> pa.Table:
        """Returns the outcomes, as OUTCOME_ROWS."""
        return concat(self.outcomes, OUTCOME_ROWS)
