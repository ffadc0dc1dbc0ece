"""The runtimes of other languages, in which the clients and the examples are tested."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def need(program: str, missing: str) -> None:
    """Skips a test where a program is not there; fails it if CI is set in the environment.

    Args:
        program: its name or path.
        missing: what is to be installed.
    """
    if shutil.which(program) is None:
        _leave_out(missing)


def need_file(file: Path, missing: str) -> None:
    """As `need`, where a file is not there."""
    if not file.exists():
        _leave_out(missing)


def _leave_out(missing: str) -> None:
    reason = f"this test needs {missing}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
