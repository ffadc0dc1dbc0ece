"""The embedded broker's process, with another program in its place."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.standalone import BrokerError, EmbeddedBroker


@pytest.mark.parametrize("end", [EmbeddedBroker.kill, EmbeddedBroker.stop])
def test_no_zombie_is_left_of_a_broker_that_was_ended(tmp_path: Path, end: Callable[[EmbeddedBroker], object]) -> None:
    broker = EmbeddedBroker(tmp_path)
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    broker._child = program
    broker._record(program.pid, 1, 2)
    end(broker)
    assert program.returncode is not None


def test_a_disk_too_full_for_bookkeeper_is_named_before_a_process_starts(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, {"diskUsageThreshold": "0.0001"})
    named = r"^the disk of .* is [0-9.]+% full, and with more than 0% .*\(diskUsageThreshold\): make room, .*disk$"
    with pytest.raises(BrokerError, match=named):
        broker._launch(["false"], 0, 0)
    assert not broker.log_file.exists()
