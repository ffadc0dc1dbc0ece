"""Commands in advance: they come before their message, like PIP-423's cancel in advance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL, POSTPONE, RESCHEDULE, SKIP
from tracker.commands.match import each_subscription
from tracker.commands.moment import Moment
from tracker.commands.operations import Operations
from tracker.commands.outcome_rows import answer, command_steps
from tracker.commands.requests.waiting import WaitingCommands
from tracker.messages import BoolArray, int64, where, with_columns
from tracker.subscriptions import Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result

_NO_ROOM = "no such message is known, and too many commands wait already for others that have not come"


class InAdvance:
    """Decides which commands wait for their message, for how long, and how they are answered.

    Args:
        waiting: keeps the commands that wait.
        subscriptions: the subscriptions of each source topic.
        operations: collects the cancels that wait, for the delayed index.
        is_home: tells which commands this shard answers if it does not know their message: bool, (rows,).
        remembered_millis: how long a cancel waits after the time that it names, ms.
    """

    def __init__(
        self,
        waiting: WaitingCommands,
        subscriptions: Subscriptions,
        operations: Operations,
        is_home: Callable[[pa.Table], BoolArray],
        remembered_millis: int,
    ) -> None:
        self._waiting = waiting
        self._subscriptions = subscriptions
        self._operations = operations
        self._is_home = is_home
        self._remembered_millis = remembered_millis

    def wait(self, commands: pa.Table, moment: Moment) -> list[pa.Table]:
        """Answers commands whose message is not known, and keeps those whose message may still come in.

        Args:
            commands: as COMMAND_ROWS, at least one.
            moment: of this tick.

        Returns:
            tables as OUTCOME_ROWS.
        """
        is_cancel = pc.equal(commands["kind"], CANCEL).to_numpy(zero_copy_only=False)
        has_all_come = (moment.ingested_through >= moment.tick) & ~self._is_without_route(commands)
        is_past = is_cancel & (int64(commands, "deliver_at") <= moment.released) & has_all_come
        is_nowhere = ~is_cancel & has_all_come
        waits = ~is_past & ~is_nowhere
        has_room = np.ones(commands.num_rows, np.bool_)
        has_room[waits] = self._waiting.have_room(where(commands, waits))
        waiting = where(commands, waits & has_room)
        self._waiting.add(waiting, moment.tick)
        # Several shards may get a command, because of schedule keys. The home of its entry answers it.
        is_home = self._is_home(commands)
        commands, has_room = where(commands, is_home), has_room[is_home]
        is_past, is_nowhere = is_past[is_home], is_nowhere[is_home]
        waiting = where(waiting, self._is_home(waiting))
        outcomes = [
            answer(
                self._subscriptions,
                where(commands, is_past),
                Result.TOO_LATE,
                "no such message is known, and its time is past",
            ),
            answer(self._subscriptions, where(commands, is_nowhere), Result.NOT_FOUND, "the topic has no such message"),
            answer(self._subscriptions, where(commands, ~has_room), Result.INVALID, _NO_ROOM),
            self._let_wait(waiting, moment),
        ]
        # As in PIP-423, a cancel in advance is due two ticks before the message that it is for.
        taking = where(waiting, np.isin(waiting["kind"].to_pylist(), [CANCEL, SKIP]))
        index, names = each_subscription(taking, self._subscriptions.names)
        due = np.maximum(int64(taking, "deliver_at") - self._remembered_millis, moment.now)[index]
        rows = with_columns(taking.take(pa.array(index)), subscription=pa.array(names, pa.string()))
        self._operations.add("CANCEL", rows, self._operations.next_sequence(moment), due)
        return outcomes

    def expire(self, moment: Moment) -> pa.Table:
        """Removes waiting commands whose message can no longer come in; returns their outcomes, as OUTCOME_ROWS."""

        def is_expired(rows: pa.Table) -> BoolArray:
            is_cancel: BoolArray = pc.equal(rows["kind"], CANCEL).to_numpy(zero_copy_only=False)
            is_past = int64(rows, "deliver_at") + self._remembered_millis <= moment.released
            return (
                (int64(rows, "tick") <= moment.ingested_through)
                & (~is_cancel | is_past)
                & ~self._is_without_route(rows)
            )

        expired = self._waiting.take_where(is_expired, moment.released - self._remembered_millis)
        expired = where(expired, self._is_home(expired))
        return answer(self._subscriptions, expired, Result.NOT_FOUND, "no such message has come")

    def _let_wait(self, commands: pa.Table, moment: Moment) -> pa.Table:
        """Builds the WAITING outcomes of commands, with the sequences and times that a rebuild needs.

        The rows of one command have the same sequence.
        """
        answers = answer(self._subscriptions, commands, Result.WAITING, "no such message has come yet")
        if not answers.num_rows:
            return answers
        sequences = self._operations.next_sequences(moment, command_steps(answers))
        index, _ = each_subscription(commands, self._subscriptions.names)
        has_time = pc.is_in(commands["kind"], pa.array([CANCEL, POSTPONE, RESCHEDULE]))
        times = pc.if_else(has_time, commands["deliver_at"], None)
        # A retry has a time only after a rebuild. Until then its wait counts from now on.
        after = pc.greater(pc.fill_null(commands["after_millis"], 0), 0)
        times = pc.if_else(after, pc.add(moment.now, commands["after_millis"]), times).take(pa.array(index))
        return with_columns(answers, sequence=pa.array(sequences), deliver_at=times)

    def _is_without_route(self, rows: pa.Table) -> BoolArray:
        """Tells which commands are for topics without a route: these are not read, so a message may still come in."""
        return by_topic(rows, lambda topic: topic in self._subscriptions.without_route) > 0
