"""`delaylake demo`: the whole service on an embedded broker, and a check of every message's fate."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.options import Output, OutputOption, show


def demo(
    messages: Annotated[int, typer.Option(min=100, help="How many messages to schedule.")] = 20_000,
    seconds: Annotated[int, typer.Option(min=10, help="How long the longest delay is that is waited for.")] = 40,
    keep: Annotated[
        Path | None, typer.Option(help="Run in this folder and keep it: broker, settings, tables.", file_okay=False)
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Schedule, cancel, skip and deliver messages on a broker of its own, and check each one's fate.

    Exit status 1 when anything was lost, early, doubled or wrongly delivered.
    """
    folder = (keep or Path(tempfile.mkdtemp(prefix="delaylake-demo-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_kept = keep is not None
    try:
        summary = _run(folder, messages, seconds, output)
        ok = bool(summary["ok"])
        text = "\n".join(_lines(summary))
        show(output, summary, text)
        if not ok:
            is_kept = True
            raise typer.Exit(1)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | typer.Exit):
            is_kept = True
        raise
    finally:
        if is_kept:
            typer.echo(f"kept: {folder} (broker.log, job.log, settings.yaml, warehouse)", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, messages: int, seconds: int, output: Output) -> dict[str, Any]:
    from jobs.demo_run import DemoRun

    started = time.monotonic()
    with DemoRun(folder, messages, seconds, shows_progress=output is Output.TEXT) as run:
        summary = run.run()
    return summary | {"seconds": round(time.monotonic() - started, 1)}


def _lines(summary: dict[str, Any]) -> list[str]:
    late = summary["late_millis"]
    lines = [
        "",
        f"scheduled            {summary['scheduled']:>8,}  in {summary['topics']} topics",
        f"delivered            {summary['delivered']:>8,}  each once to every subscription that wants it",
        f"cancelled or skipped {summary['taken_back']:>8,}  of a message and subscription, none delivered",
        f"pending              {summary['pending']:>8,}  an hour to a month ahead, in delayed_index",
        f"rejected             {summary['rejected']:>8,}  with the reason",
        f"late                 p50 {late['p50']:.0f} ms, p99 {late['p99']:.0f} ms (planned ones, at the consumer)",
        f"early                {summary['early']:>8,}",
        f"audit                {summary['audit']}",
    ]
    if summary["problems"]:
        lines.append(f"WRONG: {len(summary['problems'])} problems, such as")
        lines += [f"  {problem}" for problem in summary["problems"][:20]]
    else:
        lines.append(f"every message's fate is as it should be ({summary['seconds']} s)")
    return lines
