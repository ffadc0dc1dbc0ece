"""`delaylake rebuild`: rebuilds the state from the Delta tables, if the checkpoint is lost."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.options import Output, OutputOption, global_options, show
from jobs.progress import ProgressLine


def rebuild(
    context: typer.Context,
    discard_checkpoint: Annotated[
        bool, typer.Option("--discard-checkpoint", help="Move an existing checkpoint aside first.")
    ] = False,
    without_destination: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Do not read this destination: messages not written down may come twice."),
    ] = None,
    another_broker: Annotated[
        bool,
        typer.Option(
            "--another-broker",
            help="The warehouse is a backup, and its source topics were replicated to this broker.",
        ),
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Prepare a new checkpoint from the Delta tables alone, if the old one is lost. The job must not run.

    The next `delaylake run` goes on with all pending messages, knows what was cancelled, skipped and delivered, and
    reads again from Pulsar what was not written down yet. It warns of destinations whose messages the broker has
    trimmed, so that they can't be compared.
    """
    from broker.client import check_listening
    from checkpoint_from_tables.new_checkpoint import rebuild_checkpoint
    from checkpoint_from_tables.rebuild.context import Reports

    warnings: list[str] = []
    settings = global_options(context).settings
    check_listening(settings.pulsar)
    with ProgressLine(output) as progress:
        reports = Reports(progress.show, warnings.append)
        found = rebuild_checkpoint(settings, discard_checkpoint, reports, without_destination or (), another_broker)
    lines = [f"{name.replace('_', ' '):40} {count:,}" for name, count in found.items()]
    lines += [f"warning: {warning}" for warning in warnings]
    show(output, found | {"warnings": warnings}, "\n".join([*lines, "ready: start the job with `delaylake run`"]))
