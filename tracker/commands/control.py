"""The control commands of a shard: cancel and skip, after PIP-423, restore, reschedule, retry, pause and resume."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.apply import Executor, ShardOwnership
from tracker.commands.kinds import ANSWER
from tracker.commands.match import each_subscription
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import answer, command_steps
from tracker.commands.repeats import FirstAnswers, Repeats, RequestLog, no_answers
from tracker.commands.waiting import InAdvance, WaitingCommands
from tracker.context import Moment, are_released
from tracker.message_state.cancelled import Compression
from tracker.message_state.operations import Operations
from tracker.message_state.parking import Holding, Pace
from tracker.message_state.remaining import Remaining
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    int64,
    is_rejected,
    where,
    with_columns,
)
from tracker.rebuilt import REBUILT_TICK, Rebuilt
from tracker.schemas import KNOWN, OUTCOME_ROWS, PauseChange
from tracker.sharding import ShardId
from tracker.store import Store
from tracker.subscriptions import Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result

_META = "control"

_NO_MESSAGES = MESSAGES.empty_table()
_NO_OUTCOMES = OUTCOME_ROWS.empty_table()


class Control:
    """Applies commands, and decides to which subscriptions each message goes.

    A cancel or skip applies to a message that is known and not handed out yet; the time that a cancel names need not be
    the message's. A command for a message that is not known waits until all messages published before it have come in.
    Then a skip is NOT_FOUND, and a cancel waits further, until two tick times after the time that it names.

    Messages for a subscription that is paused, whose destination is unwritable, or whose topic has no route are held
    back: see `Holding`.

    Args:
        store: where the state is kept.
        subscriptions: the subscriptions of each source topic. A mapping of topic to names means that the settings have
            all of them.
        tick_time_millis: Pulsar's tick time, ms. A cancelled message is remembered until two of them after its time.
        compression: how the bitmaps of cancelled messages are compressed.
        shard_id: which shard this is; None: the only one.

    Attributes:
        remaining: knows to which subscriptions each message still goes.
        cancelled: the messages that are cancelled or skipped.
        remembered_millis: how long after its time a cancelled message is remembered, ms.
        operations: collects the rows that commands, and other moves, add to the delayed index.
        occurrences: moves recurring messages on to their next occurrence.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        tick_time_millis: int,
        compression: Compression | None = None,
        shard_id: ShardId | None = None,
    ) -> None:
        self._store = store
        self._shard_id = shard_id or ShardId()
        self._subscriptions = Subscriptions.of(subscriptions)
        self.remembered_millis = 2 * tick_time_millis
        self._saved = store.get(_META, (0, 0))
        # Earlier versions did not save the last values: they are empty.
        meta: list[Any] = json.loads(self._saved) if self._saved else [0, 0, 0, {}]
        cancels, (unwanted_moves, paused) = meta[:2], meta[2:4]
        defaults: list[Any] = [{}, {}, []]
        unwanted, numbers, draining = [*meta[4:], *defaults[len(meta) - 4 :]]
        self.remaining = Remaining(store, self._subscriptions, compression, unwanted_moves, unwanted, numbers)
        self.operations = Operations(store, cancels, self.remaining.moved, self._subscriptions, self.remembered_millis)
        self.cancelled = self.remaining.cancelled
        self._holding = Holding(
            self._subscriptions, self.remaining, self.operations, self.remembered_millis, paused, draining
        )
        self.occurrences = Occurrences(store, self.operations, self._subscriptions)
        self._executor = Executor(
            self._subscriptions, self.remaining, self.operations, self.occurrences, self.remembered_millis
        )
        self._waiting = WaitingCommands(store)
        self._in_advance = InAdvance(
            self._waiting, self._subscriptions, self.operations, self._is_home, self.remembered_millis
        )
        self._requests = RequestLog(store)

    @property
    def has_exceptions(self) -> bool:
        """Whether any message has been cancelled, skipped, moved, or was delivered before a rebuild."""
        return self.remaining.has_exceptions

    @property
    def unwanted(self) -> int:
        """The number of rows that still wait, but go to no subscription any more."""
        return self.remaining.unwanted

    @property
    def waiting(self) -> int:
        """The number of command rows that wait for their message."""
        return len(self._waiting)

    def begin(
        self, unwritable: Mapping[str, int], pace: Pace, now: int = 0, last_cutoff: int = 0, cutoff: int = 0
    ) -> None:
        """Begins a tick.

        Args:
            unwritable: by topic: a mask of the subscriptions whose destinations are unwritable.
            pace: the pace of the rows that `release_held` moves.
            now: time of this tick, ms since the epoch.
            last_cutoff: of the previous tick, ms since the epoch.
            cutoff: of this tick, ms since the epoch.
        """
        self._holding.unwritable = unwritable
        self._holding.begin(pace, now, last_cutoff, cutoff)

    @property
    def paused(self) -> Mapping[str, int]:
        """By topic: a mask of the subscriptions that are paused."""
        return self._holding.paused

    @property
    def n_queued_behind(self) -> int:
        """How many messages this tick has moved behind those that were held back."""
        return self._holding.n_queued_behind

    def held_back(self, topic: str) -> int:
        """Returns a mask of a topic's subscriptions whose messages are held back now: see `Holding.held_back`."""
        return self._holding.held_back(topic)

    def subscription_mask(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions to which rows go: see `Remaining.subscription_mask`."""
        return self.remaining.subscription_mask(rows)

    def are_done(self, messages: pa.Table) -> BoolArray:
        """Tells which messages that came in are done with: see `Remaining.are_done`."""
        return self.remaining.are_done(messages)

    def count_unwanted(self, messages: pa.Table) -> None:
        """Counts new messages that go to no subscription, as `unwanted`.

        Args:
            messages: as MESSAGES: messages to be added to the tracker.
        """
        if self.has_exceptions:
            self.remaining.count_unwanted(where(messages, self.remaining.mask_with_removed(messages) == 0), 1)

    def moved_to(self, known: pa.Table) -> set[int]:
        """Returns the times to which messages have been moved, for any subscription.

        Args:
            known: as KNOWN.

        Returns:
            ms since the epoch; 0 is among them if a message has not been moved.
        """
        return self.remaining.moved_to(known)

    def take_moves(self) -> pa.Table:
        """Removes and returns the new rows of moved messages, as MESSAGES, which the caller adds to the tracker."""
        return self.operations.take_moves()

    def take_cancels(self) -> pa.Table:
        """Removes and returns the rows of type CANCEL, RESTORE and MOVE for the delayed index, as CANCEL_ROWS."""
        return self.operations.take_cancels()

    def next_sequence(self, moment: Moment) -> int:
        """Returns the next sequence of this shard: see `Operations.next_sequence`."""
        return self.operations.next_sequence(moment)

    def hand_out(self, rows: pa.Table, moment: Moment) -> Int64Array:
        """Decides to which subscriptions due rows go now, and holds them back for subscriptions that are held back.

        Args:
            rows: as MESSAGES, removed from the tracker.
            moment: of this tick.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i. A rejected message goes to none.
        """
        rejected = is_rejected(rows)
        left = self.remaining.mask_with_removed(rows)
        self.remaining.count_unwanted(where(rows, ~rejected & (left == 0)), -1)
        masks = self.remaining.without_removed(rows, left)
        return self._holding.hold(rows, np.where(rejected, 0, masks), moment)

    def without_retried(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Returns masks without subscriptions that have a later retry of a row: see `Remaining.without_retried`."""
        return self.remaining.without_retried(rows, masks)

    def keep_open(self, rows: pa.Table, moment: Moment) -> pa.Table:
        """Returns rows to be sealed for the messages of a release that have not arrived: see `Holding.keep_open`."""
        return self._holding.keep_open(rows, moment)

    def reinstate(self, topics: Collection[str], rows: pa.Table, moment: Moment) -> None:
        """Resumes topics whose route is back, or that have a new subscription.

        Messages published before now may not have been read yet: the topics' waiting commands wait for them anew.

        Args:
            topics: their names.
            rows: as in `release_held`.
            moment: of this tick.
        """
        self._waiting.wait_anew(topics, moment.tick)
        self.release_held(rows, moment)

    def release_held(self, rows: pa.Table, moment: Moment) -> None:
        """Moves to now the rows that are not held back any more: see `Holding.release`."""
        self._holding.release(rows, moment)

    def recall(self, rows: pa.Table, moment: Moment) -> None:
        """Holds back messages that were handed out, and of which nothing was sent: see `Holding.recall`."""
        self._holding.recall(rows, moment)

    def drain(self, rows: pa.Table, topic: str, name: str, moment: Moment) -> int:
        """Moves messages that are held back for a slow destination to now: see `Holding.drain`."""
        return self._holding.drain(rows, topic, name, moment)

    def apply_waiting(
        self,
        messages: pa.Table,
        moment: Moment,
        added: pa.Table | None = None,
        elsewhere: pa.Table = _NO_MESSAGES,
        done: pa.Table = _NO_MESSAGES,
    ) -> pa.Table:
        """Applies the commands that waited for messages which came in, before these are added to the tracker.

        Args:
            messages: as MESSAGES: this shard's messages.
            moment: of this tick.
            added: those of `messages` that will be added to the tracker; None: all.
            elsewhere: as KNOWN: messages that other shards have, of entries whose home is this shard.
            done: those of `messages` that came in again after a rebuild and are done with.

        Returns:
            as OUTCOME_ROWS.
        """
        known = pa.concat_tables([messages.select(KNOWN.names), elsewhere.select(KNOWN.names)])
        commands = self._waiting.take(known)
        if not commands.num_rows:
            return _NO_OUTCOMES
        commands = self._with_added(commands.drop_columns("tick"))
        is_done = np.append(is_rejected(messages), np.zeros(elsewhere.num_rows, np.bool_))
        ownership = self._ownership(commands, known)
        payload_rows = concat([messages if added is None else added, done])
        outcomes, unmatched = self._executor.apply(commands, known, is_done, payload_rows, moment, ownership)
        if ownership is not None:
            unmatched = where(unmatched, self._is_home(unmatched))
        return concat(
            [outcomes, answer(self._subscriptions, unmatched, Result.NOT_FOUND, "the topic has no such message")],
            OUTCOME_ROWS,
        )

    def _ownership(self, commands: pa.Table, known: pa.Table) -> ShardOwnership | None:
        """Returns which commands and messages belong to this shard; None: all, because there is only one shard."""
        if self._shard_id.shards == 1:
            return None
        return ShardOwnership(self._is_home(commands), self._shard_id.has(known))

    def _is_home(self, commands: pa.Table) -> BoolArray:
        """Tells which commands this shard answers if it does not know their message: bool, (rows,)."""
        by_key: BoolArray = pc.is_valid(commands["schedule_key"]).to_numpy(zero_copy_only=False)
        return self._shard_id.is_home(commands) | by_key

    def _with_added(self, commands: pa.Table) -> pa.Table:
        """Adds to waiting commands with `also_later` the subscriptions that were added since."""
        later = pc.fill_null(commands["also_later"], False).to_numpy(zero_copy_only=False)
        masks = int64(commands, "subscriptions") | np.where(later, by_topic(commands, self._subscriptions.active), 0)
        return with_columns(commands, subscriptions=pa.array(masks))

    def apply(
        self,
        commands: pa.Table,
        request_ids: Mapping[str, int],
        known: pa.Table,
        is_new: BoolArray,
        moment: Moment,
        *,
        payload_rows: pa.Table = _NO_MESSAGES,
        in_state: pa.Table = _NO_MESSAGES,
        pause_changes: Sequence[PauseChange] = (),
        held: pa.Table = _NO_MESSAGES,
        first_answers: FirstAnswers = no_answers,
        waiting_outcomes: pa.Table = _NO_OUTCOMES,
    ) -> pa.Table:
        """Applies the commands of a tick.

        Args:
            commands: as COMMAND_ROWS: this shard's commands.
            request_ids: by request id, for the commands of all shards: the hash of the first command's body.
            known: as KNOWN: the known messages of the entries that the commands name. The home of an entry has all of
                its messages, another shard only its own.
            is_new: bool, (known,): the message came in in this tick.
            moment: of this tick.
            payload_rows: as MESSAGES: rows of the messages that commands move or restore.
            in_state: as MESSAGES: those of the payload rows that have not been handed out.
            pause_changes: pauses and resumes of all shards' commands.
            held: as MESSAGES: all rows held back; needed only if a change resumes.
            first_answers: reads the answers to repeated request ids.
            waiting_outcomes: as OUTCOME_ROWS: the result of `apply_waiting` in this tick.

        Returns:
            as OUTCOME_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        if not request_ids and not commands.num_rows:
            return _NO_OUTCOMES
        remembered = self._requests.find([*request_ids, *commands["request_id"].to_pylist()], moment.now)
        repeats = Repeats(remembered, request_ids, first_answers(remembered.keys()))
        self._holding.pause(change for change in pause_changes if change.request_id not in repeats.known)
        self.release_held(held, moment)
        self._requests.add({r: body for r, body in request_ids.items() if r not in repeats.known}, moment.now)
        is_repeat = repeats.are_repeats(commands)
        again, commands = where(commands, is_repeat), where(commands, ~is_repeat)
        again = where(again, self._is_home(again))
        is_answer = pc.equal(commands["kind"], ANSWER).to_numpy(zero_copy_only=False)
        answers = answer(self._subscriptions, where(commands, is_answer))
        sequences = self.operations.next_sequences(moment, command_steps(answers))
        outcomes = [with_columns(answers, sequence=pa.array(sequences))]
        commands = where(commands, ~is_answer)
        is_nowhere = int64(commands, "ledger_id") < 0
        if is_nowhere.any():
            nowhere = where(commands, is_nowhere)
            outcomes.append(answer(self._subscriptions, nowhere, Result.NOT_FOUND, "no message waits under this key"))
            commands = where(commands, ~is_nowhere)

        is_released = are_released(known, is_new, moment)
        ownership = self._ownership(commands, known)
        applied, unmatched = self._executor.apply(
            commands, known, is_released, payload_rows, moment, ownership, in_state
        )
        outcomes.append(applied)
        if unmatched.num_rows:
            outcomes += self._in_advance.wait(unmatched, moment)
        if again.num_rows:
            index, names = each_subscription(again, self._subscriptions.names)
            again = with_columns(again.take(pa.array(index)), subscription=pa.array(names, pa.string()))
            outcomes += repeats.answer(again, index, concat([waiting_outcomes, *outcomes], OUTCOME_ROWS), moment.tick)
        return concat(outcomes, OUTCOME_ROWS)

    def expire(self, moment: Moment) -> pa.Table:
        """Removes waiting commands whose message can no longer come in; returns their outcomes, as OUTCOME_ROWS."""
        return self._in_advance.expire(moment)

    def rebuild(self, rebuilt: Rebuilt, now: int) -> None:
        """Restores the state after a rebuild.

        Args:
            rebuilt: this shard's part.
            now: ms since the epoch.
        """
        self.remaining.rebuild(rebuilt)
        self._holding.paused = dict(rebuilt.paused)
        self.occurrences.rebuild(rebuilt.occurrences)
        self._waiting.add(rebuilt.waiting, REBUILT_TICK)
        self._requests.add(rebuilt.request_ids, now)

    def drop_expired(self, cutoff: int) -> None:
        """Forgets cancelled, delivered and moved messages that are past at the cutoff, ms since the epoch."""
        self.remaining.drop_expired(cutoff)

    def save(self) -> None:
        """Writes the changes to the store."""
        self.remaining.save()
        self.occurrences.save()
        self._waiting.save()
        unwanted_moves, unwanted, numbers = self.remaining.counts
        meta = [*self.operations.counts, unwanted_moves, self._holding.paused, unwanted, numbers]
        if self._holding.draining:
            meta.append(self._holding.draining)
        data = json.dumps(meta).encode()
        if data != self._saved:
            self._store.put(_META, (0, 0), data)
            self._saved = data
