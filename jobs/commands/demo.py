"""`delaylake demo`: runs the whole service on an embedded broker, and checks every message's fate."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.errors import DelayLakeError
from jobs.options import Output, OutputOption, show

_SHOWN_PROBLEMS = 20


class DemoError(DelayLakeError):
    """The demo ended early."""


def demo(
    messages: Annotated[int, typer.Option(min=100, help="How many messages to schedule.")] = 20_000,
    seconds: Annotated[int, typer.Option(min=10, help="The longest delay of messages that the demo waits for.")] = 40,
    keep: Annotated[
        Path | None, typer.Option(help="Run in this new folder and keep it: logs, settings, tables.", file_okay=False)
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Schedule, cancel, skip and deliver messages on a broker of its own, and check each one's fate.

    It has settings of its own. Exit status 1 when anything was lost, early, doubled or wrongly delivered.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise typer.BadParameter(f"--keep {keep}: the folder is not empty, and what is left in it would be counted too")
    # These signals end the demo as Ctrl-C does, so that nothing is left running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    folder = (keep or Path(tempfile.mkdtemp(prefix="delaylake-demo-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_kept = keep is not None
    try:
        summary = _run(folder, messages, seconds, output)
        show(output, summary, "\n".join(_lines(summary)))
        if not summary["ok"]:
            is_kept = True
            raise typer.Exit(1)
    except KeyboardInterrupt:
        raise DemoError("interrupted; nothing is left running") from None
    except Exception as error:
        is_kept = is_kept or not isinstance(error, typer.Exit)
        raise
    finally:
        if is_kept:
            typer.echo(f"kept: {folder} (broker/broker.log, job.log, checkpoint/spark.log, warehouse)", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, messages: int, seconds: int, output: Output) -> dict[str, Any]:
    from jobs.child_service import ignore_user_settings
    from jobs.demo.progress import Progress
    from jobs.demo.run import DemoRun

    ignore_user_settings()
    started = time.monotonic()
    with DemoRun(folder, messages, seconds, Progress(is_shown=output is Output.TEXT)) as run:
        summary = run.run()
    return summary | {"seconds": round(time.monotonic() - started, 1)}


def _lines(summary: dict[str, Any]) -> list[str]:
    too_late = summary["commands"].get("TOO_LATE", 0)
    lines = [
        "",
        f"scheduled            {summary['scheduled']:>8,}  in {summary['topics']} topics",
        f"delivered            {summary['delivered']:>8,}  each once to every subscription that wants it",
        f"cancelled or skipped {summary['taken_back']:>8,}  of a message and subscription, none delivered"
        + (f"; {too_late:,} came too late" if too_late else ""),
        f"pending              {summary['pending']:>8,}  an hour to a month ahead, in delayed_index and nowhere else",
        f"rejected             {summary['rejected']:>8,}  on the rejects topics, with the reason",
        f"early                {summary['early']:>8,}",
        f"late                 {_late(summary['late_millis'])} (due over 5 s ahead, at the consumer)",
        f"  after the intake   {_late(summary['late_millis_after_intake'])}",
        f"audit                {summary['audit']}",
    ]
    if problems := summary["problems"]:
        lines.append(f"WRONG: {len(problems):,} problems" + (", such as" if len(problems) > _SHOWN_PROBLEMS else ""))
        lines += [f"  {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
    else:
        lines.append(f"every message's fate is as it should be ({summary['seconds']} s)")
    return lines


def _late(millis: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.0f} ms" for name, value in millis.items() if value is not None) or "not measured"
