"""Shows the demo's progress on stderr: in place on a terminal, else as lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 5


class Progress:
    """Shows steps and numbers.

    Args:
        is_shown: whether anything is shown.
    """

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._console = Console(stderr=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Shows the name of a step while the block runs."""
        if not self._is_shown:
            yield
        elif self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._line(f"{what} ...")
            yield

    @contextmanager
    def live(self, numbers: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """Shows numbers while the block runs.

        Args:
            numbers: returns the texts to show by name; called for each update, in a thread.
        """
        if not self._is_shown:
            yield
            return
        done = threading.Event()
        show = self._show_in_place if self._console.is_terminal else self._show_lines
        thread = threading.Thread(target=show, args=(numbers, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=2)

    def _show_in_place(self, numbers: Callable[[], Mapping[str, str]], done: threading.Event) -> None:
        with Live(_table(numbers()), console=self._console, auto_refresh=False) as live:
            while not done.wait(_REFRESH_SECONDS):
                live.update(_table(numbers()), refresh=True)
            live.update(_table(numbers()), refresh=True)

    def _show_lines(self, numbers: Callable[[], Mapping[str, str]], done: threading.Event) -> None:
        while not done.wait(_LINE_SECONDS):
            self._line("   ".join(f"{name} {value}" for name, value in numbers().items()))

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def _table(numbers: Mapping[str, str]) -> Table:
    table = Table(title="delaylake")
    for name in numbers:
        table.add_column(name, justify="right", min_width=9)
    table.add_row(*numbers.values())
    return table
