"""`delaylake status`: shows the state of the job, and its alerts."""

from __future__ import annotations

import json
import time
from datetime import tzinfo
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError, printable
from conf.times import time_text
from jobs.options import Output, OutputOption, global_options, show
from jobs.watch import WatchOption, watch

if TYPE_CHECKING:
    from status.job_status import JobStatus


class StatusError(DelayLakeError):
    """The job does not do its work, or has troubles."""


def status(
    context: typer.Context,
    liveness: Annotated[
        bool, typer.Option("--liveness", help="Exit with 1 only for troubles that a restart of the job may mend.")
    ] = False,
    every: WatchOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the status of the job on these settings. Exit status 1 if it does not do its work, or not all of it.

    Reads the status that the job writes to the warehouse each second. A source topic that stands still, a destination
    that can't be written, messages that were not seen, or a missing route is a trouble: it is named, and the exit
    status is 1. With --watch the exit status says nothing of the job.
    """
    from status.job_status import read_status

    options = global_options(context)
    warehouse = options.settings.warehouse
    never_ran = f"no job has run on the warehouse {warehouse} yet: start it with `delaylake run`"
    if every is not None:

        def render() -> str:
            found, now = read_status(warehouse), _now()
            if output is Output.JSON:
                return json.dumps(None if found is None else _values(found, now))
            if found is None:
                return never_ran
            return "\n".join(filter(None, [_text(found, now, options.zone), found.trouble(now)]))

        watch(render, every, output, options.zone)
        return
    found, now = read_status(warehouse), _now()
    if found is None:
        raise StatusError(never_ran)
    show(output, _values(found, now), _text(found, now, options.zone))
    if (trouble := found.trouble(now)) is not None:
        raise StatusError(trouble)
    if found.troubles and not liveness:
        raise StatusError("; ".join(f"{trouble.name}: {trouble.text}" for trouble in found.troubles))


def _values(found: JobStatus, now: int) -> dict[str, Any]:
    from dataclasses import asdict

    values = {**asdict(found), "age_millis": now - found.updated_at, "trouble": found.trouble(now)}
    del values["history"], values["routes"]
    return values


def _text(found: JobStatus, now: int, zone: tzinfo | None) -> str:
    lines = [f"{found.state}, started {time_text(found.started_at, zone)}"]
    if found.last_batch_at:
        lines.append(
            f"pending {found.pending:,} (in state {found.in_state:,}, in flight {found.in_flight:,}), "
            f"taken {found.taken:,}, delivered {found.delivered:,}, rejected {found.rejected:,}"
            + (f", expired {found.expired:,}" if found.expired else "")
        )
        lines.append(
            f"lookahead {found.lookahead_millis} ms, last batch {found.batch_millis_last} ms, "
            f"{(now - found.last_batch_at) / 1000:,.0f} s ago"
        )
    else:
        lines.append("it has made no batch since: what waits is not known")
    if found.history and found.last_batch_at:
        last = found.history[-1]
        late = f", late p50 {last.late_millis_p50} ms, p99 {last.late_millis_p99} ms"
        rates = f"in {last.taken_per_second}/s, out {last.delivered_per_second}/s"
        lines.append(rates if last.late_millis_p50 is None else rates + late)
    if found.is_held_up:
        lines.append("held up: the senders are behind, and source topics are not read")
    lines += [
        f"paused: {topic}: what is due for {', '.join(names)} is held back"
        for topic, names in sorted(found.paused.items())
    ]
    lines += [
        f"resuming: {topic}: {messages:,} messages ({n_bytes / (1 << 20):,.0f} MiB) that were held back for {name} are"
        " still to go out"
        for topic, names in sorted(found.resuming.items())
        for name, (messages, n_bytes) in sorted(names.items())
    ]
    lines += [
        f"shaped: {topic}: what the rate or windows of {name} have put off is out at {time_text(until, zone)}"
        for topic in sorted(found.shaped_until)
        for name, until in found.queues(topic, "", now)
    ]
    lines += [
        f"{trouble.kind.replace('_', ' ')}: {trouble.name}: {trouble.text} (for {(now - trouble.since) // 1000:,} s)"
        for trouble in found.troubles
    ]
    return "\n".join(map(printable, lines))


def _now() -> int:
    return time.time_ns() // 1_000_000
