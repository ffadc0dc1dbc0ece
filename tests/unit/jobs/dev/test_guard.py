"""Whatever ends a process with a guard: what it has started ends, too."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

GUARDED = textwrap.dedent(
    """
    import subprocess, sys, time
    from pathlib import Path
    from jobs.dev.guard import Guard

    with Guard(Path(sys.argv[1])):
        # A child of a child, in a session of its own, whose parent has ended.
        subprocess.run(["/bin/sh", "-c", "sleep 1000 & echo $!"], start_new_session=True)
        sys.stdin.readline()
    """
)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("end", ["itself", signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_what_a_guarded_process_has_started(end: signal.Signals | str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "file").write_text("x")
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        started = psutil.Process(int(process.stdout.readline()))
        assert is_alive(started)
        assert folder.is_dir()
        if isinstance(end, signal.Signals):
            process.send_signal(end)
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()
        deadline = time.monotonic() + 60
        while (is_alive(started) or folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not is_alive(started)
    assert not folder.exists()
