"""Spark's log stays small, and who writes it does not notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spark_log import output_of_children, rotate


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.spark_log.MAX_BYTES", 100_000)


def test_a_log_that_has_become_large_begins_anew_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    writes = "import sys\nfor line in sys.stdin: print(line, end='', file=sys.stderr, flush=True)"
    with output_of_children(log):
        child = subprocess.Popen([sys.executable, "-c", writes], stdin=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdin is not None
    try:
        for i in range(3):
            while log.stat().st_size <= 100_000:
                child.stdin.write(f"{i}" * 999 + "\n")
            rotate(log)
            assert (tmp_path / "spark.log.1").stat().st_size > 100_000
        child.stdin.close()
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
    assert b"\0" not in log.read_bytes(), "it goes on at the beginning"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["spark.log", "spark.log.1"]


def test_a_small_log_stays_and_one_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "spark.log").write_text("small")
    rotate(tmp_path / "spark.log")
    rotate(tmp_path / "none")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["small"]


_LOGS_MEANWHILE = """
import logging, subprocess, sys, threading
from pathlib import Path
from jobs.logs import LogFormat, configure
from jobs.spark_log import output_of_children

configure(logging.INFO, LogFormat.TEXT)
child = [sys.executable, "-c", "import sys; print('of a child', file=sys.stderr)"]
with output_of_children(Path(sys.argv[1])):
    thread = threading.Thread(target=logging.warning, args=("of a thread",))
    thread.start()
    thread.join()
    subprocess.run(child, check=True)
logging.warning("afterwards")
"""


@pytest.mark.slow
def test_what_another_thread_logs_meanwhile_is_in_the_jobs_own_log(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    ended = subprocess.run([sys.executable, "-c", _LOGS_MEANWHILE, log], capture_output=True, text=True, check=True)
    assert [line.rpartition(": ")[2] for line in ended.stderr.splitlines()] == ["of a thread", "afterwards"]
    assert log.read_text() == "of a child\n"
