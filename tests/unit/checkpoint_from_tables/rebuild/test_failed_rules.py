"""A rule that fails by the time of a rebuild: the occurrence that waits comes all the same, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service.one_shard import NAMES, NOW, SECOND, Service, recurring, run_audit_of_tables
from tests.support.tracker.messages import messages
from tracker.messages import concat
from tracker.recurrence.recurrence import Recurrence

pytestmark = pytest.mark.slow


def test_the_occurrence_that_waits_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    neighbour = messages([(1, 1, NOW + 40 * SECOND)], publish_time=NOW)
    first = recurring(0, NOW + 5 * SECOND, "0 * * * * *")
    service.step(concat([first, neighbour]), seals=True)
    for _ in range(10):
        service.step(seals=True)
        service.arrive([True], is_written=True)
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1]

    def fails(self: Recurrence, after: int, start: int) -> int | None:
        raise IndexError("x")

    monkeypatch.setattr(Recurrence, "_next", fails)
    service.lose_checkpoint()
    rejects = []
    for _ in range(80):
        rejects += service.step(seals=True).rejects.to_pylist()
        service.arrive([True], is_written=True)
    for name in NAMES:
        assert service.numbers(name, 0) == [1, 2]
        assert service.numbers(name, 1) == [None]
    assert [row["entry_id"] for row in rejects] == [0, 0]
    assert all("repeat fails with IndexError" in row["reason"] for row in rejects)
    assert run_audit_of_tables(service) == {}
