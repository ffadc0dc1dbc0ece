"""The turn file: by it the driver tells a task, on the same machine, that its turn to send has come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from conf.errors import DelayLakeError
from conf.files import replace_file
from streaming.release.naming import Target

_POLL_SECONDS = 0.005


class RunEndedError(DelayLakeError):
    """The run has ended while a task waits for its turn, which will not come. Control flow: it ends the task."""


def announce_turn(file: Path, unwritable: Iterable[Target]) -> None:
    """Writes the turn file of a task.

    Args:
        file: the turn file.
        unwritable: the targets to which the task must not send now.
    """
    replace_file(file, json.dumps(sorted(unwritable)).encode())


def wait_for_turn(file: str, check: Callable[[], None]) -> set[Target]:
    """Waits in a task until its turn has come.

    Args:
        file: the turn file; empty: the task need not wait.
        check: called all the time while it waits; may raise.

    Returns:
        the targets to which the task must not send now, because earlier messages have not arrived there.

    Raises:
        RunEndedError: the file's folder is gone.
    """
    while file:
        check()
        try:
            return {(topic, name) for topic, name in json.loads(Path(file).read_text())}
        except FileNotFoundError:
            if not Path(file).parent.is_dir():
                raise RunEndedError("the run has ended") from None
            time.sleep(_POLL_SECONDS)
    return set()
