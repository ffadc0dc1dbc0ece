"""Keeps Arrow from importing pandas, which no process of the service needs."""

from __future__ import annotations

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
