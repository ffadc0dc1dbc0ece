"""Keeps Arrow from importing pandas, which no process of the service needs, and from keeping freed memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pyarrow as pa


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


@contextmanager
def without_pandas() -> Iterator[None]:
    """While the block runs, imports do not find pandas, unless it is imported already."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        yield
    finally:
        sys.meta_path.remove(_NoPandas)


def leave_pandas_out() -> None:
    """Makes Arrow believe that there is no pandas; to be called before Arrow gets its first list or array.

    At that moment Arrow tries to import pandas, once, in case it is a Series: 0.3 CPU seconds and 25 MiB in each
    process. pandas can still be imported afterwards, and Arrow's `to_pandas` does so.
    """
    if "pandas" not in sys.modules:
        with without_pandas():
            pa.array([])


_POOL = "ARROW_DEFAULT_MEMORY_POOL"  # Arrow's own variable, read when it is imported


def use_system_memory() -> None:
    """Lets Arrow take memory from the C library, in this process and in those that it starts.

    Arrow's own allocator keeps what was freed: of a job under load a fifth of its memory. Who has set Arrow's variable
    has chosen another one.
    """
    if _POOL not in os.environ:
        os.environ[_POOL] = "system"
        pa.set_memory_pool(pa.system_memory_pool())
