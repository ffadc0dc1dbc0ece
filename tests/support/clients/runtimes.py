"""The runtimes of other languages, in which the clients and the examples are tested."""

from __future__ import annotations

import os
import shutil

import pytest


def need(program: str, missing: str) -> None:
    """Skips a test where a program is not there; fails it if CI is set in the environment.

    Args:
        program: its name or path.
        missing: what is to be installed.
    """
    if shutil.which(program) is None:
        reason = f"this test needs {missing}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
