"""Producers that take another name."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.settings import Settings
from status.alerts import Alerts
from streaming.release.attempt import FailedProducer
from streaming.release.producer_names import ProducerNames, read_generations
from warehouse.delta.fencing import FencedError


def fenced() -> None:
    raise FencedError("warehouse", 1, 2)


def failed(foreign_id: int | None) -> FailedProducer:
    return FailedProducer("orders-a", "job", ("orders", "a"), "", is_refused=True, foreign_id=foreign_id)


def test_what_the_successor_of_a_job_has_sent_under_its_name_gives_it_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "query").mkdir()
    names = ProducerNames(Settings(checkpoint=str(tmp_path)), Alerts(), fenced)
    with pytest.raises(FencedError):
        names.renew([failed(7)], 5)
    assert names.generations == read_generations(tmp_path) == {}
    assert names.renew([failed(None)], 5) == [failed(None)]  # the task has checked what fails for other reasons
