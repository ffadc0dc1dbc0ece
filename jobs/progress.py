"""Shows the progress of long work on a terminal."""

from __future__ import annotations

import sys

from jobs.options import Output


class ProgressLine:
    """One line on stderr that is overwritten, and cleared at the end. A context manager.

    Nothing is shown if stderr is not a terminal, or the output is JSON.
    """

    def __init__(self, output: Output) -> None:
        self._is_shown = sys.stderr.isatty() and output is Output.TEXT

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, table: str, step: str, rows: int) -> None:
        if self._is_shown:
            print(f"\r\033[K{table}: {rows:,} {step}", end="", file=sys.stderr, flush=True)
