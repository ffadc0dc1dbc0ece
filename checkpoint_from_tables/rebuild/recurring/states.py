"""The next occurrences of recurring messages, as rows for the state and for the delayed index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from checkpoint_from_tables.rebuild.changes import write_moves
from checkpoint_from_tables.rebuild.delivered import Delivered, Times
from tracker.rebuilt import MOVED, OCCURRENCES_DONE
from tracker.schemas import CANCEL_ROWS, COMMAND_ROWS
from warehouse.delta.tables import Tables
from warehouse.named_queries import Sql
from warehouse.queries.index_rows import cancels_to_index

# Rows that are to be written to the delayed index, with the columns that `write_moves` needs.
_FRESH = pa.schema(
    [
        *((name, pa.int64()) for name in ("subscription", "ledger_id", "entry_id", "batch_index", "message")),
        *((name, pa.int64()) for name in ("sequence", "deliver_at", "attempt")),
        *((name, pa.int64()) for name in ("occurrence", "occurrence_at", "was_due")),
        ("source", pa.string()),
    ]
)


@dataclass
class ScheduleStates:
    """The next occurrences of recurring messages, and the rows that a rebuild needs for them.

    Attributes:
        overdue: the least time at which an overdue occurrence was due, ms since the epoch, by source topic and number
            of the subscription.
        moved: moves of durable messages, as MOVED.
        done: occurrences that are done, as OCCURRENCES_DONE.
        fresh: rows that the delayed index lacks, so that it has one for each next occurrence.
        waiting: reschedules and pauses of messages that come in again, as COMMAND_ROWS.
        ended: positions (ledger id, entry id, batch index) of messages without a further occurrence, by number of the
            subscription.
    """

    overdue: Times = field(default_factory=dict)
    moved: list[dict[str, int]] = field(default_factory=list)
    done: list[tuple[int | None, ...]] = field(default_factory=list)
    fresh: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def moved_rows(self) -> pa.Table:
        """`moved` as a table."""
        return pa.Table.from_pylist(self.moved, schema=MOVED)

    @property
    def done_rows(self) -> pa.Table:
        """`done` as a table."""
        columns = zip(*self.done, strict=True) if self.done else [()] * len(OCCURRENCES_DONE)
        return pa.table([pa.array(c, pa.int64()) for c in columns], schema=OCCURRENCES_DONE)

    @property
    def waiting_rows(self) -> pa.Table:
        """`waiting` as a table."""
        return pa.Table.from_pylist(self.waiting, schema=COMMAND_ROWS)

    def write(self, tables: Tables, names: Mapping[str, Sequence[str]], tick: int) -> None:
        """Appends the fresh rows to the delayed index, each with a MOVE row that supersedes the message's earlier rows.

        Args:
            names: the names of each source topic's subscriptions, in the order of their numbers.
            tick: the bucket_id of the rows.
        """
        if not self.fresh:
            return
        rows = pa.Table.from_pylist(self.fresh, schema=_FRESH)
        write_moves(tables, rows, names, tick, Sql("sequence IS NULL"))
        moves = [
            {
                **{name: row[name] for name in ("ledger_id", "entry_id", "batch_index", "sequence", "deliver_at")},
                "operation": "MOVE",
                "topic": row["source"],
                "partition": row["partition"],
                "subscription": names[row["source"]][row["subscription"]],
                "occurrence": row["occurrence"],
            }
            for row in self.fresh
        ]
        tables.append(
            "delayed_index",
            cancels_to_index(pa.Table.from_pylist(moves, schema=CANCEL_ROWS), tick),
            {f"rebuild-moves-{tick}": tick},
        )

    def add_ended(self, delivered: Delivered) -> None:
        """Adds the messages without a further occurrence to the delivered ones."""
        for number, positions in self.ended.items():
            columns = zip(*positions, strict=True)
            names = ("ledger_id", "entry_id", "batch_index")
            rows = pa.table({n: pa.array(c, pa.int64()) for n, c in zip(names, columns, strict=True)})
            delivered.add_ended(number, rows)
