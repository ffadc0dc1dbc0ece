"""`delaylake backup`: copies the warehouse to another place, from which it can be restored."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.options import Output, OutputOption, global_options, show
from jobs.progress import ProgressLine

if TYPE_CHECKING:
    from warehouse.backup.copying import BackupReport


def backup(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A folder or URI: empty, or with an earlier backup of the warehouse.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be copied, and change nothing.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Copy the warehouse, or its changes since the last backup there. The job may run meanwhile.

    To restore, set `warehouse` to the target, and run `delaylake rebuild --discard-checkpoint`.
    """
    from conf.settings import checked_place
    from warehouse.backup.copying import back_up

    try:
        checked_place(target)
    except ValueError as error:
        raise typer.BadParameter(f"TARGET {error}") from error
    with ProgressLine(output) as progress:
        report = back_up(global_options(context).settings, target, dry_run, progress.show)
    age = None if report.newest_entry_at is None else report.made_at - report.newest_entry_at
    show(output, asdict(report) | {"newest_entry_age_millis": age}, _text(report, age))


def _text(report: BackupReport, age: int | None) -> str:
    to = "would be copied" if report.dry_run else "copied"
    lines = [
        f"{table.table:20} {table.files_copied:,} files, {table.bytes_copied:,} bytes {to}; "
        f"has {table.files:,} files, {table.bytes:,} bytes"
        for table in report.tables
    ]
    if not report.dry_run:
        lines.append(f"{report.files_deleted:,} files of earlier backups deleted; {report.seconds} s")
    newest = "no entry yet" if age is None else f"the newest entry was published {age / 1000:,.1f} s before"
    lines.append(f"{report.target}: {newest}")
    return "\n".join(lines)
