"""`delaylake demo` as a user starts it: it checks itself, and leaves nothing running or lying about."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from jobs.demo.plan import Fate, plan
from tests.conftest import PROGRAM, RUN_SECONDS, Run
from tests.support.service.harness import wait_until

MESSAGES, SECONDS = 3_000, 20


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_every_message_of_the_demo_has_its_fate(
    delaylake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    # A user's own settings are not the demo's.
    foreign = {"DELAYLAKE_WAREHOUSE": f"file:{tmp_path}/own", "DELAYLAKE_PULSAR__SERVICE_URL": "pulsar://127.0.0.1:1"}
    options = ["--messages", str(MESSAGES), "--seconds", str(SECONDS), "--output", "json"]
    done = delaylake("demo", *options, env=foreign)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["ok"], summary["problems"]) == (0, True, []), done.stderr

    planned = plan(MESSAGES, SECONDS)
    pending = [m for m in planned if m.fate is Fate.PENDING]
    copies = sum(len(m.subscriptions) for m in planned if m.fate is Fate.DELIVERED)
    assert summary["scheduled"] == MESSAGES
    assert summary["topics"] == 3
    assert summary["pending"] == len(pending) > 0
    assert summary["pending_copies"] == sum(len(m.subscriptions) for m in pending)
    assert summary["rejected"] == sum(m.fate is Fate.REJECTED for m in planned) > 0
    assert summary["taken_back"] > 0
    assert summary["delivered"] == copies - summary["taken_back"]
    assert summary["commands"]["APPLIED"] == summary["taken_back"]
    assert summary["early"] == 0
    assert summary["audit"] == "all accounted for"
    assert 0 <= summary["late_millis"]["p50"] <= summary["late_millis"]["p99"] <= summary["late_millis"]["max"]
    assert not (tmp_path / "own").exists()
    assert list((tmp_path / "tmp").glob("delaylake-demo-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "kept"
    demo = subprocess.Popen(
        [str(PROGRAM), "demo", "--messages", "500", "--keep", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "DELAYLAKE_CONFIG"},
        start_new_session=True,
        # Ignored where the tests were started in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        # The broker runs, and the job, and that has begun to start Spark's JVM.
        children = psutil.Process(demo.pid).children
        wait_until(lambda: len(children(recursive=True)) >= 3, 60, "the job's start")
        started = children(recursive=True)
        demo.send_signal(number)
        out, err = demo.communicate(timeout=RUN_SECONDS)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(demo.pid).children(recursive=True):
                process.kill()
        demo.kill()
    assert (demo.returncode, out) == (1, "")
    assert err.splitlines()[-1] == "error: interrupted; nothing is left running"
    assert f"kept: {folder} " in err
    assert [process for process in started if is_alive(process)] == []


def test_a_folder_that_is_not_empty_is_refused(delaylake: Run, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    done = delaylake("demo", "--keep", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*--keep .* not empty.*\n", done.stderr)
    assert [file.name for file in tmp_path.iterdir()] == ["something"]
