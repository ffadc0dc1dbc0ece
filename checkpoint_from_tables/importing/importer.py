"""Appends many messages at once to the Delta tables, each only once."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from broker.position import ENTRY_BITS, START, Position
from checkpoint_from_tables.importing.schedule_keys import ImportedKeys
from conf.errors import DelayLakeError
from conf.message_size import max_delivered_bytes
from conf.settings import Settings
from status.alerts import NOT_SEEN_REASON
from streaming.release.outgoing import why_unsendable
from tracker.commands.decode import resolve_topic
from tracker.entry_log import entries_of
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    Int64Array,
    in_order,
    int64,
    is_rejected,
    readable,
    where,
    with_columns,
)
from tracker.properties import RETRY_OF
from warehouse.delta.tables import OnProgress, Tables
from warehouse.queries.index_rows import to_index, to_rejects

SENT_BACK = f"{RETRY_OF}: what was sent back for a retry is taken in by the job alone, from its source topic"


class ImportFailedError(DelayLakeError):
    """Messages can't be imported. The message is one line."""


@dataclass
class Imported:
    """Counts of imported messages.

    Attributes:
        messages: the messages that were written to the tables now.
        rejected: those of them that went to `rejects`.
        already_there: the messages that an earlier import has written.
    """

    messages: int = 0
    rejected: int = 0
    already_there: int = 0


class Importer:
    """Appends messages to the tables, which must exist, as messages of a source topic. A rebuild has to follow.

    Attributes:
        source_topic: the full name of the source topic.
        tables: of the warehouse. Before the import the caller sets it to tables that have taken the warehouse over.
        max_size: the most bytes of payload, keys and properties of a message that can be delivered.
        done: the counts so far.

    Args:
        topic: a source topic or a partition of it; its name may be short.
        on_progress: called with (table, step, number of messages).

    Raises:
        ImportFailedError: there is no such route.
    """

    def __init__(
        self, settings: Settings, topic: str, on_progress: OnProgress = lambda table, step, rows: None
    ) -> None:
        self.settings = settings
        source = source_of(settings, topic)
        if source is None:
            raise ImportFailedError(f"no route with the source {topic}: see routes in the settings")
        self.source_topic = source
        self._on_progress = on_progress
        self.tables = Tables(settings.warehouse, settings.tracker.max_indexes_per_bucket_snapshot_segment)
        self.max_size = max_delivered_bytes(settings, source)
        self.done = Imported()
        self._keys = ImportedKeys(settings, source)

    def decided(self, messages: pa.Table) -> pa.Table:
        """Rejects messages that an import can't take; of those with the same schedule key all but one.

        Args:
            messages: as MESSAGES, with their positions in the tables.

        Returns:
            the same messages; a `reason` that is there stays.
        """
        is_sent_back = pc.is_valid(messages["attempt"])
        reasons = pc.coalesce(messages["reason"], pc.if_else(is_sent_back, SENT_BACK, pa.scalar(None, pa.string())))
        none = {name: pa.nulls(messages.num_rows, messages[name].type) for name in ("attempt", "retry_reasons")}
        return self._keys.decide(with_columns(messages, reason=reasons, **none))

    def append(self, messages: pa.Table, app_id: str, number: int, is_by_position: bool = False) -> None:
        """Appends messages to the tables, unless an earlier import has; `entries` is the last table to get them.

        Args:
            messages: as MESSAGES.
            app_id: of the transactions.
            number: of the write; rises from write to write.
            is_by_position: whether `number` is `number_of` the last message's position. Then messages are left out
                that an interrupted import has written to a table.

        Raises:
            FencedError: another job has taken the warehouse over.
        """
        if not is_by_position and self.tables.written("entries", app_id) >= number:
            self.done.already_there += messages.num_rows  # also if it would be decided otherwise by now
            return
        rejected = is_rejected(messages)
        was_seen = ~pc.fill_null(pc.starts_with(messages["reason"], NOT_SEEN_REASON), False).to_numpy()
        taken = in_order(where(messages, ~rejected))
        parts = (
            ("rejects", to_rejects(where(messages, rejected), 0)),
            ("delayed_index", to_index(taken, 0)),
            ("entries", entries_of(where(messages, was_seen))),
        )
        is_new = False
        for table, rows in parts:
            if is_by_position:
                rows = where(rows, _numbers(rows) > self.tables.written(table, app_id))
            if rows.num_rows:
                is_new = self.tables.append(table, rows, {app_id: number})
        if is_new:
            self.done.messages += messages.num_rows
            self.done.rejected += int(rejected.sum())
        else:
            self.done.already_there += messages.num_rows
        self._on_progress("delayed_index", "messages imported", self.done.messages)


def sendable(messages: pa.Table) -> pa.Table:
    """Rejects messages that could not be sent when they are due, and leaves out what can't be read of them.

    Args:
        messages: as MESSAGES.

    Returns:
        the same messages; a `reason` that is there stays.
    """
    messages, unreadable = readable(messages)
    reasons = [unreadable.get(row, why) for row, why in enumerate(why_unsendable(messages))]
    return with_columns(messages, reason=pc.coalesce(messages["reason"], pa.array(reasons, pa.string())))


def source_of(settings: Settings, topic: str) -> str | None:
    """Returns the source topic of the route that a topic, or a partition, belongs to; None: no route has it."""
    return resolve_topic(topic, {route.source for route in settings.routes})[0]


def number_of(position: Position) -> int:
    """Returns a number for a position, which rises with the position."""
    return (position.ledger_id << ENTRY_BITS) + position.entry_id


def position_of(number: int) -> Position:
    """Returns the position of a number from `number_of`; START for -1."""
    return START if number < 0 else Position(number >> ENTRY_BITS, number & ((1 << ENTRY_BITS) - 1))


def _numbers(imported: pa.Table) -> Int64Array:
    """Returns `number_of` each imported message's original position, int64, shape (messages,)."""
    return ((int64(imported, "ledger_id") - FIRST_IMPORTED_LEDGER) << ENTRY_BITS) + int64(imported, "entry_id")
