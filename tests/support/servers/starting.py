"""What it takes to start a server of another system."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


def wait_until_it_answers(
    server: subprocess.Popen[bytes],
    log: Path,
    ask: Callable[[], object],
    failures: type[Exception] | tuple[type[Exception], ...],
    seconds: float = 60,
) -> None:
    """Asks a server until it answers.

    Args:
        failures: what is raised while it does not.
        seconds: after so many it is given up.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            ask()
            return
        except failures:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


def package_folder(package: str) -> Path:
    """Returns a package's folder, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
