"""`delaylake status`: shows the state of the job, and its troubles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError
from jobs.options import Output, OutputOption, global_options, show

if TYPE_CHECKING:
    from status.job_status import JobStatus


class StatusError(DelayLakeError):
    """The job does not do its work, or has troubles."""


def status(
    context: typer.Context,
    liveness: Annotated[
        bool, typer.Option("--liveness", help="Exit with 1 only for what starting the job again may mend.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what the job on these settings does. Exit status 1 where it does not do its work, or not all of it.

    Reads what the job writes to the warehouse each second. A source topic that stands still, a destination that can't
    be written, messages that were not seen or a missing route is a trouble: it is named, and the exit status is 1.
    """
    from dataclasses import asdict

    from status.job_status import read_status

    settings = global_options(context).settings
    found = read_status(settings.warehouse)
    if found is None:
        raise StatusError(f"no job has told of itself in {settings.warehouse}")
    now = time.time_ns() // 1_000_000
    trouble = found.trouble(now)
    values: dict[str, Any] = {**asdict(found), "age_millis": now - found.updated_at, "trouble": trouble}
    del values["history"], values["routes"]
    show(output, values, _text(found, now))
    if trouble is not None:
        raise StatusError(trouble)
    if found.troubles and not liveness:
        raise StatusError("; ".join(f"{trouble.name}: {trouble.text}" for trouble in found.troubles))


def _text(found: JobStatus, now: int) -> str:
    lines = [
        f"{found.state}: pending {found.pending:,} (in state {found.in_state:,}, in flight {found.in_flight:,}), "
        f"taken {found.taken:,}, delivered {found.delivered:,}, rejected {found.rejected:,}, "
        f"lookahead {found.lookahead_millis} ms, last batch {found.batch_millis_last} ms"
    ]
    lines += [
        f"{trouble.kind.replace('_', ' ')}: {trouble.name}: {trouble.text} (for {(now - trouble.since) // 1000:,} s)"
        for trouble in found.troubles
    ]
    return "\n".join(lines)
