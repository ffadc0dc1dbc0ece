"""Calls that are waited for only so long, whatever they do meanwhile."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Makes a call in a thread of its own, which does not keep the program from ending.

    Returns:
        its result; to cancel it has no effect.
    """
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return future
