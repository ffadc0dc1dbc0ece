"""What the job tells of itself."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from status.status_writer import StatusWriter
from warehouse.schemas import DELIVERIES


def test_the_most_that_was_sent_a_second_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1_000, 5))
    # Of this module alone: threads of tests before, too, look at the clock.
    clock = SimpleNamespace(monotonic=lambda: next(seconds), time_ns=time.time_ns)
    monkeypatch.setattr("status.status_writer.time", clock)
    status = StatusWriter(str(tmp_path), 1)
    told = []
    for n in (100, 500, 50):
        rows = pa.Table.from_pylist([{"sent_at": 1, "deliver_at": 1, "short_notice": False}] * n, schema=DELIVERIES)
        status.deliveries(rows)
        found = status.status()
        told.append((found.history[-1].delivered_per_second, found.most_per_second))
    assert [most for _, most in told] == [told[0][0], told[1][0], told[1][0]]
    assert told[1][0] > told[0][0] > told[2][0]
