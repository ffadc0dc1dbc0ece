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
