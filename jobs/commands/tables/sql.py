"""`delaylake sql`: runs a query over the tables and views, without a JVM."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from datetime import UTC, date, datetime, timedelta, tzinfo
from datetime import time as clock_time
from decimal import Decimal
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

# Names of columns with times, ms since the epoch, and of minima and maxima of them. Other computed columns have such a
# name only if the query gives it to them.
_TIME = re.compile(r"((min|max|first_value|last_value)\()?(\w+\.)*\w+_(at|time)\)?")

# The beginning of a query that only reads, after comments and brackets.
_READS = re.compile(r"(\s|\(|--[^\n]*\n|/\*((?!\*/).)*\*/)*(SELECT|WITH|EXPLAIN)\b", re.IGNORECASE | re.DOTALL)


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
            help="The tables as they were then: ISO 8601 with a zone, or ms since the epoch.",
        ),
    ] = None,
    output: Annotated[
        SqlOutput, typer.Option("--output", help="How to print: for people, or JSON or CSV alone on stdout.")
    ] = SqlOutput.TEXT,
) -> None:
    """Query the tables in docs/tables.md, and views.

    The tables: delayed_index, deliveries, outcomes, entries, rejects, and if they exist expired, schemas,
    subscription_changes, imported, refusals. The views: pending, attempts, schedules, schedule, shaped, lateness,
    cancellations, funnel, subscriptions. The SQL is that of DataFusion. With --output json each line is a row, as an
    object. Times in columns as deliver_at are ms since the epoch; as text they are printed in --time-zone.
    """
    from deltalake.exceptions import DeltaError, TableNotFoundError

    from warehouse.views import Warehouse

    text = sys.stdin.read() if query == "-" else query
    if not _READS.match(text):
        raise SqlError('a SELECT is needed: delaylake sql "SELECT * FROM schedule LIMIT 20"')
    options = global_options(context)
    try:
        warehouse = Warehouse(options.settings, as_of)
    except TableNotFoundError:
        raise SqlError(options.settings.no_tables()) from None
    except DeltaError as error:
        raise SqlError(one_line(error)) from error
    answer = warehouse.sql(text)
    rows = _rows(answer)
    if output is SqlOutput.JSON:
        for row in rows:
            print(json.dumps(_plain(dict(zip(answer.column_names, row, strict=True)))))
    elif output is SqlOutput.CSV:
        _print_csv(answer.column_names)
        for row in rows:
            _print_csv([_cell(value) for value in row])
    else:
        print(_text(answer.schema, rows, options.zone))


def _print_csv(cells: list[str]) -> None:
    """Prints a row as CSV. Cells stay as they are; some readers end a row at a lone CR, which Python does not quote."""
    has_cr = any("\r" in cell for cell in cells)
    writer = csv.writer(sys.stdout, lineterminator="\n", quoting=csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL)
    writer.writerow(cells)


def _rows(answer: pa.Table) -> list[tuple[Any, ...]]:
    """Returns the values of each row as a tuple, since a query may give two columns the same name.

    Raises:
        SqlError: a value can't be printed, such as a date beyond the year 9999.
    """
    import pyarrow as pa

    try:
        micros = answer.cast(pa.schema([f.with_type(_in_micros(f.type)) for f in answer.schema]), safe=False)
        return list(zip(*(column.to_pylist() for column in micros.columns), strict=True))
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise SqlError(f"the answer has a value that can't be printed: {one_line(error)}") from error


def _in_micros(type_: pa.DataType) -> pa.DataType:
    """Returns a type with microseconds in place of nanoseconds, which Python's types do not have."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_timestamp(type_) and type_.unit == "ns":
        return pa.timestamp("us", type_.tz)
    if types.is_duration(type_) and type_.unit == "ns":
        return pa.duration("us")
    if types.is_time64(type_):
        return pa.time64("us")
    if types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_in_micros(type_.value_type)))
    if types.is_struct(type_):
        return pa.struct([field.with_type(_in_micros(field.type)) for field in type_])
    return type_


def _text(schema: pa.Schema, rows: list[tuple[Any, ...]], zone: tzinfo | None) -> str:
    from pyarrow import types

    names = schema.names
    if names == ["plan_type", "plan"]:  # the answer to EXPLAIN: texts of several lines
        return "\n".join(f"{kind}:\n{plan}" for kind, plan in rows)
    is_time = [types.is_int64(field.type) and _TIME.fullmatch(field.name) is not None for field in schema]
    numbers = [
        field.name
        for field, at in zip(schema, is_time, strict=True)
        if not at and (types.is_integer(field.type) or types.is_floating(field.type))
    ]
    cells = [
        [_time(value, zone) if at else _cell(value, zone) for value, at in zip(row, is_time, strict=True)]
        for row in rows
    ]
    return table_text(names, cells, right=numbers)


def _time(millis: int | None, zone: tzinfo | None) -> str:
    """Formats a time, ms since the epoch. 0 and less mean "not set", and are printed as numbers."""
    from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT

    if millis is None or millis <= 0:
        return "" if millis is None else str(millis)
    waits = {HELD_DELIVER_AT: "held back", PAUSED_DELIVER_AT: "paused"}
    return waits.get(millis) or time_text(millis, zone)


def _cell(value: Any, zone: tzinfo | None = UTC) -> str:
    """Formats a value as text: a timestamp in a zone (None: the machine's); maps and lists as JSON."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return _aware(value).astimezone(zone).isoformat().replace("+00:00", "Z")
    if isinstance(value, float):
        return str(value)  # also nan and inf
    plain = _plain(value)
    return json.dumps(plain) if isinstance(plain, dict | list) else str(plain)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can have it.

    Times become ISO 8601 (timestamps in UTC), decimals, intervals and bytes text, maps objects, and nan and inf null.
    """
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(v) for name, v in value.items()}
    if isinstance(value, list):
        is_map = value and all(type(item) is tuple for item in value)
        return _plain(dict(value)) if is_map else [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime):
        return _aware(value).astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, date | clock_time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Decimal | timedelta | tuple) else value


def _aware(value: datetime) -> datetime:
    """Returns a timestamp with its zone, UTC if it has none."""
    return value if value.tzinfo else value.replace(tzinfo=UTC)
