"""`--watch`: shown anew until Ctrl-C, on a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conf.errors import DelayLakeError
from jobs.options import Output
from jobs.watch import watch
from tests.conftest import PROGRAM, RUN_SECONDS
from warehouse.delta.tables import Tables

TOPIC = "persistent://public/default/orders"


def looks(*answers: str | Exception) -> tuple[Callable[[], str], Callable[[float], None]]:
    """What to show at each look, and a pause that is Ctrl-C after the last one."""
    left = list(answers)

    def render() -> str:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        assert seconds == 3
        if not left:
            raise KeyboardInterrupt

    return render, sleep


def test_without_a_terminal_it_is_printed_again_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    render, sleep = looks("one", DelayLakeError("no tables"), "two")
    watch(render, 3, Output.TEXT, sleep=sleep)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.endswith("Z")] == ["one", "error: no tables", "two"]
    assert sum(line.endswith("Z") for line in lines) == 3


def test_with_json_each_look_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    render, sleep = looks('{"n": 1}', '{"n": 2}')
    watch(render, 3, Output.JSON, sleep=sleep)
    assert [json.loads(line)["n"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_what_is_wrong_at_the_first_look_ends_it() -> None:
    render, sleep = looks(DelayLakeError("no such topic"))
    with pytest.raises(DelayLakeError, match="no such topic"):
        watch(render, 3, Output.TEXT, sleep=sleep)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["status"], "no job has run on the warehouse"),
        (["pending", TOPIC, "--stats"], r"held back\s+0"),
    ],
    ids=lambda value: value[0],
)
def test_on_a_terminal_it_is_drawn_over_and_ctrl_c_ends_it_cleanly(
    tmp_path: Path, command: list[str], what: str
) -> None:
    settings = tmp_path / "settings.yaml"
    routes = [{"source": TOPIC, "subscriptions": [{"name": "billing"}]}]
    settings.write_text(yaml.safe_dump({"warehouse": f"file:{tmp_path}/warehouse", "routes": routes}))
    if command[0] == "pending":
        Tables(f"file:{tmp_path}/warehouse").create()
    terminal, side = pty.openpty()
    # Its width, whatever a library may have put into the environment.
    termios.tcsetwinsize(side, (24, 80))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    # Tests that were started in the background ignore it, and so would the program.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job = subprocess.Popen(
            [sys.executable, PROGRAM, "--config", settings, *command, "--watch", "0.2"],
            stdin=side, stdout=side, stderr=side, start_new_session=True, env=environment,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(side)
    shown, until = b"", time.monotonic() + RUN_SECONDS
    with job:
        while shown.count(b"Ctrl-C ends") < 3 and time.monotonic() < until:
            shown += os.read(terminal, 65_536)
        job.send_signal(signal.SIGINT)
        try:
            while time.monotonic() < until and (part := os.read(terminal, 65_536)):
                shown += part
        except OSError:  # the program has closed its side
            pass
        os.close(terminal)
        if time.monotonic() >= until:
            job.kill()
    assert job.returncode == 0, shown
    text = shown.decode()
    # Each text goes over the one before: up by as many lines as that had.
    first, *others = text.split("every 0.2 s; Ctrl-C ends")
    assert "\x1b[?25l" in first
    assert all("\x1b[2K" in other for other in others[:2]), text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
    assert re.search(what, re.sub(r"\x1b\[2K", "", text)), text
    assert "every 0.2 s; Ctrl-C ends" in text
    assert "Traceback" not in text
    assert "aborted" not in text
