"""Calls in threads, so that the caller need not wait for their end."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Makes a call in a daemon thread.

    Returns:
        a future of the call's result, which can't be cancelled.
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
