"""`delaylake maintain`: merges the Delta tables' files and deletes rows that nobody needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.options import EngineOption, Output, OutputOption, engine_of, global_options, show
from jobs.progress import ProgressLine

if TYPE_CHECKING:
    from warehouse.maintenance.maintain import TableReport


def maintain(
    context: typer.Context,
    table: Annotated[list[str] | None, typer.Option(help="Only this table; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
    engine: EngineOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Merge small files, delete rows past their retention that nobody needs, and vacuum. The job may run meanwhile."""
    from warehouse.maintenance import maintain as maintenance

    if unknown := set(table or []) - set(maintenance.MAINTAINED):
        raise typer.BadParameter(
            f"no {unknown.pop()!r}; there are {', '.join(maintenance.MAINTAINED)}", param_hint="--table"
        )
    names = [name for name in maintenance.MAINTAINED if not table or name in table]
    settings = global_options(context).settings
    extent = maintenance.Extent.NOTHING if dry_run else maintenance.Extent.ALL
    with ProgressLine(output) as progress, engine_of(settings, engine) as chosen:
        reports = maintenance.maintain(settings, names, extent, progress.show, engine=chosen)
    show(output, [asdict(r) for r in reports], "\n".join(_text(r, dry_run) for r in reports))


def _text(report: TableReport, dry_run: bool) -> str:
    merged, deleted, vacuumed = (
        f"{n:,} {what}"
        for n, what in (
            (report.files_merged, "merged"),
            (report.rows_deleted, "rows deleted"),
            (report.files_vacuumed, "old files removed"),
        )
    )
    if report.vacuum_put_off:
        vacuumed = "no vacuum: the job has stood still for long, and may need old versions when it goes on"
    if dry_run:
        return (
            f"{report.table:14} {report.files_before:,} files, {report.bytes_before:,} bytes; "
            f"would be: {merged}, {deleted}, {vacuumed}"
        )
    return (
        f"{report.table:14} {report.files_before:,} -> {report.files_after:,} files, "
        f"{report.bytes_before:,} -> {report.bytes_after:,} bytes; {merged}, {deleted}, {vacuumed}; {report.seconds} s"
    )
