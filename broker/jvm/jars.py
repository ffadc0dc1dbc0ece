"""Fetches the JARs of the embedded broker and of Delta for Spark with Maven, once, and checks their hashes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock
from rich.console import Console

from conf.errors import DelayLakeError
from conf.files import OWNER_ALONE

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

    Each JAR has the hash that `conf/<name>/jars.sha256` records. The folder's name has the hash of both files, so the
    JARs are fetched anew where one of them has changed. An interrupted fetch leaves no such folder.

    Raises:
        JarsError: Maven is missing or failed, a JAR is another one, or the cache folder can't be written.
    """
    pom = CONF / name / "pom.xml"
    known = _recorded(name)
    content = pom.read_bytes() + (known.read_bytes() if known.exists() else b"")
    folder = cache_folder() / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
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


def _record(name: JarSet) -> None:
    with tempfile.TemporaryDirectory(prefix="delaylake-") as folder:
        _copy(name, CONF / name / "pom.xml", Path(folder))
        _recorded(name).write_text(hashes_of(Path(folder)))


def _fetch(name: JarSet, pom: Path, folder: Path) -> None:
    for left_over in folder.parent.glob(f"{folder.name}.*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _copy(name, pom, partial)
        _check(name, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(name: JarSet, pom: Path, folder: Path) -> None:
    """Lets Maven copy the JARs of a POM to a folder.

    Raises:
        JarsError: Maven is missing or failed.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise JarsError(f"the {name} JARs have to be fetched once and Maven (mvn) is not on the PATH: install it")
    command = [maven, "--batch-mode", "--file", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    maven_process = subprocess.Popen(
        [*command, f"-DoutputDirectory={folder}"],
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


def hashes_of(folder: Path) -> str:
    """Returns the hashes of a folder's JARs as `sha256sum` writes them, in the order of their names."""
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def _recorded(name: JarSet) -> Path:
    return CONF / name / "jars.sha256"


def _check(name: JarSet, folder: Path) -> None:
    """Checks that a folder has the JARs whose hashes are recorded, and no others.

    Raises:
        JarsError: a JAR is another one, missing, or not recorded.
    """
    file = _recorded(name)
    recorded = set(file.read_text().splitlines()) if file.exists() else set()
    if wrong := sorted({line.split(maxsplit=1)[1] for line in recorded ^ set(hashes_of(folder).splitlines())}):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise JarsError(
            f"the {name} JARs that Maven fetched are not those of {file}: {wrong[0]}{more}. None was kept; "
            "where the POM was changed on purpose, `make lock` records them anew"
        )


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
    """Fetches missing JARs (`python -m broker.jvm.jars`); returns the exit status.

    With the argument `record` it first records the hashes of what Maven fetches now.
    """
    os.umask(OWNER_ALONE)
    try:
        for name in get_args(JarSet):
            if "record" in sys.argv[1:]:
                _record(name)
            jars(name)
    except JarsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
