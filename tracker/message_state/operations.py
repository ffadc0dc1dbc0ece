"""Collects the rows that commands and moves add to the delayed index, and gives the sequences that order them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import DelayLakeError
from tracker.buckets.mutable_bucket import Chunks
from tracker.context import Moment
from tracker.message_state.moves import Moved
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    attempts_of,
    concat,
    empty_table,
    has_occurrences,
    int64,
    message_ids,
    typed,
    where,
    with_columns,
)
from tracker.schemas import CANCEL_ROWS, SEQUENCE_BITS
from tracker.store import Store
from tracker.subscriptions import Subscriptions


class SequencesExhaustedError(DelayLakeError):
    """A tick has more commands and moves in one shard than there are sequences. The message is one line."""


class Operations:
    """Collects the rows that commands and moves add to the delayed index, and gives the sequences that order them.

    Rows of type CANCEL, RESTORE and MOVE are kept until they are sealed; rows of moved messages go to the tracker in
    the same tick.

    Attributes:
        moves: the new rows of moved messages, as MESSAGES, that `take_moves` returns next.

    Args:
        store: where the rows that wait to be sealed are kept.
        counts: the property `counts`, which the caller saves.
        moved: has the last move of each message.
        subscriptions: the subscriptions of each source topic.
        remembered_millis: how long a move is remembered after the last time of its message, ms.
    """

    def __init__(
        self, store: Store, counts: Sequence[int], moved: Moved, subscriptions: Subscriptions, remembered_millis: int
    ) -> None:
        self._cancels = Chunks(store, "cancels", CANCEL_ROWS, *counts)
        self._moved = moved
        self._subscriptions = subscriptions
        self._remembered_millis = remembered_millis
        self.moves: list[pa.Table] = []
        self._sequence = 0

    @property
    def counts(self) -> list[int]:
        """The numbers of chunks, and of rows of type CANCEL, RESTORE and MOVE, that wait to be sealed."""
        return [self._cancels.n_chunks, self._cancels.n_rows]

    def add(self, operation: str, rows: pa.Table, sequence: int | Int64Array, deliver_at: Int64Array) -> None:
        """Keeps rows for the delayed index until they are sealed.

        Args:
            operation: CANCEL, RESTORE or MOVE.
            rows: with the columns of CANCEL_ROWS except operation, sequence and deliver_at; attempt is optional.
            sequence: of all rows; or int64, (rows,).
            deliver_at: int64, (rows,), ms since the epoch.
        """
        n = rows.num_rows
        values = {
            "occurrence": pa.nulls(n, pa.int64()),
            **{name: rows[name] for name in CANCEL_ROWS.names if name in rows.column_names},
            "operation": pa.array([operation] * n, pa.string()),
            "sequence": pa.array(np.full(n, sequence)),
            "deliver_at": pa.array(deliver_at),
        }
        self._cancels.add(typed(values, CANCEL_ROWS))

    def move(
        self,
        rows: pa.Table,
        subscription: int,
        times: Int64Array,
        sequence: int | Int64Array,
        was_due: Int64Array | None = None,
        shaped_from: Int64Array | None = None,
    ) -> None:
        """Gives messages another row, at another time, for one subscription; `take_moves` returns these rows.

        Args:
            rows: as MESSAGES, the rows that the messages have.
            subscription: its number.
            times: int64, (rows,), ms since the epoch: when the new rows are due.
            sequence: of all moves; or int64, (rows,).
            was_due: the new rows' column of that name, int64, (rows,), ms since the epoch; None: null.
            shaped_from: likewise. None, null, ends the effect of earlier shaping.
        """
        self.moves.append(self.moved(rows, subscription, times, sequence, was_due, shaped_from))

    def moved(
        self,
        rows: pa.Table,
        subscription: int,
        times: Int64Array,
        sequence: int | Int64Array,
        was_due: Int64Array | None = None,
        shaped_from: Int64Array | None = None,
    ) -> pa.Table:
        """Moves messages as `move` does, but leaves it to the caller to add the new rows to the tracker.

        Args:
            rows: as MESSAGES, the rows that the messages have.
            subscription: its number.
            times: int64, (rows,), ms since the epoch: when the new rows are due.
            sequence: of all moves; or int64, (rows,).
            was_due: the new rows' column of that name, int64, (rows,), ms since the epoch; None: null.
            shaped_from: likewise.

        Returns:
            the new rows, as MESSAGES, (rows,), in the order of `rows`.
        """
        position, n = message_ids(rows), rows.num_rows
        until = int64(rows, "deliver_at") + self._remembered_millis
        attempts = attempts_of(rows)
        self._moved.put(subscription, *position, np.full(n, sequence), times, until, attempts)
        names = self._subscriptions.names_of(rows["topic"], subscription)
        sequences = pa.array(np.full(n, sequence))
        due_before = pa.nulls(n, pa.int64()) if was_due is None else pa.array(was_due)
        moved = with_columns(
            rows,
            deliver_at=pa.array(times),
            subscription=names,
            sequence=sequences,
            was_due=due_before,
            shaped_from=pa.nulls(n, pa.int64()) if shaped_from is None else pa.array(shaped_from),
        )
        if has_occurrences(rows):
            by_rule = pc.coalesce(rows["occurrence_at"], rows["deliver_at"])
            moved = with_columns(
                moved, occurrence_at=pc.if_else(pc.is_valid(rows["occurrence"]), by_rule, rows["occurrence_at"])
            )
        # The MOVE row says which of the two rows counts, so it is kept until both are past.
        self.add("MOVE", moved, sequence, np.maximum(times, int64(rows, "deliver_at")))
        return moved

    def move_on(
        self,
        rows: pa.Table,
        subscription: int,
        times: Int64Array,
        numbers: pa.Array,
        by_rule: pa.Array,
        was_due: pa.Array,
        has_next: BoolArray,
        is_replaced: BoolArray,
        sequence: int,
    ) -> None:
        """Replaces the pending occurrences of recurring messages by their next ones; `take_moves` returns the new rows.

        Args:
            rows: as MESSAGES: the rows of the occurrences pending so far.
            subscription: its number.
            times: int64, (rows,), ms since the epoch: when the next occurrences are due.
            numbers: int64, (rows,): numbers of the next occurrences.
            by_rule: int64, (rows,), ms since the epoch: when they are due by their rule; null: at `times`.
            was_due: int64, (rows,), ms since the epoch: when late ones were due; null: not late.
            has_next: bool, (rows,): there is a next occurrence.
            is_replaced: bool, (rows,): the occurrence pending so far is not handed out. The delayed index gets a MOVE.
            sequence: of the moves.
        """
        position, n = message_ids(rows), rows.num_rows
        until = int64(rows, "deliver_at") + self._remembered_millis
        self._moved.put(subscription, *position, np.full(n, sequence), times, until, np.zeros(n, np.int64))
        following = with_columns(
            rows,
            deliver_at=pa.array(times),
            subscription=self._subscriptions.names_of(rows["topic"], subscription),
            sequence=pa.array(np.full(n, sequence)),
            occurrence=numbers,
            occurrence_at=by_rule,
            was_due=was_due,
            shaped_from=pa.nulls(n, pa.int64()),
        )
        self.moves.append(where(following, has_next))
        if is_replaced.any():
            last = np.maximum(times, int64(rows, "deliver_at"))
            self.add("MOVE", where(following, is_replaced), sequence, last[is_replaced])

    def take_moves(self) -> pa.Table:
        """Removes and returns the new rows of moved messages, as MESSAGES, which the caller adds to the tracker."""
        if not self.moves:
            return empty_table(MESSAGES)
        moves = concat(self.moves)
        self.moves = []
        return moves

    def take_cancels(self) -> pa.Table:
        """Removes and returns the rows of type CANCEL, RESTORE and MOVE for the delayed index, as CANCEL_ROWS."""
        return self._cancels.take_all()

    def next_sequences(self, moment: Moment, steps: Int64Array) -> Int64Array:
        """Returns the next sequence plus each step. The sequences of later calls are higher than all of these.

        Args:
            moment: of this tick.
            steps: int64, (n,), not negative.

        Returns:
            int64, (n,).

        Raises:
            SequencesExhaustedError: the tick does not have so many left.
        """
        first = max(self._sequence + 1, moment.tick << SEQUENCE_BITS)
        sequences: Int64Array = first + steps
        last = int(sequences.max(initial=first))
        if last >> SEQUENCE_BITS > moment.tick:
            # A further one would be a sequence of the next tick, and override the commands of that tick.
            raise SequencesExhaustedError(
                f"more than {1 << SEQUENCE_BITS:,} commands and moves in tick {moment.tick} of a shard"
            )
        self._sequence = last
        return sequences

    def next_sequence(self, moment: Moment) -> int:
        """Returns the next sequence of this shard, higher than all earlier ones (see SEQUENCE_BITS).

        Raises:
            SequencesExhaustedError: the tick has no sequences left.
        """
        return int(self.next_sequences(moment, np.zeros(1, np.int64))[0])

    def room(self, moment: Moment) -> int:
        """Returns how many sequences of the tick are left."""
        return min((moment.tick + 1 << SEQUENCE_BITS) - 1 - self._sequence, 1 << SEQUENCE_BITS)
