"""The threads of a run: an exception in one ends the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class RunThreads:
    """Starts threads. An exception in one becomes `failure`."""

    def __init__(self) -> None:
        self.failure: str | None = None  # the error that has ended a thread

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread, which ends with the process."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # also a panic of a library in Rust, which is no Exception
                _log.exception("%s", name)
                self.failure = f"{name}: {type(error).__name__}: {error}"

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
