"""`delaylake sql`: runs a query over the tables and views, without a JVM."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError, one_line
from jobs.commands.produce import parse_time
from jobs.options import Output, OutputOption, global_options

if TYPE_CHECKING:
    import pyarrow as pa


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
    output: OutputOption = Output.TEXT,
) -> None:
    """Query the tables (delayed_index, deliveries, outcomes, entries, rejects, schemas) and views.

    The views: pending, schedule, lateness, cancellations, funnel, subscriptions. SQL as DataFusion has it. With
    --output json a row is an object, one a line.
    """
    from deltalake.exceptions import DeltaError

    from warehouse.views import Warehouse

    text = sys.stdin.read() if query == "-" else query
    if text.split(maxsplit=1)[:1] == [] or text.split(maxsplit=1)[0].upper() not in ("SELECT", "WITH", "EXPLAIN"):
        raise SqlError('a SELECT is needed: delaylake sql "SELECT * FROM schedule LIMIT 20"')
    try:
        rows = Warehouse(global_options(context).settings, as_of).sql(text)
    except DeltaError as error:
        raise SqlError(one_line(error)) from error
    if output is Output.JSON:
        for row in rows.to_pylist():
            print(json.dumps(_plain(row)))
    else:
        _print(rows)


def _print(rows: pa.Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows.column_names, box=box.SIMPLE)
    for row in rows.to_pylist():
        table.add_row(*("" if value is None else str(_plain(value)) for value in row.values()))
    # Lines are cut on a terminal only. The values are data: `7:0:-1:-1` has no emoji, and `[x]` no style in it.
    width = None if Console().is_terminal else 10_000
    Console(width=width, markup=False, emoji=False).print(table)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can have it: times in ISO 8601, UTC; bytes as text; maps as objects."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return dict(value) if all(isinstance(item, tuple) for item in value) and value else value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value.isoformat()}Z" if isinstance(value, datetime) else value
