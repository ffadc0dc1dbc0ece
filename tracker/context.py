"""The moment at which commands are applied: a tick, its time, and the messages that have been handed out by then."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import MESSAGES, BoolArray, Int64Array, empty_table, int64, is_among


@dataclass(frozen=True)
class Moment:
    """The moment at which commands are applied. Times are ms since the epoch."""

    tick: int  # the tick's number
    now: int  # time
    released: int  # time: messages due then or before have been handed out, unless they came in only in this tick
    ingested_through: int  # a tick's number: all messages published before its and earlier commands have come in
    # If the clock has been set back: messages due up to `highest_cutoff`, a time, were handed out before that, except
    # those in `waiting`.
    highest_cutoff: int = 0
    waiting: pa.Table = field(default_factory=partial(empty_table, MESSAGES))


def is_out_ahead(rows: pa.Table, times: Int64Array, sequences: Int64Array, moment: Moment) -> BoolArray:
    """Tells which messages were handed out before the clock was set back, and are due only after `released`.

    Args:
        rows: with the columns ledger_id, entry_id and batch_index.
        times: int64, (rows,), ms since the epoch: when the messages are due.
        sequences: int64, (rows,): the sequence of the move to this time; 0: the message came with its time.
        moment: of this tick.

    Returns:
        bool, (rows,).
    """
    is_out = (times > moment.released) & (times <= moment.highest_cutoff)
    if is_out.any():
        ids = ["ledger_id", "entry_id", "batch_index"]
        waiting = moment.waiting.select([*ids, "sequence"])
        waiting = waiting.set_column(3, "sequence", pc.fill_null(waiting["sequence"], 0))
        named = rows.select(ids).append_column("sequence", pa.array(sequences))
        is_out &= ~is_among(named, waiting, [*ids, "sequence"])
    return is_out


def are_released(known: pa.Table, is_new: BoolArray, moment: Moment) -> BoolArray:
    """Tells which messages have been handed out, assuming that they were not moved.

    Args:
        known: with the columns of KNOWN, except the topic.
        is_new: bool, (known,): the message came in in this tick.
        moment: of this tick.

    Returns:
        bool, (known,).
    """
    due = int64(known, "deliver_at")
    is_out: BoolArray = (due <= moment.released) | is_out_ahead(known, due, np.zeros(known.num_rows, np.int64), moment)
    return is_out & ~is_new
