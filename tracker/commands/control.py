"""The control commands of a shard: cancel and skip, after PIP-423, restore, reschedule, retry, pause and resume."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.apply import Executor, ShardOwnership
from tracker.commands.kinds import ANSWER
from tracker.commands.match import Named, each_subscription
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import answers_of, command_steps
from tracker.commands.repeats import FirstAnswers, Repeats, RequestLog
from tracker.commands.waiting import EarlyCommands, WaitingCommands
from tracker.context import Context
from tracker.message_state.state import MessageState
from tracker.messages import MESSAGES, concat, empty_table, int64, is_rejected, where, with_columns
from tracker.rebuilt import REBUILT_TICK
from tracker.schemas import KNOWN, OUTCOME_ROWS
from tracker.subscriptions import by_topic
from tracker.wire.delaylake_pb2 import Result

_NO_MESSAGES = MESSAGES.empty_table()
_NO_OUTCOMES = OUTCOME_ROWS.empty_table()


class Control:
    """Answers the commands of a tick, and applies them to the messages that they name.

    A cancel or skip applies to a message that is known and not dispatched yet; the time that a cancel names need not be
    the message's. A command for a message that is not known waits until all messages published before it have come in.
    Then a skip is NOT_FOUND, and a cancel waits further, until two tick times after the time that it names.

    Args:
        context: of the shard.
        state: knows to which subscriptions each message still goes, and records what commands change.
        occurrences: moves recurring messages on to their next occurrence.
    """

    def __init__(self, context: Context, state: MessageState, occurrences: Occurrences) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._executor = Executor(context, state, occurrences)
        self._waiting = WaitingCommands(context.store)
        self._early = EarlyCommands(context, state, self._waiting)
        self._requests = RequestLog(context.store)

    @property
    def n_waiting(self) -> int:
        """The number of command rows that wait for their message."""
        return len(self._waiting)

    def find_repeats(
        self, commands: pa.Table, request_ids: Mapping[str, int], first_answers: FirstAnswers
    ) -> Repeats | None:
        """Finds out which commands of a tick come again, and remembers the request ids of the others.

        Args:
            commands: as COMMAND_ROWS: this shard's commands.
            request_ids: by request id, for the commands of all shards: the hash of the first command's body.
            first_answers: reads the answers to repeated request ids.

        Returns:
            what `apply_commands` needs; None: no shard has a command.
        """
        if not request_ids and not commands.num_rows:
            return None
        now = self._context.now
        remembered = self._requests.find_ids([*request_ids, *commands["request_id"].to_pylist()], now)
        repeats = Repeats(remembered, request_ids, first_answers(remembered.keys()))
        self._requests.add_ids({r: body for r, body in request_ids.items() if r not in repeats.known}, now)
        return repeats

    def apply_commands(
        self, commands: pa.Table, named: Named, repeats: Repeats, waiting_outcomes: pa.Table = _NO_OUTCOMES
    ) -> pa.Table:
        """Applies the commands of a tick.

        Args:
            commands: as COMMAND_ROWS: this shard's commands.
            named: the known messages of the entries that the commands name. The home of an entry has all of its
                messages, another shard only its own.
            repeats: tells which commands come again.
            waiting_outcomes: as OUTCOME_ROWS: the result of `apply_waiting` in this tick.

        Returns:
            as OUTCOME_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        is_repeat = repeats.are_repeats(commands)
        again, commands = where(commands, is_repeat), where(commands, ~is_repeat)
        again = where(again, self._context.are_answered_here(again))
        is_answer = pc.equal(commands["kind"], ANSWER).to_numpy(zero_copy_only=False)
        answers = answers_of(self._subscriptions, where(commands, is_answer))
        sequences = self._context.next_sequences(command_steps(answers))
        outcomes = [with_columns(answers, sequence=pa.array(sequences))]
        commands = where(commands, ~is_answer)
        is_nowhere = int64(commands, "ledger_id") < 0
        if is_nowhere.any():
            reason = "no message waits under this key"
            outcomes.append(answers_of(self._subscriptions, where(commands, is_nowhere), Result.NOT_FOUND, reason))
            commands = where(commands, ~is_nowhere)
        applied, unmatched = self._executor.apply_commands(commands, named, self._ownership(commands, named.known))
        outcomes.append(applied)
        if unmatched.num_rows:
            outcomes += self._early.answer_unmatched(unmatched)
        if again.num_rows:
            index, names = each_subscription(again, self._subscriptions.names)
            again = with_columns(again.take(pa.array(index)), subscription=pa.array(names, pa.string()))
            so_far = concat([waiting_outcomes, *outcomes], OUTCOME_ROWS)
            outcomes += repeats.answer_again(again, index, so_far, self._context.tick)
        return concat(outcomes, OUTCOME_ROWS)

    def apply_waiting(
        self,
        messages: pa.Table,
        added: pa.Table | None = None,
        elsewhere: pa.Table = _NO_MESSAGES,
        done: pa.Table = _NO_MESSAGES,
    ) -> pa.Table:
        """Applies the commands that waited for messages which came in, before these are added to the tracker.

        Args:
            messages: as MESSAGES: this shard's messages.
            added: those of `messages` that will be added to the tracker; None: all.
            elsewhere: as KNOWN: messages that other shards have, of entries whose home is this shard.
            done: those of `messages` that came in again after a rebuild and are done with.

        Returns:
            as OUTCOME_ROWS.
        """
        known = pa.concat_tables([messages.select(KNOWN.names), elsewhere.select(KNOWN.names)])
        commands = self._waiting.take_commands(known)
        if not commands.num_rows:
            return _NO_OUTCOMES
        commands = self._with_added(commands.drop_columns("tick"))
        is_done = np.append(is_rejected(messages), np.zeros(elsewhere.num_rows, np.bool_))
        ownership = self._ownership(commands, known)
        named = Named(known, is_done, concat([messages if added is None else added, done]), empty_table(MESSAGES))
        outcomes, unmatched = self._executor.apply_commands(commands, named, ownership)
        if ownership is not None:
            unmatched = where(unmatched, self._context.are_answered_here(unmatched))
        reason = "the topic has no such message"
        return concat([outcomes, answers_of(self._subscriptions, unmatched, Result.NOT_FOUND, reason)], OUTCOME_ROWS)

    def wait_again(self, topics: Collection[str]) -> None:
        """Has the waiting commands for some topics wait for messages that were published before this tick.

        The topics have their route again, or a new subscription: what was published may not have been read yet.
        """
        self._waiting.wait_again(topics, self._context.tick)

    def expire_waiting(self) -> pa.Table:
        """Removes waiting commands whose message can no longer come in; returns their outcomes, as OUTCOME_ROWS."""
        return self._early.expire_waiting()

    def rebuild(self, waiting: pa.Table, request_ids: Mapping[str, int]) -> None:
        """Restores the state after a rebuild.

        Args:
            waiting: as COMMAND_ROWS: commands that wait for their messages.
            request_ids: by request id of answered commands: the hash of the command's body.
        """
        self._waiting.add_commands(waiting, REBUILT_TICK)
        self._requests.add_ids(request_ids, self._context.now)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._waiting.save()

    def _ownership(self, commands: pa.Table, known: pa.Table) -> ShardOwnership | None:
        """Returns which commands and messages belong to this shard; None: all, because there is only one shard."""
        if self._context.shard_id.shards == 1:
            return None
        return ShardOwnership(self._context.are_answered_here(commands), self._context.shard_id.has(known))

    def _with_added(self, commands: pa.Table) -> pa.Table:
        """Adds to waiting commands with `also_later` the subscriptions that were added since."""
        later = pc.fill_null(commands["also_later"], False).to_numpy(zero_copy_only=False)
        masks = int64(commands, "subscriptions") | np.where(later, by_topic(commands, self._subscriptions.active), 0)
        return with_columns(commands, subscriptions=pa.array(masks))
