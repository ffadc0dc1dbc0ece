"""The tutorial's commands, as they stand there, on a running job."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from broker import standalone
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import wait_until

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.S)
SENT = 101


@pytest.fixture
def environment(tmp_path: Path, clean_environment: None) -> dict[str, str]:
    port, http_port = random.sample(standalone.FREE_PORTS, 2)
    return {
        **os.environ,
        "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}",
        "DELAYLAKE_CONFIG": str(ROOT / "conf" / "delaylake.yaml"),
        "DELAYLAKE_PULSAR__SERVICE_URL": f"pulsar://127.0.0.1:{port}",
        "DELAYLAKE_PULSAR__ADMIN_URL": f"http://127.0.0.1:{http_port}",
        "DELAYLAKE_API__PORT": "0",
    }


def test_each_command_does_what_the_text_says(environment: dict[str, str], tmp_path: Path) -> None:
    setup, arrive, send, look, change, check = BLOCKS
    assert "make setup" in setup
    dev = setup.splitlines()[-1].split("#")[0].split()
    assert dev == ["delaylake", "dev"]
    [topic] = re.findall(r"^orders=(\S+)$", arrive, re.M)

    def sh(command: str) -> str:
        script = f"set -euo pipefail; orders={topic}; {command}"
        done = subprocess.run(
            ["bash", "-c", script],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            dev, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("broker  pulsar://127.0.0.1:")
        assert process.stdout.readline().startswith("api     http://127.0.0.1:")
        return process

    def scheduled(table: str) -> int:
        return sum(int(line.split()[-1]) for line in table.splitlines() if line.startswith(topic))

    process = start()
    try:
        [first, *arrived] = sh(arrive).splitlines()
        for subscription, line in zip(
            ["audit", "billing"], sorted(arrived, key=lambda line: line.split()[3]), strict=True
        ):
            time, late, millis, name, message, key, text = line.split()
            assert (millis, name, message, key, text) == ("ms", subscription, first, "-", "hello")
            assert late.startswith("+")
            assert time.endswith("Z")
        ids = sh(send.replace("1m", "10m")).split()  # a busy machine takes its time
        assert len(ids) == SENT
        listing, schedule = look.splitlines()
        wait_until(lambda: sh(f"{listing} --limit 1000").count("customer-7") == SENT, 60, "all are listed")
        # Unlike the listing, the tables have a message only when its bucket is sealed.
        wait_until(lambda: scheduled(sh(schedule)) == 2 * SENT, 60, "the tables have all, for both subscriptions")
        skip, dry_run, cancel, cancelled, restore = (line for line in change.replace("7:0", ids[0]).splitlines())
        assert "APPLIED" in sh(skip)
        assert f"{SENT} messages match" in sh(dry_run)
        sh(cancel)
        wait_until(lambda: "customer-7" not in sh(listing), 30, "nothing waits")
        assert sh(f"{cancelled} --limit 1000").count("customer-7") == SENT
        sh(restore)
        wait_until(lambda: sh(f"{listing} --limit 1000").count("customer-7") == SENT, 30, "all wait again")
        process.kill()
        process.communicate()
        process = start()
        assert sh(f"{listing} --limit 1000").count("customer-7") == SENT
        sh(check)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=RUN_SECONDS) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
