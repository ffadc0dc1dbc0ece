"""What the parts of a shard share: its store, subscriptions and number, the tick's times, and the tick's sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import DelayLakeError
from tracker.messages import MESSAGES, BoolArray, Int64Array, empty_table, int64, is_among
from tracker.schemas import SEQUENCE_BITS
from tracker.sharding import ShardId
from tracker.store import Store
from tracker.subscriptions import Subscriptions


class SequencesExhaustedError(DelayLakeError):
    """A tick has more commands and moves in one shard than there are sequences. The message is one line."""


@dataclass
class Context:
    """What the parts of a shard share. The shard sets the tick's fields when the tick begins; other parts only read.

    Times are ms since the epoch.

    Attributes:
        store: where the parts keep their state.
        tick_time_millis: Pulsar's tick time, ms.
        tick: the tick's number.
        now: time of the job's clock.
        cutoff: messages due then or before are dispatched in this tick.
        released: messages due then or before were dispatched before this tick, unless they came in only in this tick.
        ingested_through: a tick's number: all messages published before its and earlier commands have come in.
        highest_cutoff: if the clock has been set back: messages due up to this time were dispatched before that, except
            those in `waiting`.
        waiting: as MESSAGES.
    """

    store: Store
    subscriptions: Subscriptions
    shard_id: ShardId = field(default_factory=ShardId)
    tick_time_millis: int = 1000
    tick: int = 0
    now: int = 0
    cutoff: int = 0
    released: int = 0
    ingested_through: int = 0
    highest_cutoff: int = 0
    waiting: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    _sequence: int = 0

    @property
    def remembered_millis(self) -> int:
        """How long after its time a cancelled or moved message is remembered, ms: two tick times, as in PIP-423."""
        return 2 * self.tick_time_millis

    def begin_tick(self, tick: int, now: int, cutoff: int, released: int, ingested_through: int) -> None:
        """Sets the tick's fields, for a clock that has not been set back."""
        self.tick, self.now, self.cutoff, self.released = tick, now, cutoff, released
        self.ingested_through, self.highest_cutoff, self.waiting = ingested_through, 0, empty_table(MESSAGES)

    def are_dispatched(self, known: pa.Table, is_new: BoolArray | None = None) -> BoolArray:
        """Tells which messages have been dispatched, assuming that they were not moved: bool, (known,).

        Args:
            known: with the columns of KNOWN, except the topic.
            is_new: bool, (known,): the message came in in this tick; None: none did.
        """
        due = int64(known, "deliver_at")
        are = (due <= self.released) | self.are_dispatched_ahead(known, due, np.zeros(known.num_rows, np.int64))
        return are if is_new is None else are & ~is_new

    def are_dispatched_ahead(self, rows: pa.Table, times: Int64Array, sequences: Int64Array) -> BoolArray:
        """Tells which messages were dispatched before the clock was set back, and are due only after `released`.

        Args:
            rows: with the columns ledger_id, entry_id and batch_index.
            times: int64, (rows,), ms since the epoch: when the messages are due.
            sequences: int64, (rows,): the sequence of the move to this time; 0: the message came with its time.

        Returns:
            bool, (rows,).
        """
        are: BoolArray = (times > self.released) & (times <= self.highest_cutoff)
        if are.any():
            ids = ["ledger_id", "entry_id", "batch_index"]
            waiting = self.waiting.select([*ids, "sequence"])
            waiting = waiting.set_column(3, "sequence", pc.fill_null(waiting["sequence"], 0))
            named = rows.select(ids).append_column("sequence", pa.array(sequences))
            are &= ~is_among(named, waiting, [*ids, "sequence"])
        return are

    def are_answered_here(self, commands: pa.Table) -> BoolArray:
        """Tells which commands, as COMMAND_ROWS, this shard answers if their message is not known: bool, (rows,)."""
        by_key: BoolArray = pc.is_valid(commands["schedule_key"]).to_numpy(zero_copy_only=False)
        return self.shard_id.is_home(commands) | by_key

    def next_sequence(self) -> int:
        """Returns the next sequence of this shard, higher than all earlier ones (see SEQUENCE_BITS).

        Raises:
            SequencesExhaustedError: the tick has no sequences left.
        """
        return int(self.next_sequences(np.zeros(1, np.int64))[0])

    def next_sequences(self, steps: Int64Array) -> Int64Array:
        """Returns the next sequence plus each step. The sequences of later calls are higher than all of these.

        Args:
            steps: int64, (n,), not negative.

        Returns:
            int64, (n,).

        Raises:
            SequencesExhaustedError: the tick does not have so many left.
        """
        first = max(self._sequence + 1, self.tick << SEQUENCE_BITS)
        sequences: Int64Array = first + steps
        last = int(sequences.max(initial=first))
        if last >> SEQUENCE_BITS > self.tick:
            # A further one would be a sequence of the next tick, and override the commands of that tick.
            raise SequencesExhaustedError(
                f"more than {1 << SEQUENCE_BITS:,} commands and moves in tick {self.tick} of a shard"
            )
        self._sequence = last
        return sequences

    @property
    def n_sequences_left(self) -> int:
        """How many sequences of the tick are left."""
        return min((self.tick + 1 << SEQUENCE_BITS) - 1 - self._sequence, 1 << SEQUENCE_BITS)
