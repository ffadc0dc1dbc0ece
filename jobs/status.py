"""`delaylake status`: what the job does."""

from __future__ import annotations

import time
from typing import Any

import typer

from conf.errors import DelayLakeError
from jobs.options import Output, OutputOption, global_options, show


class StatusError(DelayLakeError):
    """The job does not do its work."""


def status(context: typer.Context, output: OutputOption = Output.TEXT) -> None:
    """Show what the job on these settings does. Exit status 1 where it does not do its work.

    Reads what the job writes to the warehouse each second; fit for a liveness probe.
    """
    from dataclasses import asdict

    from streaming.job_status import read_status

    settings = global_options(context).settings
    found = read_status(settings.warehouse)
    if found is None:
        raise StatusError(f"no job has told of itself in {settings.warehouse}")
    now = time.time_ns() // 1_000_000
    trouble = found.trouble(now)
    values: dict[str, Any] = {**asdict(found), "age_millis": now - found.updated_at, "trouble": trouble}
    del values["history"]
    text = (
        f"{found.state}: pending {found.pending:,} (in state {found.in_state:,}, in flight {found.in_flight:,}), "
        f"taken {found.taken:,}, delivered {found.delivered:,}, rejected {found.rejected:,}, "
        f"lookahead {found.lookahead_millis} ms, last batch {found.batch_millis_last} ms"
    )
    show(output, values, text)
    if trouble is not None:
        raise StatusError(trouble)
