"""What the tests share: a real broker for the session, and the program as a user runs it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import typer.main

from broker import standalone
from broker.client import connect
from broker.standalone import EmbeddedBroker
from jobs import cli
from tests.support.fuzzing.examples import load_profile

if TYPE_CHECKING:
    import pulsar

load_profile()

# The commands with their options are made of functions once, and not for each call: it takes a tenth of a second.
typer.main.get_command = functools.cache(typer.main.get_command)

TESTS = Path(__file__).parent
PROGRAM = Path(sys.executable).parent / "delaylake"

# A command or a process that takes longer hangs.
RUN_SECONDS = 400

Run = Callable[..., subprocess.CompletedProcess[str]]

# A test in these folders leaves nothing open and no thread that fails. The others have brokers, JVMs and browsers
# beside them, whose clients close their sockets when they like: there a warning is only shown.
STRICT_FOLDERS = ("unit", "parity")
LEFT_BEHIND = (
    "ResourceWarning",
    "pytest.PytestUnraisableExceptionWarning",
    "pytest.PytestUnhandledThreadExceptionWarning",
)

SLOW_FOLDERS = ("integration", "acceptance", "chaos", "attack")
# The files that take longest, the slowest first: minutes each, where others take seconds. What gives the job more time
# on a slow machine is not among the first four: all workers start a broker with these, and are slow.
SLOWEST = (
    "test_admin_api",
    "test_crashes",
    "test_fencing",
    "test_standby",
    "test_settings_edits",
    "test_large_in_chunks",
    "test_control",
    "test_job",
    "test_shaping",
    "test_slow",
    "test_schedule_keys",
    "test_retries",
    "test_pending",
    "test_dashboard",
    "test_unwritable",
    "test_engines",
    "test_disaster_drill",
    "test_fuzz",
    "test_importing",
    "test_what_arrives",
    "test_key_order",
    "test_other_systems",
    "test_backup",
    "test_faults",
    "test_sealed_buckets",
    "test_demo",
    "test_reschedule",
    "test_tutorial",
    "test_broker",
    "test_clients",
    "test_not_seen",
    "test_odd_messages",
    "test_sender",
)

# Files whose tests `make test` leaves to `make test-long`, beside single tests with this marker: several starts and
# crashes of a job for one feature each, other systems, and the dashboard in a browser.
LONG = frozenset(
    {
        "test_backup",
        "test_broker",
        "test_clients",
        "test_commands_of_docs",
        "test_dashboard",
        "test_dashboard_pages",
        "test_disaster_drill",
        "test_engines",
        "test_faults",
        "test_fencing",
        "test_fuzz",
        "test_importing",
        "test_jobs_of_sidekiq_and_bullmq",
        "test_key_order",
        "test_not_seen",
        "test_other_systems",
        "test_pending",
        "test_reschedule",
        "test_retries",
        "test_schedule_keys",
        "test_sealed_buckets",
        "test_sender",
        "test_settings_edits",
        "test_shaping",
        "test_slow",
        "test_standby",
        "test_tutorial",
        "test_unwritable",
        "test_what_arrives",
    }
)


def pytest_configure() -> None:
    """Gives each worker ports of its own: a broker binds those that it has chosen some seconds later."""
    worker, n = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    standalone.FREE_PORTS = standalone.FREE_PORTS[int(worker.removeprefix("gw")) % n :: n]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest files first, so that workers end together, and marks tests that are long.

    Says also which warnings fail a test, by its folder.

    What is left behind, such as a process, shows when it is collected, in whatever test that is: so it fails a test
    only where no others run in the same process.
    """
    slowest = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(
        key=lambda item: slowest.get(item.path.stem, len(slowest)) if _folder(item) in SLOW_FOLDERS else len(slowest)
    )
    folders = [_folder(item) for item in items]
    are_alone = all(folder in STRICT_FOLDERS for folder in folders)
    for item, folder in zip(items, folders, strict=True):
        if folder in SLOW_FOLDERS and item.path.stem in LONG:
            item.add_marker(pytest.mark.long)
        if folder not in STRICT_FOLDERS:
            item.add_marker(pytest.mark.filterwarnings("default::Warning"))
        elif are_alone:
            for warning in LEFT_BEHIND:
                item.add_marker(pytest.mark.filterwarnings(f"error::{warning}"))


def _folder(item: pytest.Item) -> str:
    """Returns the folder of tests/ that a test is in, however far below."""
    return item.path.relative_to(TESTS).parts[0]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker on free ports, one for the session: use the `topic` fixture to keep out of each other's way."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("broker"))
    try:
        broker.start(port=0, http_port=0)
        yield broker
    finally:
        broker.kill()


@pytest.fixture(scope="session")
def pulsar_client(broker: EmbeddedBroker) -> Iterator[pulsar.Client]:
    client = connect(broker.settings)
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A full topic name that no other test uses. The topic is not made."""
    # No hyphens: Pulsar takes `-partition-` for a partition's name.
    name = re.sub(r"[^A-Za-z0-9]+", "_", request.node.name).strip("_")
    return f"persistent://public/default/{name}_{uuid.uuid4().hex[:8]}"


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, and a terminal's width, from the environment the tests were started in."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in [name for name in os.environ if name.startswith("DELAYLAKE_") and name != "DELAYLAKE_CACHE"]:
        monkeypatch.delenv(name)


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command of the program in this process: one of its own takes a second of CPU time to begin."""
    out, error = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        patch("sys.stdin", io.StringIO(stdin)),
        patch("sys.argv", ["delaylake", *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), error.getvalue())


@pytest.fixture
def delaylake_here(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """As `delaylake`, in this process: for commands that start nothing and end at once."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patched:
            for name, value in (env or {}).items():
                patched.setenv(name, value)
            return run_here(*arguments)

    return run


@pytest.fixture
def delaylake(clean_environment: None) -> Run:
    """Runs the program to its end: `delaylake("produce", topic, "-m", "a", env={...})`."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = RUN_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PROGRAM), *arguments],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def broker_environment(broker: EmbeddedBroker) -> dict[str, str]:
    """The environment that makes the program use the session's broker."""
    settings = broker.settings
    return {"DELAYLAKE_PULSAR__SERVICE_URL": settings.service_url, "DELAYLAKE_PULSAR__ADMIN_URL": settings.admin_url}
