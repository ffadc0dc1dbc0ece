"""Shows a text again and again, for `--watch`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from datetime import UTC, tzinfo
from typing import Annotated

import typer

from conf.errors import DelayLakeError
from conf.times import time_text
from jobs.options import Output
from jobs.text_table import fold

_HOME, _CLEAR, _END_OF_LINE, _END_OF_SCREEN = "\033[H", "\033[2J", "\033[K", "\033[J"

WatchOption = Annotated[
    float | None,
    typer.Option(
        "--watch", min=0.1, metavar="SECONDS", help="Show it again every so many seconds, until Ctrl-C.",
        show_default=False,
    ),
]  # fmt: skip


def watch(
    render: Callable[[], str],
    seconds: float,
    output: Output,
    zone: tzinfo | None = UTC,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the text that a function returns, again and again until SIGINT.

    On a terminal each text replaces the one before; else it is printed below, with the time. An error after the first
    text is shown instead of the text.

    Args:
        render: returns the text; with JSON one line.
        seconds: the time from one call to the next.
        output: with JSON only the lines are printed, without the time.
        zone: the zone of the time that is shown; None: the machine's.
        sleep: waits for a number of seconds.

    Raises:
        DelayLakeError: the first call of `render` failed, or with JSON any.
    """
    is_screen = output is Output.TEXT and sys.stdout.isatty()
    text = render()
    try:
        if is_screen:
            print(_CLEAR, end="")
        while True:
            now = time_text(time.time_ns() // 1_000_000, zone)
            if is_screen:
                _redraw([f"{now}, every {seconds:g} s; Ctrl-C ends", "", *text.splitlines()])
            else:
                print(text if output is Output.JSON else f"{now}\n{text}\n", flush=True)
            sleep(seconds)
            try:
                text = render()
            except DelayLakeError as error:
                if output is Output.JSON:
                    raise
                text = f"error: {' '.join(error.lines)}"
    except KeyboardInterrupt:
        if is_screen:
            print()


def _redraw(lines: list[str]) -> None:
    """Writes lines over the screen, as many as there is room for; longer ones are folded."""
    size = shutil.get_terminal_size()
    shown = [part for line in lines for part in fold(line, size.columns - 1)][: size.lines - 1]
    print(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in shown) + _END_OF_SCREEN, end="", flush=True)
