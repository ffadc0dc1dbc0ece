"""`delaylake import`: imports many messages at once, from files, from another topic, or from another system."""

from __future__ import annotations

from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.options import Output, OutputOption, global_options, show
from jobs.progress import ProgressLine

if TYPE_CHECKING:
    from datetime import tzinfo

    from checkpoint_from_tables.other_systems.importing import ImportPreview
    from checkpoint_from_tables.other_systems.sources import OpenSource
    from warehouse.delta.tables import Tables

_MOST_REASONS = 20

# Parameters that go with --from, and their options.
_OF_SYSTEMS = {
    "url": "--url",
    "queues": "--queue",
    "prefix": "--prefix",
    "separator": "--sep",
    "due_after": "--due-after",
}


def import_messages(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The source topic of a route, whose messages they become.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Parquet files: deliver_at (ms or a timestamp), payload, key, properties, ..."),
    ] = None,
    from_topic: Annotated[
        str | None,
        typer.Option(
            "--from-topic", help="The messages in another Pulsar topic, due by their properties or native deliverAt."
        ),
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription", help="With --from-topic: only messages that this subscription has not acknowledged."
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SYSTEM",
            help="What waits in another system: sidekiq, bullmq, celery, rq, oban, pg-boss, river, db-scheduler,"
            " rabbitmq; or a YAML file that describes the columns of a Postgres table.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="DELAYLAKE_IMPORT_URL", help="URL of that system, as redis://:password@host:6379/0."
        ),
    ] = None,
    queues: Annotated[
        list[str] | None, typer.Option("--queue", help="Only this queue of that system; may be repeated.")
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="The prefix of its keys in Redis, if not the usual one.")
    ] = "",
    separator: Annotated[
        str, typer.Option("--sep", help="Of Celery: sep in its broker_transport_options, if not the usual one.")
    ] = "",
    due_after: Annotated[
        str | None,
        typer.Option("--due-after", metavar="TIME", help="Only what is due later: ISO 8601 with a zone, or ms."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what there is in the other system, and import nothing.")
    ] = False,
    discard_checkpoint: Annotated[
        bool, typer.Option("--discard-checkpoint", help="Move an existing checkpoint aside first.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Import many messages at once, not by way of Pulsar, and rebuild the checkpoint. The job must not run.

    A file, a message of another topic, or a job of another system that was imported before is ignored: after an
    interruption run the same command again. Nothing is changed in the other system: stop its workers meanwhile.
    """
    from broker.client import check_listening
    from checkpoint_from_tables.importing.files import check_files, import_file
    from checkpoint_from_tables.importing.importer import Importer
    from checkpoint_from_tables.importing.topics import SUBSCRIPTION, check_topic, import_topic
    from checkpoint_from_tables.new_checkpoint import import_and_rebuild
    from checkpoint_from_tables.other_systems.importing import import_items, preview_import
    from checkpoint_from_tables.rebuild.context import Reports

    if not files and from_topic is None and system is None:
        raise typer.BadParameter("name Parquet files, a topic with --from-topic, or a system with --from")
    if dry_run and (system is None or files or from_topic is not None):
        raise typer.BadParameter("it goes with --from alone", param_hint="--dry-run")
    if subscription is not None and from_topic is None:
        raise typer.BadParameter("it goes with --from-topic", param_hint="--subscription")
    if system is None:
        for name, option in _OF_SYSTEMS.items():
            if (given := context.get_parameter_source(name)) is not None and given.name == "COMMANDLINE":
                raise typer.BadParameter("it goes with --from", param_hint=option)
    options = global_options(context)
    settings = options.settings
    source = _source(system, url, queues or (), prefix, due_after, separator) if system is not None else None
    warnings: list[str] = []
    with ProgressLine(output) as progress:
        importer = Importer(settings, topic, progress.show)
        check_files(files or ())
        if from_topic is not None:
            check_topic(settings, from_topic)
        if dry_run and source is not None:
            preview = preview_import(importer, source)
            show(output, asdict(preview) | {"left": dict(source.left)}, _text(preview, source.left, options.zone))
            return

        check_listening(settings.pulsar)
        if system is not None:  # reads one item, so that errors come before the checkpoint is moved aside
            next(_source(system, url, queues or (), prefix, due_after, separator).items(), None)

        def bring_in(tables: Tables) -> None:
            importer.tables = tables
            for file in files or ():
                import_file(importer, file)
            if from_topic is not None:
                import_topic(importer, from_topic, subscription or SUBSCRIPTION)
            if source is not None:
                import_items(importer, source)

        rebuilt = import_and_rebuild(settings, discard_checkpoint, bring_in, Reports(progress.show, warnings.append))
    done = importer.done
    value: dict[str, Any] = asdict(done) | {"pending": rebuilt["pending"], "warnings": warnings}
    text = (
        f"{done.messages - done.rejected:,} messages imported; {done.rejected:,} rejected; "
        f"{done.already_there:,} were there\n"
    )
    if source is not None:
        value["left"] = dict(source.left)
        text += "".join(f"{n:,} left: {reason}\n" for reason, n in source.left.items())
    text += "".join(f"warning: {warning}\n" for warning in warnings)
    show(output, value, text + f"{rebuilt['pending']:,} pending: start the job with `delaylake run`")


def _source(
    system: str,
    url: str | None,
    queues: list[str] | tuple[str, ...],
    prefix: str,
    due_after: str | None,
    separator: str,
) -> OpenSource:
    from checkpoint_from_tables.other_systems.sources import OpenSource
    from conf.times import parse_time

    if url is None:
        raise typer.BadParameter("say where it is", param_hint="--url")
    try:
        earliest = None if due_after is None else parse_time(due_after)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--due-after") from None
    return OpenSource(system, url, queues, prefix, earliest, separator)


def _text(preview: ImportPreview, left: dict[str, int], zone: tzinfo | None) -> str:
    from conf.times import time_text

    lines = [
        f"{preview.items - preview.rejected:,} to import, {preview.payload_bytes:,} bytes of payload; "
        f"{preview.rejected:,} to be rejected; {preview.already_there:,} are there",
        f"{preview.overdue:,} of them are due at once",
    ]
    if preview.first_due is not None and preview.last_due is not None:
        lines.append(f"the others from {time_text(preview.first_due, zone)} to {time_text(preview.last_due, zone)}")
    reasons = sorted(preview.reasons.items(), key=itemgetter(1), reverse=True)
    lines += [f"{n:,} can't be taken: {reason}" for reason, n in reasons[:_MOST_REASONS]]
    if others := reasons[_MOST_REASONS:]:  # as where each names the time of its own job
        n = sum(n for _, n in others)
        lines.append(f"{n:,} can't be taken, for {len(others):,} other reasons: all are in --output json")
    lines += [f"  {example}" for example in preview.examples]
    lines += [f"{n:,} left: {reason}" for reason, n in left.items()]
    return "\n".join([*lines, "nothing was changed"])
