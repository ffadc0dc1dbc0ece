"""The tutorial's commands, as they stand there, on a running job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import wait_until

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.S)
SENT = 101


@pytest.fixture
def environment(broker: EmbeddedBroker, tmp_path: Path, clean_environment: None) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}",
        "DELAYLAKE_PULSAR__SERVICE_URL": broker.settings.service_url,
        "DELAYLAKE_PULSAR__ADMIN_URL": broker.settings.admin_url,
        "DELAYLAKE_WAREHOUSE": f"file:{tmp_path}/warehouse",
        "DELAYLAKE_CHECKPOINT": f"file:{tmp_path}/checkpoint",
        "DELAYLAKE_API__PORT": "0",
    }


def test_each_command_does_what_the_text_says(environment: dict[str, str]) -> None:
    setup, start, send, look, change, check = BLOCKS
    assert "make setup" in setup
    run, api = (line.split("#")[0].split() for line in start.splitlines())
    assert (run, api) == (["delaylake", "run"], ["delaylake", "api"])
    [topic] = re.findall(r"^orders=(\S+)$", send, re.M)

    def sh(command: str) -> str:
        script = f"set -euo pipefail; orders={topic}; {command}"
        done = subprocess.run(
            ["bash", "-c", script],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    processes = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for command in (run, api)
    ]
    try:
        lines = [process.stdout.readline().strip() for process in processes if process.stdout]
        assert lines[0] == "ready"
        assert lines[1].startswith("http://127.0.0.1:")
        ids = sh(send.replace("1m", "10m")).split()  # a busy machine takes its time
        assert len(ids) == SENT
        listing, schedule = look.splitlines()
        wait_until(lambda: sh(f"{listing} --limit 1000").count("customer-7") == SENT, 60, "all are listed")
        assert topic in sh(schedule)
        skip, dry_run, cancel, cancelled, restore = (line for line in change.replace("7:0", ids[0]).splitlines())
        assert "APPLIED" in sh(skip)
        assert f"{SENT} messages match" in sh(dry_run)
        sh(cancel)
        wait_until(lambda: "customer-7" not in sh(listing), 30, "nothing waits")
        assert sh(f"{cancelled} --limit 1000").count("customer-7") == SENT
        sh(restore)
        wait_until(lambda: sh(f"{listing} --limit 1000").count("customer-7") == SENT, 30, "all wait again")
        os.killpg(processes[0].pid, signal.SIGKILL)
        processes[0].wait()
        sh(check)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
