"""Arrow without pandas, which it would import in each process for nothing."""

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
    """What is imported inside finds no pandas, unless that is imported already."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        yield
    finally:
        sys.meta_path.remove(_NoPandas)


def leave_pandas_out() -> None:
    """Has Arrow look for pandas now, where it finds none; to be called before Arrow is given a list or an array.

    It looks for it once, the first time it is given one, in case that is a Series: 0.3 CPU seconds and 25 MiB for each
    process. Who wants pandas can import it afterwards, and Arrow's `to_pandas` does so by itself.
    """
    if "pandas" not in sys.modules:
        with without_pandas():
            pa.array([])
