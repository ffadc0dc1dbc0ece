"""The file by which the driver tells a task, on the same machine, that its turn to send has come."""

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
    """The run of a task that waits for its turn has ended: the turn does not come. Control flow: it ends the task."""


def announce_turn(file: Path, unwritable: Iterable[Target]) -> None:
    """Tells the task that waits for a file that its turn has come, and to which targets nothing may be sent now."""
    replace_file(file, json.dumps(sorted(unwritable)).encode())


def wait_for_turn(file: str, check: Callable[[], None]) -> set[Target]:
    """Waits in a task until its turn has come.

    Args:
        file: for which the task waits; empty: for none.
        check: called all the time; may raise.

    Returns:
        the targets to which nothing may be sent now: what comes before has not arrived there.

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
