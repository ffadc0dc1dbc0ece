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
    """Makes Arrow look for pandas now, in vain; to be called before Arrow is given a list or an array.

    Arrow looks for pandas once, when it is first given one, in case it is a Series: 0.3 CPU seconds and 25 MiB for each
    process. pandas can still be imported afterwards, and Arrow's `to_pandas` does so by itself.
    """
    if "pandas" not in sys.modules:
        with without_pandas():
            pa.array([])
