"""The embedded broker's process, with another program in its place."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.standalone import EmbeddedBroker


@pytest.mark.parametrize("end", [EmbeddedBroker.kill, EmbeddedBroker.stop])
def test_no_zombie_is_left_of_a_broker_that_was_ended(tmp_path: Path, end: Callable[[EmbeddedBroker], object]) -> None:
    broker = EmbeddedBroker(tmp_path)
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    broker._child = program
    broker._record(program.pid, 1, 2)
    end(broker)
    assert program.returncode is not None
