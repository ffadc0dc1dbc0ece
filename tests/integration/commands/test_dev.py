"""`delaylake dev` as a newcomer uses it, and however it ends: nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import PROGRAM, RUN_SECONDS, run_here
from tests.support.service.harness import wait_until

ROOT = Path(__file__).parents[3]
ORDERS = "persistent://public/default/orders"


class Dev:
    """`delaylake dev --ephemeral` on the program's own settings, with its temporary folder in another one."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._errors = (folder / "dev.err").open("w+")
        self.process = subprocess.Popen(
            [str(PROGRAM), "dev", "--ephemeral", "--output", "json"],
            env=os.environ | {"TMPDIR": str(self.temporary)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors
        return json.loads(line)

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text()

    def started(self) -> list[psutil.Process]:
        """The processes that have the temporary folder among their arguments: broker, job, JVM, API."""
        place = str(self.temporary)
        everything = psutil.process_iter(["cmdline"])
        return [p for p in everything if any(place in part for part in p.info["cmdline"] or ())]

    def end(self, number: signal.Signals) -> int:
        """Sends a signal; returns the exit status, when nothing is left."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        status = self.process.wait(timeout=RUN_SECONDS)
        wait_until(lambda: not self.started(), 20, f"no process is left, but {self.started()}")
        wait_until(lambda: not list(self.temporary.iterdir()), 20, "no folder is left")
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._errors.close()


@pytest.fixture
def dev(tmp_path: Path, clean_environment: None) -> Any:
    dev = Dev(tmp_path)
    yield dev
    dev.close()


@pytest.mark.long
def test_a_message_is_sent_and_seen_to_arrive_and_after_a_kill_nothing_is_left(dev: Dev) -> None:
    ready = dev.ready()
    assert ready["event"] == "ready"
    assert ready["broker"].startswith("pulsar://127.0.0.1:")
    assert httpx.get(f"{ready['api']}/healthz").status_code == 200
    config = ("--config", ready["config"])
    sent = run_here(*config, "produce", ORDERS, "-m", "hello", "--deliver-after", "3s", "--key", "k")
    assert (sent.returncode, sent.stderr) == (0, "")
    arrived = run_here(*config, "consume", ORDERS, "-n", "2", "--output", "json")
    assert arrived.returncode == 0, arrived.stderr
    messages = [json.loads(line) for line in arrived.stdout.splitlines()]
    assert {m["subscription"] for m in messages} == {"billing", "audit"}
    for message in messages:
        assert (message["messageId"], message["payload"], message["key"]) == (sent.stdout.strip(), "hello", "k")
        assert message["latenessMillis"] == message["arrivedAt"] - message["deliverAt"] >= 0
    assert len(dev.started()) >= 3
    assert dev.end(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.long
def test_when_one_part_ends_all_do_and_its_last_words_are_told(dev: Dev) -> None:
    dev.ready()
    [api] = [process for process in dev.started() if "api" in process.cmdline()]
    api.kill()
    assert dev.ended() == 1
    first, *log = dev.errors.splitlines()
    assert first == "error: the api has ended; the last lines of its log:"
    assert "settings: " in log[0]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_ends_it_also_while_it_starts(dev: Dev, number: signal.Signals) -> None:
    wait_until(lambda: any("run" in process.cmdline() for process in dev.started()), 30, "the job starts")
    assert dev.end(number) == 0
    assert dev.errors == ""
