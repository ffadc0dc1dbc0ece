"""The client for Node: its folder, with what `make programs` has fetched, and built."""

from __future__ import annotations

import subprocess
from pathlib import Path

from filelock import FileLock

from tests.conftest import RUN_SECONDS
from tests.support.clients.runtimes import need

FOLDER = Path(__file__).parents[3] / "clients/node"
_FETCHED = FOLDER / "node_modules"


def need_node() -> None:
    """Skips a test where Node, or what the client is built with, is not there; fails it if CI is set."""
    need("node", "Node 20+ with npm")
    need("npm", "Node 20+ with npm")
    need(str(_FETCHED / ".bin/tsc"), "`make programs`")


def build() -> None:
    """Builds the client, unless it is built of its newest sources."""
    with FileLock(_FETCHED / ".build.lock"):
        newest = max(file.stat().st_mtime for file in FOLDER.glob("src/*"))
        built = FOLDER / "dist/index.js"
        if not built.exists() or built.stat().st_mtime < newest:
            npm("run", "build")


def npm(*arguments: str, folder: Path = FOLDER) -> str:
    """Runs npm; returns what it prints."""
    return run(["npm", "--silent", *arguments], folder)


def run(command: list[str], folder: Path = FOLDER, environment: dict[str, str] | None = None) -> str:
    """Runs a program to its end; returns what it prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
