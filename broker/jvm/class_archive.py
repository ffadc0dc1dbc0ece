"""Archives of a JVM's classes (class-data sharing), with which later starts are quicker.

A JVM that starts without an archive notes the classes that it loads. When it is up, a separate process with low
priority makes an archive of them in the cache folder. The JVM checks that an archive fits its version, class path and
options, and starts without it otherwise: nothing depends on an archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from broker.jvm.jars import cache_folder

_CLASSES = "-XX:DumpLoadedClassList="
_ARCHIVE = "-XX:SharedArchiveFile="

# How long a JVM that is up still loads classes, in seconds.
_SETTLING_SECONDS = 15.0

# An archive that no start has used for this long, in seconds, is removed: it is obsolete, and has some 150 MB.
_UNUSED_SECONDS = 30 * 86_400

_NICE = 15


def archive_options(name: str, java: Path, class_path: Iterable[Path], options: Sequence[str]) -> list[str]:
    """Returns the options with which a JVM uses its archive, or notes its classes for one.

    Args:
        name: the name of the program that the JVM runs; the archive's file name begins with it.
        java: path of the program `java`.
        class_path: the JVM's JARs.
        options: the other options of the JVM on which an archive depends.

    Returns:
        options for the JVM; empty if it can't have an archive.
    """
    try:
        base = cache_folder() / f"{name}-{_key(java, class_path, options)}"
        if (archive := _whole(base)) is not None:
            os.utime(archive)
            return [f"{_ARCHIVE}{archive}", "-XX:+VerifySharedSpaces"]  # verifies the checksum, in 60 ms
        if _log_of(base).exists() or " " in str(base):  # making it failed; or Spark would cut the option at a space
            return []
        base.parent.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(base.parent, os.W_OK)
    except OSError:
        return []
    return [f"{_CLASSES}{base}.{uuid.uuid4().hex[:8]}.classes"] if is_writable else []


def discard_archive(options: Iterable[str]) -> bool:
    """Removes the archive that a JVM's options name, because the JVM did not start with it; it is not made again.

    Returns:
        whether the options name an archive.
    """
    used = [Path(option.removeprefix(_ARCHIVE)) for option in options if option.startswith(_ARCHIVE)]
    for archive in used:
        with contextlib.suppress(OSError):
            _log_of(archive.with_name(archive.name.rpartition("-")[0])).write_text("a JVM did not start with it\n")
            archive.unlink(missing_ok=True)
    return bool(used)


def make_archive(pid: int, settling_seconds: float = _SETTLING_SECONDS) -> None:
    """Starts a process that makes an archive of the classes that a JVM notes, if it notes any; returns at once.

    Args:
        pid: the process id of the JVM, which is up.
        settling_seconds: classes that the JVM loads within this time are in the archive, too.
    """
    with contextlib.suppress(OSError, psutil.Error):
        jvm = _up_to_main_class(psutil.Process(pid).cmdline())
        classes = [option.removeprefix(_CLASSES) for option in jvm if option.startswith(_CLASSES)]
        if not classes:
            return
        jvm = [option for option in jvm if not option.startswith(_CLASSES)]
        arguments = [sys.executable, "-m", "broker.jvm.class_archive", str(settling_seconds), classes[0], *jvm]
        # The shell ends at once, so that nobody has to wait for the process that it has started.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            start_new_session=True,
        )


def _key(java: Path, class_path: Iterable[Path], options: Sequence[str]) -> str:
    """Returns a hash of everything that an archive depends on: the JVM, the class path and the options.

    Raises:
        FileNotFoundError: the JVM can't have an archive, or a JAR is missing.
    """
    libraries = sorted((java.resolve().parent.parent / "lib" / "server").glob("libjvm.*"))
    if not libraries:
        raise FileNotFoundError(f"{java} is no JVM that can have an archive")
    content = [*options, *(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("JAVA_", "JDK_")))]
    for file in [*libraries, *sorted(class_path)]:
        stat = file.stat()
        content.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


def _whole(base: Path) -> Path | None:
    """Returns the complete archive, if there is one, and removes incomplete ones, with which a JVM would crash."""
    for archive in base.parent.glob(f"{base.name}-*.jsa"):
        if archive.name == f"{base.name}-{archive.stat().st_size}.jsa":
            return archive
        archive.unlink(missing_ok=True)
    return None


def _log_of(base: Path) -> Path:
    """Returns the file that says why an archive could not be made or used; none is made while it exists."""
    return base.with_suffix(".log")


def _up_to_main_class(command: Sequence[str]) -> list[str]:
    """Returns a JVM's program and options from its command line, without the main class and its arguments.

    The command line of a process that has just ended is empty, and so is the result.
    """
    words = iter(command)
    jvm = list(islice(words, 1))
    for word in words:
        if word in ("-cp", "-classpath", "--class-path"):
            jvm += [word, next(words)]
        elif word.startswith("-"):
            jvm.append(word)
        else:
            break
    return jvm


def _make(classes: Path, jvm: Sequence[str]) -> None:
    """Makes the archive of the classes that a JVM has noted, unless it is there or another process is making it.

    Args:
        classes: the file of the noted classes.
        jvm: the JVM's program and options.
    """
    base = classes.with_suffix("").with_suffix("")
    with contextlib.suppress(Timeout), FileLock(f"{base}.lock", timeout=0):
        if _whole(base) is not None:
            return
        partial = classes.with_suffix(".partial")
        try:
            noted = classes.read_text(errors="replace")
            classes.write_text(noted[: noted.rfind("\n") + 1])  # the JVM may be writing the last line
            _dump([*jvm, "-Xshare:dump", f"-XX:SharedClassListFile={classes}", f"{_ARCHIVE}{partial}"])
            with open(partial, "rb") as written:
                os.fsync(written.fileno())
            partial.rename(f"{base}-{partial.stat().st_size}.jsa")
        except (OSError, subprocess.CalledProcessError) as error:
            _log_of(base).write_text(f"{error}\n{getattr(error, 'stdout', '') or ''}")
        finally:
            partial.unlink(missing_ok=True)


def _dump(command: Sequence[str]) -> None:
    """Runs a JVM that writes an archive.

    Raises:
        CalledProcessError: it failed; the error has its output.
    """
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=True,
    )


def _remove_unused(folder: Path) -> None:
    """Removes archives that no start uses any more, and files that killed processes have left."""
    for pattern, seconds in (("*-*-*.jsa", _UNUSED_SECONDS), ("*-*.classes", 86_400), ("*-*.partial", 86_400)):
        for file in folder.glob(pattern):
            if time.time() - file.stat().st_mtime > seconds:
                file.unlink(missing_ok=True)


def _main() -> None:
    """Waits some seconds, and makes an archive. Arguments: SECONDS CLASSES JAVA OPTION..."""
    seconds, classes, *jvm = sys.argv[1:]
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        # With autogroup the niceness counts only within this session; this file sets that of the whole session.
        Path("/proc/self/autogroup").write_text(str(_NICE))
    time.sleep(float(seconds))
    _remove_unused(cache_folder())
    try:
        _make(Path(classes), jvm)
    finally:
        Path(classes).unlink(missing_ok=True)


if __name__ == "__main__":
    _main()
