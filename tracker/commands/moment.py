"""When commands are applied, and what has been handed out by then."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import MESSAGES, BoolArray, Int64Array, is_among


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


def is_out_ahead(rows: pa.Table, times: Int64Array, sequences: Int64Array, moment: Moment) -> BoolArray:
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
