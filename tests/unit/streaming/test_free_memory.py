"""A process that has had many bytes once does not keep the memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import psutil
import pytest

from streaming.free_memory import give_back_memory, giving_back_memory
from tests.support.tracker.messages import messages
from tracker.messages import concat, in_order
from tracker.packing import pack, unpack

MIB = 1 << 20


@giving_back_memory
def work() -> int:
    """As a task does with 32 MB of large messages: unpacks, sorts, and packs again, with a copy of each payload."""
    packed = [pack(messages([(1, 8 * j + i, 5) for i in range(8)], payload=os.urandom(MIB))) for j in range(4)]
    rows = in_order(concat(unpack(part) for part in packed))
    return len(pack(rows)) + sum(len(row["payload"] + b"x") for row in rows.to_pylist())


def measure(found: Any) -> None:
    messages([(1, 1, 5)], payload=os.urandom(MIB))
    give_back_memory()
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        work()
    found.put((psutil.Process().memory_info().rss - before) / MIB)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how large a process is")
def test_what_is_free_after_work_on_many_bytes_is_given_back() -> None:
    found: Any = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(found,))
    process.start()
    assert found.get(timeout=120) < 24, "MiB; without it some 80"
    process.join()
