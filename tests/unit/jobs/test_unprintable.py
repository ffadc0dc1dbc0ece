"""What others have written controls no terminal: errors, the log and the status show it escaped."""

from __future__ import annotations

import logging
from pathlib import Path

from conf.errors import one_line
from jobs.logs import TextFormatter
from status.alerts import Alert
from status.job_status import JobStatus, write_status
from tests.conftest import Run

EVIL = "before\x1b[2J\x1b]0;owned\x07\x9b31m\u202eafter"
SHOWN = "before\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202eafter"


def test_an_error_is_one_line_of_printable_characters() -> None:
    assert one_line(ValueError(f"{EVIL}\n\u2028next")) == f"{SHOWN} next"
    assert one_line("plain, ünïcödé, 日本") == "plain, ünïcödé, 日本"


def test_a_log_line_shows_them_escaped_and_keeps_its_lines() -> None:
    record = logging.LogRecord("a", logging.WARNING, "", 0, "%s\n\tsecond", (EVIL,), None)
    line = TextFormatter().format(record)
    assert line.endswith(f"WARNING a: {SHOWN}\n\tsecond")


def test_the_status_names_a_trouble_with_them_escaped(tmp_path: Path, delaylake_here: Run) -> None:
    now = 1_800_000_000_000
    found = JobStatus(state="running", started_at=now, updated_at=now, troubles=[Alert("not_sent", EVIL, now, EVIL)])
    write_status(f"{tmp_path}", found)
    done = delaylake_here("status", env={"DELAYLAKE_WAREHOUSE": f"file:{tmp_path}"})
    assert "\x1b" not in done.stdout + done.stderr
    assert SHOWN in done.stdout
