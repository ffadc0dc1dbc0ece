"""`delaylake import`: brings in many messages at once, from files or from another topic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.options import Output, OutputOption, global_options, show
from jobs.progress import ProgressLine

if TYPE_CHECKING:
    from warehouse.tables import Tables


def import_messages(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The source topic of a route, whose messages they are to be.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Parquet files: deliver_at (ms or a timestamp), payload, key, properties, ..."),
    ] = None,
    from_topic: Annotated[
        str | None, typer.Option("--from-topic", help="What this other Pulsar topic holds now.")
    ] = None,
    discard_checkpoint: Annotated[
        bool, typer.Option("--discard-checkpoint", help="Move an existing checkpoint aside first.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Bring in many messages at once, without Pulsar between, and rebuild the checkpoint. The job must not run.

    A file, or a topic's message, that was imported before is passed over: after an interruption give the same command
    again.
    """
    from recovery.importing import Importer
    from recovery.new_checkpoint import import_and_rebuild

    if not files and from_topic is None:
        raise typer.BadParameter("name Parquet files, or a topic with --from-topic", param_hint="FILES")
    settings = global_options(context).settings
    warnings: list[str] = []
    with ProgressLine(output) as progress:
        importer = Importer(settings, topic, progress.show)
        importer.check(files or (), from_topic)

        def bring_in(tables: Tables) -> None:
            importer.tables = tables
            for file in files or ():
                importer.file(file)
            if from_topic is not None:
                importer.topic(from_topic)

        found = import_and_rebuild(settings, discard_checkpoint, bring_in, progress.show, warnings.append)
    done = importer.done
    text = (
        f"{done.messages:,} messages imported, {done.rejected:,} of them rejected; {done.already_there:,} were there\n"
        + "".join(f"warning: {warning}\n" for warning in warnings)
        + f"{found['pending']:,} pending: start the job with `delaylake run`"
    )
    show(output, asdict(done) | {"pending": found["pending"], "warnings": warnings}, text)
