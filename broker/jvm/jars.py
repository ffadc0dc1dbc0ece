"""Fetches the JARs of the embedded broker and of Delta for Spark with Maven, once, and checks their hashes."""

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
from conf.files import OWNER_ALONE

JarSet = Literal["broker", "spark"] | Path  # a folder of conf/, or any other folder with a pom.xml

CONF = Path(__file__).parents[2] / "conf"
_SETS: tuple[JarSet, ...] = ("broker", "spark")


class JarsError(DelayLakeError):
    """The JARs can't be fetched."""


def cache_folder() -> Path:
    """Returns the cache folder: `$DELAYLAKE_CACHE`, else `$XDG_CACHE_HOME/delaylake`, else `~/.cache/delaylake`."""
    if own := os.environ.get("DELAYLAKE_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "delaylake"


def jars(name: JarSet) -> Path:
    """Returns the folder with the JARs of the `pom.xml` of a set, and nothing else; fetches them if needed.

    Each JAR has the hash that `jars.sha256` beside it records. The folder's name has the hash of both files, so the
    JARs are fetched anew where one of them has changed. An interrupted fetch leaves no such folder.

    Raises:
        JarsError: Maven is missing or failed, a JAR is another one, or the cache folder can't be written.
    """
    source = CONF / name
    known = _recorded(source)
    content = (source / "pom.xml").read_bytes() + (known.read_bytes() if known.exists() else b"")
    folder = cache_folder() / f"{source.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _fetch(source, folder)
    except OSError as error:
        raise JarsError(f"can't write to {folder.parent}: {error.strerror}; set DELAYLAKE_CACHE") from error
    return folder


def _record(source: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="delaylake-") as folder:
        _copy(source, Path(folder))
        _recorded(source).write_text(hashes_of(Path(folder)))


def _fetch(source: Path, folder: Path) -> None:
    for left_over in folder.parent.glob(f"{folder.name}.*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _copy(source, partial)
        _check(source, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, folder: Path) -> None:
    """Lets Maven copy the JARs of the POM in a folder to another one.

    Raises:
        JarsError: Maven is missing or failed.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise JarsError(
            f"the {source.name} JARs have to be fetched once and Maven (mvn) is not on the PATH: install it"
        )
    command = [
        maven,
        "--batch-mode",
        "--file",
        str(source / "pom.xml"),
        "dependency:copy-dependencies",
        "-DincludeScope=runtime",
    ]
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
        output = _follow(maven_process, f"fetching the {source.name} JARs with Maven (once)")
    if maven_process.returncode != 0:
        raise JarsError(f"Maven could not fetch the {source.name} JARs: {_reason(output)}")


def hashes_of(folder: Path) -> str:
    """Returns the hashes of a folder's JARs as `sha256sum` writes them, in the order of their names."""
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def _recorded(source: Path) -> Path:
    return source / "jars.sha256"


def _check(source: Path, folder: Path) -> None:
    """Checks that a folder has the JARs whose hashes are recorded, and no others.

    Raises:
        JarsError: a JAR is another one, missing, or not recorded.
    """
    file = _recorded(source)
    recorded = set(file.read_text().splitlines()) if file.exists() else set()
    if wrong := sorted({line.split(maxsplit=1)[1] for line in recorded ^ set(hashes_of(folder).splitlines())}):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise JarsError(
            f"the {source.name} JARs that Maven fetched are not those of {file}: {wrong[0]}{more}. None was kept; "
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
    """Fetches missing JARs (`python -m broker.jvm.jars [record] [folder ...]`); returns the exit status.

    Of the folders with a POM that are named, or else of those in conf/. With the argument `record` it first records the
    hashes of what Maven fetches now.
    """
    os.umask(OWNER_ALONE)
    folders = [Path(argument).absolute() for argument in sys.argv[1:] if argument != "record"]
    try:
        for name in folders or _SETS:
            if "record" in sys.argv[1:]:
                _record(CONF / name)
            jars(name)
    except JarsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
