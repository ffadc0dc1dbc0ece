"""What is said of an end of Spark's JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming.jvm_end import LOG, JvmLog

LOST = ConnectionError("refused")
OUT_OF_MEMORY = 'Exception in thread "x" java.lang.OutOfMemoryError: Java heap space\n'


def test_an_end_for_want_of_memory_names_the_setting(tmp_path: Path) -> None:
    log = JvmLog(tmp_path)
    (tmp_path / LOG).write_text("a line\n" + OUT_OF_MEMORY)
    why = log.why_ended(LOST)
    assert "out of memory, with a heap of 1g" in why
    assert "spark.driver.memory" in why
    assert "\n" not in why


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_what_was_in_the_log_before_does_not_count(tmp_path: Path, is_made_anew: bool) -> None:
    (tmp_path / LOG).write_text(OUT_OF_MEMORY * 3)
    log = JvmLog(tmp_path, "2g")
    with (tmp_path / LOG).open("w" if is_made_anew else "a") as file:
        file.write("killed\n")
    assert log.why_ended(LOST) == f"Spark's JVM has ended (refused): its log is spark.log in {tmp_path}"
    with (tmp_path / LOG).open("a") as file:
        file.write(OUT_OF_MEMORY)
    assert "with a heap of 2g" in log.why_ended(LOST)
