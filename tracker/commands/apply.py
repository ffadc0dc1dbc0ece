"""Applying commands: cancel and skip, after PIP-423, restore, reschedule, pause and resume."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.chunks import Chunks
from tracker.commands.cancelled import CancelledMessages, Compression
from tracker.commands.match import each_subscription, entry_results, match, results_of, rows_of, runs, times_of
from tracker.commands.moves import HELD_DELIVER_AT, Moved
from tracker.commands.rebuilt import REBUILT_TICK, Rebuilt, add_positions
from tracker.commands.repeats import FirstAnswers, Repeats, no_answers
from tracker.commands.request_log import RequestLog
from tracker.commands.schema import (
    ANSWER,
    CANCEL,
    CANCEL_ROWS,
    KNOWN,
    OUTCOME_ROWS,
    PAST,
    RESCHEDULE,
    RESTORE,
    SEQUENCE_BITS,
    SKIP,
    PauseChange,
)
from tracker.commands.waiting import WaitingCommands
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    int64,
    is_among,
    is_rejected,
    message_ids,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from tracker.store import Store
from tracker.subscriptions import ALSO_LATER, Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result

_META = "control"


_NO_MESSAGES = MESSAGES.empty_table()
_NO_OUTCOMES = OUTCOME_ROWS.empty_table()

# Of what was held back, a shard hands out no more at once, so that it comes in releases of moderate size.
RELEASED_A_SECOND = 5_000

# Of what is held back in one tick, so many messages keep their order.
_MAX_IN_ORDER = 1 << 19


@dataclass(frozen=True)
class Moment:
    """When commands are applied, and what has been handed out by then. Times are ms since the epoch."""

    tick: int  # the tick's number
    now: int  # time
    released: int  # time: messages due then or before have been handed out, unless they came in only in this tick
    ingested_through: int  # a tick's number: all messages published before the commands up to it have come in
    # Where the clock has been set back: messages due up to `ahead`, a time, had been handed out before that, but for
    # those that wait here.
    ahead: int = 0
    waiting: pa.Table = field(default_factory=MESSAGES.empty_table)


@dataclass(frozen=True)
class _Pairs:
    """Commands, and the known messages that each names: `command` and `row` are indexes, a pair each."""

    commands: pa.Table
    command: Int64Array
    known: pa.Table
    row: Int64Array
    is_released: BoolArray  # of each known message
    payload_rows: pa.Table
    payload_row: Int64Array  # of each known message its row in `payload_rows`, -1: none


class Control:
    """Applies commands, and decides for each message to which subscriptions it goes.

    A cancel or skip applies to a message that is known and not handed out yet; the time that a cancel names need not be
    the message's. For a message that is not known the command waits until all messages published before it have come
    in: then a skip is NOT_FOUND, and a cancel goes on waiting until two ticks after the time it names.

    Messages for a subscription that is paused, whose destination can't be written, or whose topic has no route are held
    back: when they come due, they are moved to HELD_DELIVER_AT, until they are resumed.

    Args:
        store: where the state is kept.
        subscriptions: those of each source topic; a mapping of topic to names where all of them are in the settings.
        tick_time_millis: Pulsar's tick, ms; cancelled messages are remembered for two of them beyond their time.
        compression: of the bitmaps of cancelled messages.

    Attributes:
        cancelled: the messages that are cancelled or skipped.
        unwritable: by topic a mask of the subscriptions whose destinations can't be written; set for each tick.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        tick_time_millis: int,
        compression: Compression | None = None,
    ) -> None:
        self._store = store
        self._subscriptions = Subscriptions.of(subscriptions)
        self._margin = 2 * tick_time_millis
        self._saved = store.get(_META, (0, 0))
        meta: list[Any] = json.loads(self._saved) if self._saved else [0, 0, 0, {}]
        self.cancelled = CancelledMessages(store, compression)
        # Before a rebuild: to whom it is not to come again, and what no command can change any more.
        self._delivered = CancelledMessages(store, compression, "delivered")
        self._moved = Moved(store)
        self._moves: list[pa.Table] = []
        self._sequence = 0
        self._waiting = WaitingCommands(store)
        self._requests = RequestLog(store)
        self._cancels = Chunks(store, "cancels", CANCEL_ROWS, meta[0], meta[1])
        # Rows that wait although no subscription wants them any more: those that messages were moved to, and then by
        # topic those that messages came with. A subscription that is added wants these.
        self._unwanted_moves: int = meta[2]
        self._unwanted: dict[str, int] = meta[4] if len(meta) > 4 else {}
        # By topic the subscriptions that are paused, as bits.
        self._paused: dict[str, int] = meta[3]
        # The same of those whose destinations can't be written, as the tick says.
        self.unwritable: Mapping[str, int] = {}
        # By topic how many subscriptions have had a number so far.
        self._numbers: dict[str, int] = meta[5] if len(meta) > 5 else {}
        for topic, names in self._subscriptions.names.items():
            if len(names) > self._numbers.get(topic, len(names)):
                self._unwanted.pop(topic, None)
            self._numbers[topic] = len(names)

    @property
    def has_exceptions(self) -> bool:
        """Whether any message has been cancelled, skipped, moved, or was delivered before a rebuild."""
        return bool(self.cancelled) or bool(self._moved) or bool(self._delivered)

    @property
    def unwanted(self) -> int:
        """The number of rows that wait although they go to no subscription any more."""
        return self._unwanted_moves + sum(self._unwanted.values())

    @property
    def waiting(self) -> int:
        """The number of commands' rows that wait for their message."""
        return len(self._waiting)

    def subscription_mask(self, rows: pa.Table) -> Int64Array:
        """The subscriptions that rows go to; none where the row's message has been moved to another row.

        Args:
            rows: as MESSAGES, or only topic, ledger_id, entry_id and batch_index.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i.
        """
        masks = self._left_by_commands(rows)
        return masks & by_topic(rows, self._subscriptions.wanted) if self._subscriptions.removed else masks

    def _left_by_commands(self, rows: pa.Table) -> Int64Array:
        """For each row the subscriptions, also removed ones, that commands have left it to, as bits."""
        masks = by_topic(rows, self._subscriptions.known)
        if not self.has_exceptions or not rows.num_rows:
            return masks
        position = message_ids(rows)
        sequence = np.zeros(rows.num_rows, np.int64)
        if "sequence" in rows.column_names:
            sequence = pc.fill_null(rows["sequence"], 0).to_numpy()
            masks &= self._own(rows)
        for subscription in range(int(masks.max()).bit_length()):
            is_left = self.cancelled.contains(subscription, *position)
            is_left |= self._moved.find(subscription, *position)[0] != sequence
            is_left |= self._delivered.contains(subscription, *position)
            masks[is_left] &= ~(1 << subscription)
        return masks

    def are_done(self, messages: pa.Table) -> BoolArray:
        """Which new messages no command can give to a subscription: each has had them, or has another row of them.

        So it is where messages come again after a rebuild. One that is only cancelled may be restored.

        Args:
            messages: as MESSAGES, with the rows that they came with.

        Returns:
            bool, (messages,).
        """
        left = by_topic(messages, self._subscriptions.wanted)
        if self._delivered or self._moved:
            position = message_ids(messages)
            for subscription in range(int(left.max(initial=0)).bit_length()):
                is_done = self._delivered.contains(subscription, *position)
                is_done |= self._moved.find(subscription, *position)[0] > 0
                left[is_done] &= ~(1 << subscription)
        return np.asarray(left == 0, np.bool_)

    def take_in(self, messages: pa.Table) -> None:
        """Counts new messages that are to be added to the tracker, though commands have left them to no subscription.

        Args:
            messages: as MESSAGES.
        """
        if self.has_exceptions:
            self._count_unwanted(where(messages, self._left_by_commands(messages) == 0), 1)

    def moved_to(self, known: pa.Table) -> set[int]:
        """The times that messages have been moved to, ms since the epoch, for any subscription.

        Args:
            known: as KNOWN.
        """
        times: set[int] = set()
        for subscription in range(self._subscriptions.most if self._moved else 0):
            times.update(self._moved.find(subscription, *message_ids(known))[1].tolist())
        return times

    def take_moves(self) -> pa.Table:
        """Removes and returns the new rows of moved messages, as MESSAGES, which the caller adds to the tracker."""
        if not self._moves:
            return _NO_MESSAGES
        moves = concat(self._moves)
        self._moves = []
        return moves

    def hand_out(self, rows: pa.Table, moment: Moment) -> Int64Array:
        """Decides to which subscriptions due rows go now; for those that are held back they are moved.

        Args:
            rows: as MESSAGES, removed from the tracker.
            moment: of this tick.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i. A rejected message goes to none.
        """
        rejected = is_rejected(rows)
        left = self._left_by_commands(rows)
        self._count_unwanted(where(rows, ~rejected & (left == 0)), -1)
        masks = left & by_topic(rows, self._subscriptions.wanted) if self._subscriptions.removed else left
        return self._hold(rows, np.where(rejected, 0, masks), moment)

    def _count_unwanted(self, rows: pa.Table, sign: int) -> None:
        """Counts rows that wait and go to no subscription; with sign -1 they are gone, or go to some again."""
        if not rows.num_rows:
            return
        if "sequence" in rows.column_names:
            self._unwanted_moves += sign * (rows.num_rows - rows["sequence"].null_count)
            rows = rows.filter(pc.is_null(rows["sequence"]))
        counts = rows.group_by("topic").aggregate([([], "count_all")])
        for topic, n in zip(counts["topic"].to_pylist(), counts["count_all"].to_pylist(), strict=True):
            self._unwanted[topic] = self._unwanted.get(topic, 0) + sign * n

    def _held_back(self, topic: str) -> int:
        """A mask of the topic's subscriptions that are held back now."""
        if topic in self._subscriptions.without_route:
            return -1
        return self._paused.get(topic, 0) | self.unwritable.get(topic, 0)

    def _hold(self, rows: pa.Table, masks: Int64Array, moment: Moment) -> Int64Array:
        """Moves due rows to HELD_DELIVER_AT for subscriptions that are held back; returns the masks of the others.

        These are paused, or their topic has no route, or their destination can't be written.
        """
        if not (self._paused or self.unwritable or self._subscriptions.without_route) or not rows.num_rows:
            return masks
        held_back = masks & by_topic(rows, self._held_back)
        for subscription in range(int(held_back.max(initial=0)).bit_length()):
            held = np.flatnonzero(held_back >> subscription & 1)
            times = np.full(len(held), HELD_DELIVER_AT)
            self._move(rows.take(pa.array(held)), subscription, times, self._next_sequences(moment, len(held)))
        return masks & ~held_back

    def keep_open(self, rows: pa.Table, moment: Moment) -> pa.Table:
        """Gives messages of a release that have not arrived another row each, at the time they had, to be sealed.

        A row that came in shortly before its time is in no bucket, and its entry may be durable now: with these rows in
        the delayed index a rebuild knows which messages are missing.

        Args:
            rows: as MESSAGES, and `subscription_mask`, int64: the subscriptions they have not arrived at, as bits.
            moment: of this tick.

        Returns:
            the rows, as MESSAGES, one a message and subscription.
        """
        others, self._moves = self._moves, []
        masks = int64(rows, "subscription_mask")
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            chosen = typed(rows.take(pa.array(np.flatnonzero(masks >> subscription & 1))), MESSAGES)
            if chosen.num_rows:
                self._move(chosen, subscription, int64(chosen, "deliver_at"), self.next_sequence(moment))
        moved, self._moves = concat(self._moves), others
        return moved

    def come_back(self, topics: Collection[str], rows: pa.Table, moment: Moment) -> None:
        """Goes on with topics that have a route again, or a subscription that they did not have before.

        Nobody has read such a topic meanwhile: its commands wait for messages that were published before now.

        Args:
            topics: their names.
            rows: as in `release_held`.
            moment: of this tick.
        """
        self._waiting.wait_anew(topics, moment.tick)
        self.release_held(rows, moment)

    def release_held(self, rows: pa.Table, moment: Moment) -> None:
        """Moves messages that were held back to now, for the subscriptions that are not held back any more.

        Of many messages RELEASED_A_SECOND are moved to each second from now on, in the order in which they were due.

        Args:
            rows: as MESSAGES, this shard's rows at HELD_DELIVER_AT; those that a later move has replaced are ignored.
            moment: of this tick.
        """
        if not rows.num_rows:
            return
        own = self._own(rows) & by_topic(rows, self._subscriptions.wanted) & ~by_topic(rows, self._held_back)
        sequences = int64(rows, "sequence")
        for subscription in range(int(own.max(initial=0)).bit_length()):
            last, _, until = self._moved.find(subscription, *message_ids(rows))
            # What was cancelled, too: it may be restored.
            released = np.flatnonzero((own >> subscription & 1 > 0) & (last == sequences))
            if len(released):
                _, first = np.unique(np.stack(message_ids(rows))[:, released], axis=1, return_index=True)
                released = released[np.sort(first)]
                chosen, due = rows.take(pa.array(released)), until[released] - self._margin
                # All were due within the lookahead. Where no more is known, as after a rebuild, it was in this order.
                last_due = max(moment.released, moment.ahead)
                order_known = np.where(due > last_due, sequences[released], 0)
                due = np.minimum(due, last_due)
                order = np.lexsort([*message_ids(chosen)[::-1], order_known, due])
                chosen = with_columns(chosen.take(pa.array(order)), was_due=pa.array(due[order]))
                times = np.maximum(moment.now + np.arange(len(due)) // RELEASED_A_SECOND * 1000, due[order])
                self._move(chosen, subscription, times, self._next_sequences(moment, len(due)))
                self._unwanted_moves += len(due)  # the rows that were held back

    def _own(self, rows: pa.Table) -> Int64Array:
        """A mask of the subscriptions that each row is for: all, or the one that it names; int64, (rows,)."""
        if rows["subscription"].null_count == rows.num_rows:
            return np.full(rows.num_rows, -1, dtype=np.int64)
        numbers = subscription_numbers(rows, self._subscriptions.names)
        own = np.where(numbers < 0, 0, 1 << np.maximum(numbers, 0))
        own[pc.is_null(rows["subscription"]).to_numpy(zero_copy_only=False)] = -1
        return own

    def arrive(self, messages: pa.Table, moment: Moment) -> pa.Table:
        """Applies the commands that waited for new messages, before these are added to the tracker.

        Args:
            messages: as MESSAGES, whole entries.
            moment: of this tick.

        Returns:
            OUTCOME_ROWS.
        """
        commands = self._waiting.take(messages)
        if not commands.num_rows:
            return OUTCOME_ROWS.empty_table()
        known = messages.select(KNOWN.names)
        commands = self._with_added(commands.drop_columns("tick"))
        outcomes, unmatched = self._apply(commands, known, is_rejected(messages), messages, moment)
        return concat(
            [outcomes, self._answer(unmatched, Result.NOT_FOUND, "the topic has no such message")], OUTCOME_ROWS
        )

    def _with_added(self, commands: pa.Table) -> pa.Table:
        """Commands that waited, for the subscriptions that were added since, too, where they say so."""
        later = pc.fill_null(commands["also_later"], False).to_numpy(zero_copy_only=False)
        masks = int64(commands, "subscriptions") | np.where(later, by_topic(commands, self._subscriptions.wanted), 0)
        return with_columns(commands, subscriptions=pa.array(masks))

    def apply(
        self,
        commands: pa.Table,
        request_ids: Mapping[str, int],
        known: pa.Table,
        is_new: BoolArray,
        moment: Moment,
        payload_rows: pa.Table | None = None,
        pause_changes: Sequence[PauseChange] = (),
        held: pa.Table = _NO_MESSAGES,
        first_answers: FirstAnswers = no_answers,
        arrived: pa.Table = _NO_OUTCOMES,
    ) -> pa.Table:
        """Applies the commands of a tick.

        Args:
            commands: as COMMAND_ROWS, this shard's.
            request_ids: by request id of all shards' commands the hash of the first command's body.
            known: as KNOWN, the messages that they name, as far as they are known: all those of an entry, or none.
            is_new: bool, (known,): the message came in only in this tick.
            moment: of this tick.
            payload_rows: as MESSAGES, rows of the messages that are rescheduled or restored; None: there are none.
            pause_changes: pauses and resumes of all shards' commands.
            held: as MESSAGES, the rows held back, where a change resumes.
            first_answers: reads the answers to request ids that come again.
            arrived: the OUTCOME_ROWS that `arrive` has returned in this tick.

        Returns:
            OUTCOME_ROWS.
        """
        if not request_ids and not commands.num_rows:
            return OUTCOME_ROWS.empty_table()
        remembered = self._requests.find([*request_ids, *commands["request_id"].to_pylist()], moment.now)
        repeats = Repeats(remembered, request_ids, first_answers(remembered.keys()))
        for change in (c for c in pause_changes if c.request_id not in repeats.known):
            paused = self._paused.get(change.topic, 0)
            bits = change.subscriptions
            self._paused[change.topic] = paused | bits if change.is_paused else paused & ~bits
        self._paused = {topic: bits for topic, bits in self._paused.items() if bits}
        self.release_held(held, moment)
        self._requests.add({r: body for r, body in request_ids.items() if r not in repeats.known}, moment.now)
        is_repeat = repeats.of(commands)
        again, commands = where(commands, is_repeat), where(commands, ~is_repeat)
        is_answer = pc.equal(commands["kind"], ANSWER).to_numpy(zero_copy_only=False)
        answers = self._answer(where(commands, is_answer))
        sequences = pa.array([self.next_sequence(moment) for _ in range(answers.num_rows)], pa.int64())
        outcomes = [with_columns(answers, sequence=sequences)]
        commands = where(commands, ~is_answer)

        is_released = (int64(known, "deliver_at") <= moment.released) & ~is_new
        due = int64(known, "deliver_at")
        is_released |= _is_out_ahead(known, due, np.zeros(known.num_rows, np.int64), moment) & ~is_new
        payload_rows = MESSAGES.empty_table() if payload_rows is None else payload_rows
        applied, unmatched = self._apply(commands, known, is_released, payload_rows, moment)
        outcomes.append(applied)
        if unmatched.num_rows:
            outcomes += self._wait(unmatched, moment)
        if again.num_rows:
            index, names = each_subscription(again, self._subscriptions.names)
            again = with_columns(again.take(pa.array(index)), subscription=pa.array(names, pa.string()))
            outcomes += repeats.answer(again, index, concat([arrived, *outcomes], OUTCOME_ROWS), moment.tick)
        return concat(outcomes, OUTCOME_ROWS)

    def expire(self, moment: Moment) -> pa.Table:
        """Ends waiting commands whose message can no longer come; returns their OUTCOME_ROWS."""

        def is_expired(rows: pa.Table) -> BoolArray:
            is_cancel: BoolArray = pc.equal(rows["kind"], CANCEL).to_numpy(zero_copy_only=False)
            is_past = int64(rows, "deliver_at") + self._margin <= moment.released
            return (
                (int64(rows, "tick") <= moment.ingested_through)
                & (~is_cancel | is_past)
                & ~self._is_without_route(rows)
            )

        expired = self._waiting.take_where(is_expired)
        return self._answer(expired, Result.NOT_FOUND, "no such message has come")

    def rebuild(self, rebuilt: Rebuilt, now: int) -> None:
        """Starts with a rebuilt state.

        Args:
            rebuilt: this shard's part.
            now: ms since the epoch.
        """
        for messages, rows in ((self.cancelled, rebuilt.cancelled), (self._delivered, rebuilt.delivered)):
            add_positions(messages, rows)
            messages.save()
        subscriptions = int64(rebuilt.moved, "subscription")
        for subscription in np.unique(subscriptions).tolist():
            moved = where(rebuilt.moved, subscriptions == subscription)
            sequences, times = int64(moved, "sequence"), int64(moved, "deliver_at")
            self._moved.put(subscription, *message_ids(moved), sequences, times, int64(moved, "until"))
        self._paused = dict(rebuilt.paused)
        self._waiting.add(rebuilt.waiting, REBUILT_TICK)
        self._unwanted_moves = rebuilt.unwanted
        self._requests.add(dict.fromkeys(rebuilt.request_ids, 0), now)

    def take_cancels(self) -> pa.Table:
        """Removes and returns the rows of type CANCEL, RESTORE and MOVE for the delayed index, as CANCEL_ROWS."""
        return self._cancels.take_all()

    def drop_expired(self, cutoff: int) -> None:
        """Forgets cancelled messages, delivered or moved whose time is past at the cutoff, ms since the epoch."""
        self.cancelled.drop_expired(cutoff)
        self._delivered.drop_expired(cutoff)
        self._moved.drop_expired(cutoff)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        self.cancelled.save()
        self._moved.save()
        self._waiting.save()
        counts = [self._cancels.n_chunks, self._cancels.n_rows, self._unwanted_moves]
        data = json.dumps([*counts, self._paused, self._unwanted, self._numbers]).encode()
        if data != self._saved:
            self._store.put(_META, (0, 0), data)
            self._saved = data

    def _wait(self, commands: pa.Table, moment: Moment) -> list[pa.Table]:
        """Answers commands for messages that are not known, and keeps those whose message may still come."""
        is_cancel = pc.equal(commands["kind"], CANCEL).to_numpy(zero_copy_only=False)
        has_all_come = (moment.ingested_through >= moment.tick) & ~self._is_without_route(commands)
        is_past = is_cancel & (int64(commands, "deliver_at") <= moment.released) & has_all_come
        is_nowhere = ~is_cancel & has_all_come
        waiting = where(commands, ~is_past & ~is_nowhere)
        self._waiting.add(waiting, moment.tick)
        outcomes = [
            self._answer(where(commands, is_past), Result.TOO_LATE, "no such message is known, and its time is past"),
            self._answer(where(commands, is_nowhere), Result.NOT_FOUND, "the topic has no such message"),
            self._let_wait(waiting, moment),
        ]
        # As in PIP-423, a cancel in advance is due two ticks before the message that it is for.
        taking = where(waiting, np.isin(waiting["kind"].to_pylist(), [CANCEL, SKIP]))
        index, names = each_subscription(taking, self._subscriptions.names)
        due = np.maximum(int64(taking, "deliver_at") - self._margin, moment.now)[index]
        rows = with_columns(taking.take(pa.array(index)), subscription=pa.array(names, pa.string()))
        self._add_operations("CANCEL", rows, self.next_sequence(moment), due)
        return outcomes

    def _let_wait(self, commands: pa.Table, moment: Moment) -> pa.Table:
        """Answers commands that wait, with all that a rebuild needs to know: in which order they came, and their times.

        The rows of one command have one sequence.
        """
        told = self._answer(commands, Result.WAITING, "no such message has come yet")
        if not told.num_rows:
            return told
        ids = told["request_id"]
        is_next = np.append(False, pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False))
        sequences = self.next_sequence(moment) + np.cumsum(is_next)
        self._sequence = int(sequences[-1])
        index, _ = each_subscription(commands, self._subscriptions.names)
        has_time = pc.is_in(commands["kind"], pa.array([CANCEL, RESCHEDULE]))
        times = pc.if_else(has_time, commands["deliver_at"], None).take(pa.array(index))
        return with_columns(told, sequence=pa.array(sequences), deliver_at=times)

    def _is_without_route(self, rows: pa.Table) -> BoolArray:
        """Which commands are for topics that are not read now, so that their message may still come."""
        return by_topic(rows, lambda topic: topic in self._subscriptions.without_route) > 0

    def _add_operations(
        self, operation: str, rows: pa.Table, sequence: int | Int64Array, deliver_at: Int64Array
    ) -> None:
        """Keeps rows of type CANCEL, RESTORE or MOVE for the delayed index."""
        n = rows.num_rows
        values = {
            **{name: rows[name] for name in CANCEL_ROWS.names if name in rows.column_names},
            "operation": pa.array([operation] * n, pa.string()),
            "sequence": pa.array(np.full(n, sequence)),
            "deliver_at": pa.array(deliver_at),
        }
        self._cancels.add(pa.table([values[f.name] for f in CANCEL_ROWS], schema=CANCEL_ROWS))

    def _move(self, rows: pa.Table, subscription: int, times: Int64Array, sequence: int | Int64Array) -> None:
        """Gives messages another row, at another time, for one subscription."""
        position, n = message_ids(rows), rows.num_rows
        until = int64(rows, "deliver_at") + self._margin
        self._moved.put(subscription, *position, np.full(n, sequence), times, until)
        names, sequences = self._names_of(rows["topic"], subscription), pa.array(np.full(n, sequence))
        moved = with_columns(rows, deliver_at=pa.array(times), subscription=names, sequence=sequences)
        self._moves.append(moved)
        # As long as either row counts, this one has to say which.
        self._add_operations("MOVE", moved, sequence, np.maximum(times, int64(rows, "deliver_at")))

    def _names_of(self, topics: pa.ChunkedArray, subscription: int | str) -> pa.Array:
        """The name of the subscription of a number, or a name for all, for each row of a column of topics."""
        if isinstance(subscription, str):
            return pa.repeat(subscription, len(topics))
        encoded = topics.combine_chunks().dictionary_encode()
        names = [self._subscriptions.names[topic][subscription] for topic in encoded.dictionary.to_pylist()]
        return pa.array(names, pa.string()).take(encoded.indices)

    def _next_sequences(self, moment: Moment, n: int) -> Int64Array:
        """Sequences that rise, (n,): by them messages that are moved together keep their order."""
        sequences = self.next_sequence(moment) + np.minimum(np.arange(n), _MAX_IN_ORDER)
        self._sequence = int(sequences.max(initial=self._sequence))
        return sequences

    def next_sequence(self, moment: Moment) -> int:
        """The next sequence of this shard, after all that it has given (see SEQUENCE_BITS)."""
        self._sequence = max(self._sequence + 1, moment.tick << SEQUENCE_BITS)
        return self._sequence

    def _apply(
        self, commands: pa.Table, known: pa.Table, is_released: BoolArray, payload_rows: pa.Table, moment: Moment
    ) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages; returns the outcomes, and the commands whose entry is not known."""
        command, row = match(commands, known)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(known, "batch_index")[row], int64(known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        outcomes = self._out_of_batch(commands, command, batch_index, size, is_named)
        command, row = command[is_named], row[is_named]
        order = np.lexsort((row_index[is_named], command))
        command, row = command[order], row[order]
        payload_row = rows_of(known, payload_rows)
        for start, end in runs(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = _Pairs(commands, command[part], known, row[part], is_released, payload_rows, payload_row)
                outcomes += self._apply_run(pairs, moment)
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_run(self, pairs: _Pairs, moment: Moment) -> list[pa.Table]:
        """Applies commands of one kind, each to the messages that it names."""
        commands, command, row = pairs.commands, pairs.command, pairs.row
        kind = commands["kind"][int(command[0])].as_py()
        rows = pairs.known.take(pa.array(row))
        # Only a command that cancels whole entries is answered, and kept, by entry.
        is_whole = (int64(commands, "batch_index")[command] < 0) & (kind in (CANCEL, SKIP))
        masks = int64(commands, "subscriptions")[command]
        due = int64(rows, "deliver_at")
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        _, distinct = np.unique(row, return_index=True)
        originals = rows.take(pa.array(distinct))
        wanted = self._left_by_commands(originals) != 0
        outcomes = []
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            sequence = self.next_sequence(moment)
            chosen = np.flatnonzero(masks >> subscription & 1)
            at = ledgers[chosen], entries[chosen], indexes[chosen]
            cancelled = self.cancelled.contains(subscription, *at)
            moves, moved_to, _ = self._moved.find(subscription, *at)
            is_out = (moved_to <= moment.released) | _is_out_ahead(rows.take(pa.array(chosen)), moved_to, moves, moment)
            is_late = np.where(moves > 0, is_out, pairs.is_released[row[chosen]])
            is_late |= self._delivered.contains(subscription, *at)
            has_payload = pairs.payload_row[row[chosen]] >= 0
            result, reason = results_of(kind, cancelled, is_late, has_payload)
            applied = np.flatnonzero(result == Result.APPLIED)
            _, first = np.unique(row[chosen[applied]], return_index=True)
            repeated = np.ones(len(applied), np.bool_)
            repeated[first] = False
            result[applied[repeated]] = Result.ALREADY_APPLIED
            applied = applied[~repeated]
            # Rows of earlier moves: another one that is not wanted, or one that is wanted again.
            self._unwanted_moves += int((moves[applied] > 0).sum()) * (-1 if kind == RESTORE else 1)

            collapsed, starts = entry_results(command[chosen], is_whole[chosen], result)
            now = chosen[applied]
            times = np.maximum(int64(commands, "deliver_at")[command[chosen]], moment.now)
            until = np.maximum(due[chosen], moved_to) + self._margin
            if kind == RESTORE:
                self.cancelled.remove(subscription, ledgers[now], entries[now], indexes[now], sizes[now])
            elif kind == RESCHEDULE:
                moving = pairs.payload_rows.take(pa.array(pairs.payload_row[row[now]]))
                self._move(moving, subscription, times[applied], sequence)
            else:
                as_entry = (collapsed[applied] | (indexes[now] < 0)).astype(np.bool_)
                whole, single = now[as_entry], now[~as_entry]
                ends = until[applied]
                self.cancelled.add_entries(subscription, ledgers[whole], entries[whole], ends[as_entry])
                self.cancelled.add_messages(
                    subscription, ledgers[single], entries[single], indexes[single], sizes[single], ends[~as_entry]
                )
            answers = self._outcomes(pairs, chosen, result, reason, collapsed, starts, subscription)
            is_applied = pc.equal(answers["result"], int(Result.APPLIED))
            new_times = times[np.flatnonzero(starts | ~collapsed)] if kind == RESCHEDULE else None
            outcomes.append(
                with_columns(
                    answers,
                    sequence=pc.if_else(is_applied, sequence, None),
                    deliver_at=answers["deliver_at"] if new_times is None else pc.if_else(is_applied, new_times, None),
                )
            )
            if kind != RESCHEDULE:
                done = answers.filter(is_applied)
                operation = "RESTORE" if kind == RESTORE else "CANCEL"
                ends = times_of(done, rows.take(pa.array(chosen)), np.maximum(due[chosen], moved_to))
                self._add_operations(operation, done, sequence, ends)
        outcomes.append(self._for_later(pairs, kind, is_whole, moment))
        still_wanted = self._left_by_commands(originals) != 0
        self._count_unwanted(where(originals, wanted & ~still_wanted), 1)
        self._count_unwanted(where(originals, ~wanted & still_wanted), -1)
        return outcomes

    def _for_later(self, pairs: _Pairs, kind: str, is_whole: BoolArray, moment: Moment) -> pa.Table:
        """Outcomes for subscriptions that are added later: when one is, the commands are applied to it by these."""
        later = pc.fill_null(pairs.commands["also_later"], False).to_numpy(zero_copy_only=False)
        chosen = np.flatnonzero(later[pairs.command])
        if not len(chosen):
            return OUTCOME_ROWS.empty_table()
        is_late = pairs.is_released[pairs.row[chosen]]
        result = np.where(is_late, int(Result.TOO_LATE), int(Result.APPLIED))
        reason = np.where(is_late, "released", "").tolist()
        shared, starts = entry_results(pairs.command[chosen], is_whole[chosen], result)
        answers = self._outcomes(pairs, chosen, result, reason, shared, starts, ALSO_LATER)
        is_applied = pc.equal(answers["result"], int(Result.APPLIED))
        times = np.maximum(int64(pairs.commands, "deliver_at")[pairs.command[chosen]], moment.now)
        of_row = pa.array(times[np.flatnonzero(starts | ~shared)])
        return with_columns(
            answers,
            sequence=pc.if_else(is_applied, self.next_sequence(moment), None),
            deliver_at=pc.if_else(is_applied, of_row, None) if kind == RESCHEDULE else answers["deliver_at"],
        )

    def _out_of_batch(
        self, commands: pa.Table, command: Int64Array, batch_index: Int64Array, size: Int64Array, is_named: BoolArray
    ) -> list[pa.Table]:
        """Outcomes for batch indexes that are not among an entry's known messages."""
        named = np.zeros(commands.num_rows, np.bool_)
        named[command[is_named]] = True
        sizes = np.zeros(commands.num_rows, np.int64)
        sizes[command] = size
        left = np.flatnonzero((sizes > 0) & ~named)
        if not len(left):
            return []
        return [self._answer(commands.take(pa.array(left)), Result.INVALID, "the entry has no such batch index")]

    def _outcomes(
        self,
        pairs: _Pairs,
        chosen: Int64Array,
        result: Int64Array,
        reason: Sequence[str],
        collapsed: BoolArray,
        starts: BoolArray,
        subscription: int | str,
    ) -> pa.Table:
        """A row for each chosen command and message, and one for an entry whose messages share a result."""
        answered = np.flatnonzero(starts | ~collapsed)
        of_command = pairs.commands.take(pa.array(pairs.command[chosen[answered]]))
        of_row = pairs.known.take(pa.array(pairs.row[chosen[answered]]))
        # The messages of an entry that was named whole, and that do not share a result, are not what was counted.
        is_named = collapsed[answered] | (int64(of_command, "batch_index") >= 0) | (int64(of_row, "batch_index") < 0)
        values = {
            **{name: of_command[name] for name in ("request_id", "topic", "operation", "issued_by", "issued_at")},
            "sum_up": pc.and_(of_command["sum_up"], pa.array(is_named)),
            "subscription": self._names_of(of_command["topic"], subscription),
            "partition": of_row["partition"],
            "ledger_id": of_row["ledger_id"],
            "entry_id": of_row["entry_id"],
            "batch_index": pa.array(np.where(collapsed[answered], -1, int64(of_row, "batch_index")), pa.int32()),
            "result": pa.array(result[answered], pa.int32()),
            "reason": pa.array([reason[i] for i in answered.tolist()], pa.string()),
        }
        return typed(values, OUTCOME_ROWS)

    def _answer(self, commands: pa.Table, result: int | None = None, reason: str = "") -> pa.Table:
        """One outcome for each command and subscription; without a result, the one of the command's row."""
        if not commands.num_rows:
            return OUTCOME_ROWS.empty_table()
        index, names = each_subscription(commands, self._subscriptions.names)
        rows = commands.take(pa.array(index))
        n = rows.num_rows
        values = {name: rows[name] for name in OUTCOME_ROWS.names if name in rows.column_names and name != "deliver_at"}
        values["subscription"] = pa.array(names, pa.string())
        if result is not None:
            values["result"] = pa.array([int(result)] * n, pa.int32())
            values["reason"] = pa.array([reason] * n, pa.string())
        return typed(values, OUTCOME_ROWS)


def _is_out_ahead(rows: pa.Table, times: Int64Array, sequences: Int64Array, moment: Moment) -> BoolArray:
    """Which messages were handed out long before their time, before the clock was set back.

    Args:
        times: when they are due.
        sequences: of the moves to these times; 0: they came with them.
    """
    is_out = (times > moment.released) & (times <= moment.ahead)
    if is_out.any():
        ids = ["ledger_id", "entry_id", "batch_index"]
        waiting = moment.waiting.select([*ids, "sequence"])
        waiting = waiting.set_column(3, "sequence", pc.fill_null(waiting["sequence"], 0))
        named = rows.select(ids).append_column("sequence", pa.array(sequences))
        is_out &= ~is_among(named, waiting, [*ids, "sequence"])
    return is_out


def with_released(known: pa.Table) -> pa.Table:
    """Completes entries: their messages that are in no bucket were released long ago.

    Args:
        known: as KNOWN, durable messages. A row with batch_index -1 of an entry of several messages stands for an entry
            of which no message is in a bucket.

    Returns:
        as KNOWN, all messages of these entries; those added are due at PAST.
    """
    if not known.num_rows:
        return known
    entries = known.group_by(["ledger_id", "entry_id"]).aggregate([("batch_size", "max"), ("batch_index", "count")])
    missing = entries.filter(pc.greater(entries["batch_size_max"], entries["batch_index_count"]))
    if not missing.num_rows:
        return known
    parts = known.join(missing.select(["ledger_id", "entry_id"]), ["ledger_id", "entry_id"], join_type="inner")
    there: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in parts.to_pylist():
        there.setdefault((row["ledger_id"], row["entry_id"]), []).append(row)
    rest = [
        {**rows[0], "batch_index": index, "deliver_at": PAST}
        for rows in there.values()
        for index in set(range(rows[0]["batch_size"])) - {row["batch_index"] for row in rows}
    ]
    is_stand_in = (int64(known, "batch_index") < 0) & (int64(known, "batch_size") > 1)
    return pa.concat_tables([where(known, ~is_stand_in), pa.Table.from_pylist(rest, schema=KNOWN)])
