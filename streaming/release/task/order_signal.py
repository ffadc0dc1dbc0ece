"""Order signals: a file tells a task, on the driver's machine, that the releases have ended for which it waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from conf.errors import DelayLakeError
from conf.files import replace_file
from streaming.release.naming import Recipient

_POLL_SECONDS = 0.005


class RunEndedError(DelayLakeError):
    """The run has ended while a task waits for its signal, which will not come. Control flow: it ends the task."""


def write_signal(file: Path, unwritable: Iterable[Recipient]) -> None:
    """Tells a task that it may send.

    Args:
        file: for which the task waits.
        unwritable: the recipients to which the task must not send now.
    """
    replace_file(file, json.dumps(sorted(unwritable)).encode())


def wait_for_signal(file: str, check: Callable[[], None]) -> set[Recipient]:
    """Waits in a task until earlier releases with messages of the same keys have ended.

    Args:
        file: the signal; empty: the task need not wait.
        check: called all the time while it waits; may raise.

    Returns:
        the recipients to which the task must not send now, because earlier messages have not arrived there.

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
