"""Gives memory that is free back to the operating system, after work on many bytes.

Arrow and the C library keep what was freed. A dozen Python processes that have each had large messages once would have
a gigabyte so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pyarrow as pa

_P = ParamSpec("_P")
_R = TypeVar("_R")

# By how much a process must have grown; below it giving back, which takes about a millisecond, is not worth it.
_GROWN_PAGES = (16 << 20) // 4096

_STATM = Path("/proc/self/statm")

_pages = 0  # that the process had after the last time


def give_back_memory() -> None:
    """Gives free memory back, if the process has grown by much since it last did. Only Linux tells how large it is."""
    global _pages
    if (now := _resident_pages()) <= _pages + _GROWN_PAGES:
        _pages = min(now, _pages)
    else:
        pa.default_memory_pool().release_unused()
        with contextlib.suppress(AttributeError, OSError):  # another C library lacks it
            ctypes.CDLL(None).malloc_trim(0)
        _pages = _resident_pages()


def giving_back_memory(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function that gives free memory back when it has returned."""

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        try:
            return function(*args, **named)
        finally:
            give_back_memory()

    return call


def _resident_pages() -> int:
    try:
        return int(_STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
