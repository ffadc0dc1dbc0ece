"""Views over the tables for the most frequent questions, for `delaylake sql`; their SQL runs in Spark, too."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from conf.errors import DelayLakeError, UnreadableWarehouseError, one_line
from conf.settings import Settings
from status.alerts import NOT_SEEN_REASON
from status.dead_letters import is_dead_letter_sql
from status.job_status import known_status
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from warehouse.delta.opening import open_table, reading_files
from warehouse.delta.snapshot import query_builder, run_sql
from warehouse.named_queries import NamedQueries, Sql, Value, rows_of_values
from warehouse.pending import (
    IS_CANCEL,
    LAST_COMMANDS,
    NEXT_IS_THERE_MILLIS,
    is_cancelled,
    is_moved_on,
    join_commands,
    last_occurrences,
)
from warehouse.routes.known_routes import known_destinations
from warehouse.routes.membership import Memberships
from warehouse.schemas import LATER, MESSAGE_SCHEMAS, SCHEMAS

_SQL = NamedQueries(
    __file__,
    all_last_commands=LAST_COMMANDS,
    all_last_occurrences=last_occurrences(),
    is_cancel=IS_CANCEL,
    is_cancelled=is_cancelled(),
    is_moved_on=is_moved_on(Sql("i.sequence")),
    is_dead_letter=Sql(is_dead_letter_sql("d.destination", "t.destination")),
    join_commands=join_commands("last_commands", "i", Sql("s.subscription")),
    join_named_commands=join_commands("last_commands", "c", Sql("c.subscription"), Sql("c.batch_index")),
    held=HELD_DELIVER_AT,
    paused_at=PAUSED_DELIVER_AT,
    next_is_there_millis=NEXT_IS_THERE_MILLIS,
    not_seen=f"{NOT_SEEN_REASON}%",
    not_delivered=f"{NOT_DELIVERED}%",
)

# The names of the views in the order in which they are created: each reads tables and views before it.
VIEWS = tuple(_SQL.names)


class QueryError(DelayLakeError):
    """A query can't be answered. The message is one line."""


class Warehouse:
    """The tables of the settings' warehouse and the VIEWS, for queries.

    Args:
        as_of: queries see the tables as they were at this time, ms since the epoch; None: the newest versions.

    Raises:
        TableNotFoundError: a table is missing.
        DeltaError: a table had no version at that time, or its version was removed.
        UnreadableWarehouseError: a table exists and can't be read.
    """

    def __init__(self, settings: Settings, as_of: int | None = None) -> None:
        self._warehouse = settings.warehouse
        # `entries` is opened first: its messages are in the other tables before, also while the job runs.
        names = sorted(SCHEMAS, key=lambda name: name != "entries")
        tables = {name: _table(settings, name, as_of) for name in names}
        for name in (MESSAGE_SCHEMAS, *LATER):
            with suppress(TableNotFoundError):
                tables[name] = _table(settings, name, as_of)
        self._builder = query_builder(tables)
        subscriptions = [(route.source, s.name) for route in settings.routes for s in route.subscriptions]
        last_batch = time.time_ns() // 1_000_000 if as_of is None else as_of
        if (status := known_status(settings.warehouse)) is not None:
            last_batch = min(last_batch, status.last_batch_at)
        destinations = [(*of, to) for of, to in known_destinations(settings, status).items()]
        missed = Memberships.of(settings.warehouse)
        values: dict[str, Value] = {
            "routes": rows_of_values(subscriptions or [("", "")]),
            "known_destinations": rows_of_values(destinations or [("", "", "")]),
            "missed": missed.sql("i", *map(Sql, ("i.deliver_at", "s.topic", "s.subscription", "i.sequence"))),
            "last_batch": last_batch,
        }
        for name in VIEWS:
            run_sql(self._builder, f"CREATE VIEW {name} AS {_SQL(name, **values)}")

    def sql(self, sql: str) -> pa.Table:
        """Runs a query over tables and views, and returns the rows.

        Raises:
            QueryError: the query is wrong, or fails at a row.
            UnreadableWarehouseError: a file of the tables can't be read, or has been removed.
        """
        try:
            with reading_files(self._warehouse):
                return run_sql(self._builder, sql)
        except UnreadableWarehouseError:
            raise
        except Exception as error:  # deltalake has no class of its own for errors of a running query
            raise QueryError(re.sub("^(External error: )+", "", one_line(error))) from error


def _table(settings: Settings, name: str, as_of: int | None) -> DeltaTable:
    table = open_table(settings.warehouse, name)
    if as_of is not None:
        table.load_as_version(datetime.fromtimestamp(as_of / 1000, UTC))
    return table
