"""Shows a text again and again, for `--watch`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, tzinfo
from typing import Annotated, Self

import typer

from conf.errors import DelayLakeError
from conf.times import time_text
from jobs.options import Output

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
    is_screen = output is Output.TEXT and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    text = render()
    with _Screen() if is_screen else nullcontext() as screen, suppress(KeyboardInterrupt):
        while True:
            now = time_text(time.time_ns() // 1_000_000, zone)
            if screen:
                screen.show(f"{now}, every {seconds:g} s; Ctrl-C ends\n\n{text}")
            else:
                print(text if output is Output.JSON else f"{now}\n{text}\n", flush=True)
            sleep(seconds)
            try:
                text = render()
            except DelayLakeError as error:
                if output is Output.JSON:
                    raise
                text = f"error: {' '.join(error.lines)}"


class _Screen:
    """A place on the terminal where each text replaces the one before, as far as there is room for it."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stdout, color_system=None, force_terminal=True)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text, overflow="fold"), refresh=True)
