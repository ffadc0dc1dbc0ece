"""Fetches the JARs of the embedded broker and of Delta for Spark with Maven, once, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from filelock import FileLock
from rich.console import Console

from conf.errors import DelayLakeError

JarSet = Literal["broker", "spark"]

CONF = Path(__file__).parents[2] / "conf"


class JarsError(DelayLakeError):
    """The JARs can't be fetched."""


def cache_folder() -> Path:
    """Returns the cache folder: `$DELAYLAKE_CACHE`, else `$XDG_CACHE_HOME/delaylake`, else `~/.cache/delaylake`."""
    if own := os.environ.get("DELAYLAKE_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "delaylake"


def jars(name: JarSet) -> Path:
    """Returns the folder with the JARs of `conf/<name>/pom.xml`, and nothing else; fetches them if needed.

    The folder's name has the POM's hash, so the JARs of a changed POM are fetched anew. An interrupted fetch leaves no
    such folder.

    Raises:
        JarsError: Maven is missing or failed, or the cache folder can't be written.
    """
    pom = CONF / name / "pom.xml"
    folder = cache_folder() / f"{name}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _fetch(name, pom, folder)
    except OSError as error:
        raise JarsError(f"can't write to {folder.parent}: {error.strerror}; set DELAYLAKE_CACHE") from error
    return folder


def _fetch(name: JarSet, pom: Path, folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise JarsError(f"the {name} JARs have to be fetched once and Maven (mvn) is not on the PATH: install it")
    for left_over in folder.parent.glob(f"{folder.name}.*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        command = [maven, "--batch-mode", "--file", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
        maven_process = subprocess.Popen(
            [*command, f"-DoutputDirectory={partial}"],
            cwd=folder.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with maven_process:
            output = _follow(maven_process, f"fetching the {name} JARs with Maven (once)")
        if maven_process.returncode != 0:
            raise JarsError(f"Maven could not fetch the {name} JARs: {_reason(output)}")
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _follow(maven: subprocess.Popen[str], what: str) -> list[str]:
    """Returns Maven's output, and shows its progress on stderr: a spinner in a terminal, else one line."""
    console = Console(stderr=True)
    lines: list[str] = []
    downloaded = 0
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
    with console.status(what) as status:
        for line in maven.stdout or ():
            lines.append(line.rstrip())
            if "Downloaded from" in line and ".jar" in line:
                downloaded += 1
                status.update(f"{what}: {downloaded} downloaded")
    return lines


def _reason(output: list[str]) -> str:
    errors = [line.removeprefix("[ERROR]").strip() for line in output if line.startswith("[ERROR]")]
    return next((line for line in errors if line), output[-1] if output else "no output")


def main() -> int:
    """Fetches missing JARs (`python -m broker.jvm.jars`); returns the exit status."""
    try:
        jars("broker")
        jars("spark")
    except JarsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
