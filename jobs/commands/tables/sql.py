"""`delaylake sql`: runs a query over the tables and views, without a JVM."""

from __future__ import annotations

import csv
import json
import re
import sys
from datetime import UTC, datetime, tzinfo
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError, one_line
from conf.times import time_text
from jobs.options import global_options
from jobs.parsers import parse_time
from jobs.text_table import table_text

if TYPE_CHECKING:
    import pyarrow as pa

# Columns of these names, and the first and last of them, are times, ms since the epoch. A column that is computed from
# others has another name, unless the query gives it one.
_TIME = re.compile(r"((min|max|first_value|last_value)\()?(\w+\.)*\w+_(at|time)\)?")


class SqlOutput(StrEnum):
    TEXT = "text"
    JSON = "json"
    CSV = "csv"


class SqlError(DelayLakeError):
    """A query can't be answered. The message is one line."""


def sql(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="A SELECT; - reads it from standard input.")],
    as_of: Annotated[
        int | None,
        typer.Option(
            "--as-of",
            parser=parse_time,
            metavar="TIME",
            help="As it was then: ISO 8601 with a zone, or ms since the epoch.",
        ),
    ] = None,
    output: Annotated[
        SqlOutput, typer.Option("--output", help="How to print: for people, or JSON or CSV alone on stdout.")
    ] = SqlOutput.TEXT,
) -> None:
    """Query the tables, as docs/tables.md has them, and views.

    The tables: delayed_index, deliveries, outcomes, entries, rejects, and where they are there expired, schemas,
    subscription_changes, imported, refusals. The views: pending, attempts, schedules, schedule, shaped, lateness,
    cancellations, funnel, subscriptions. SQL as DataFusion has it. With
    --output json a row is an object, one a line. Times in columns as deliver_at are ms since the epoch; as text they
    are printed in --time-zone.
    """
    from deltalake.exceptions import DeltaError, TableNotFoundError

    from warehouse.views import Warehouse

    text = sys.stdin.read() if query == "-" else query
    if text.split(maxsplit=1)[:1] == [] or text.split(maxsplit=1)[0].upper() not in ("SELECT", "WITH", "EXPLAIN"):
        raise SqlError('a SELECT is needed: delaylake sql "SELECT * FROM schedule LIMIT 20"')
    options = global_options(context)
    try:
        rows = Warehouse(options.settings, as_of).sql(text)
    except TableNotFoundError:
        raise SqlError(options.settings.no_tables()) from None
    except DeltaError as error:
        raise SqlError(one_line(error)) from error
    if output is SqlOutput.JSON:
        for row in rows.to_pylist():
            print(json.dumps(_plain(row)))
    elif output is SqlOutput.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(rows.column_names)
        writer.writerows([_cell(value) for value in row] for row in _rows(rows))
    else:
        print(_text(rows, options.zone))


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The values of each row; a query may give two columns the same name."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _text(table: pa.Table, zone: tzinfo | None) -> str:
    from pyarrow import types

    names = table.column_names
    if names == ["plan_type", "plan"]:  # of an EXPLAIN: text of several lines
        return "\n".join(f"{kind}:\n{plan}" for kind, plan in _rows(table))
    is_time = [types.is_int64(field.type) and _TIME.fullmatch(field.name) is not None for field in table.schema]
    numbers = [
        field.name
        for field, at in zip(table.schema, is_time, strict=True)
        if not at and (types.is_integer(field.type) or types.is_floating(field.type))
    ]
    rows = [
        [_time(value, zone) if at else _cell(value, zone) for value, at in zip(row, is_time, strict=True)]
        for row in _rows(table)
    ]
    return table_text(names, rows, right=numbers)


def _time(millis: int | None, zone: tzinfo | None) -> str:
    """A time as people read it, given in ms since the epoch. 0 and less are not set, or none that anybody means."""
    from tracker.commands.message_state.moves import HELD_DELIVER_AT, PAUSED_DELIVER_AT

    if millis is None or millis <= 0:
        return "" if millis is None else str(millis)
    waits = {HELD_DELIVER_AT: "held back", PAUSED_DELIVER_AT: "paused"}
    return waits.get(millis) or time_text(millis, zone)


def _cell(value: Any, zone: tzinfo | None = UTC) -> str:
    """A value as text: a timestamp, which is in UTC, in a zone (None: the machine's); maps and lists as JSON."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC).astimezone(zone).isoformat().replace("+00:00", "Z")
    plain = _plain(value)
    return json.dumps(plain) if isinstance(plain, dict | list) else str(plain)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can have it: times in ISO 8601, UTC; bytes as text; maps as objects."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return dict(value) if all(isinstance(item, tuple) for item in value) and value else value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value.isoformat()}Z" if isinstance(value, datetime) else value
