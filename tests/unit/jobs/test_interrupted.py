"""However early the program is told to end, and whoever stops reading it: no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

import jobs
from tests.conftest import RUN_SECONDS

pytestmark = pytest.mark.slow

# The program, which gets a signal when it begins to import a module.
SIGNALLED = """
import os, sys

class Signalling:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)

module, number, sys.argv = sys.argv[1], int(sys.argv[2]), ["delaylake", *sys.argv[3:]]
sys.meta_path.insert(0, Signalling())
from jobs.__main__ import main
main()
"""

PROGRAM = ("-m", "jobs")


def run(*arguments: str, out: int | IO[bytes] = subprocess.PIPE, **also: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
        **also,
    )


@pytest.fixture
def unread() -> Iterator[int]:
    """A descriptor to write to, which nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


# A module of the first that are imported, one of the last, and one that the command imports.
MODULES = ["typer", "jobs.commands.messages.topics", "uvicorn"]


def test_the_program_is_what_these_tests_run() -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["scripts"] == {"delaylake": "jobs.__main__:main"}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_it_imports_ends_it_without_a_word(module: str, number: signal.Signals) -> None:
    done = run(
        *("-c", SIGNALLED, module, str(int(number)), "api", "--port", "0"),
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the tests may run with it ignored
    )
    # The shell says 128 + n also of what a signal ended.
    status = 128 - done.returncode if done.returncode < 0 else done.returncode
    assert (status, done.stdout, done.stderr) == (128 + number, "", "")


# As in a container: a process of number 1, and its children with it. Also for who is not root, where that is allowed.
FIRST_PROCESS = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*FIRST_PROCESS, "true"], capture_output=True).returncode != 0,
    reason="there are no namespaces here",
)
@pytest.mark.parametrize("module", ["typer", "filelock", "streaming.session"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_first_process_of_a_container_ends_before_spark_has_started(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The kernel keeps from it what it has no handler for. `run` imports the second module, then the third one."""
    settings = tmp_path / "settings.yaml"
    routes = [{"source": "persistent://public/default/t", "subscriptions": [{"name": "a"}]}]
    pulsar = {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"}
    places = {name: f"file:{tmp_path}/{name}" for name in ("warehouse", "checkpoint")}
    settings.write_text(yaml.safe_dump({"pulsar": pulsar, "routes": routes, **places}))
    program = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "--config", str(settings), "run"]
    done = subprocess.run(
        [*FIRST_PROCESS, *program], capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("file", ["__main__.py", "cli.py"])
def test_a_file_that_spark_submit_is_given_is_the_same_program(file: str, unread: int) -> None:
    done = run(str(Path(jobs.__file__).with_name(file)), "run", "--help", out=unread)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_signal_that_it_was_told_to_ignore_is_ignored() -> None:
    """As a shell has it for what a script starts in the background."""
    done = run(
        *("-c", SIGNALLED, "typer", str(int(signal.SIGINT)), "--version"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("run", "--help"), ("schedules", "next", "50", "--repeat", "@every 1h"), ("no-such-command",)],
    ids=" ".join,
)
def test_who_stops_reading_it_ends_it_without_a_word(arguments: tuple[str, ...], unread: int) -> None:
    """As `delaylake ... | head -1` does; here before the first line."""
    done = run(*PROGRAM, *arguments, out=unread)
    if arguments == ("no-such-command",):  # which writes nothing to it
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
    else:
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        done = run(*PROGRAM, "--version", out=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    logs = """
import logging, sys
from jobs.logs import LogFormat, configure
sys.stderr = open("/dev/full", "w", buffering=1)
configure(logging.INFO, LogFormat.TEXT)
logging.getLogger("job").warning("a line")
print("goes on")
sys.stderr = None
"""
    done = run("-c", logs)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


@pytest.mark.parametrize("out", [subprocess.DEVNULL, subprocess.PIPE], ids=["nowhere", "read"])
def test_a_connection_that_breaks_is_an_error(out: int) -> None:
    """Also where the output is thrown away, as a service's may be."""
    broken = """
from unittest import mock
from jobs.__main__ import main
with mock.patch("conf.times.parse_zone", side_effect=BrokenPipeError(32, "Broken pipe")):
    main()
"""
    done = run("-c", broken, "--time-zone", "UTC", "status", out=out)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 32] Broken pipe (unexpected: a connection was closed)\n"
