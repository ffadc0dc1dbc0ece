"""Celery's tasks wait in the service, and a worker of Celery does them when they are due."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import celery_etas
import pytest
from celery.contrib.testing.worker import start_worker
from celery_etas import TOPIC, app, hand_over, remind, revoke
from delaylake import NotFound
from delaylake.testing import FakeClient

pytestmark = pytest.mark.long  # a worker of Celery takes seconds to begin and to end


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    lake = FakeClient({TOPIC: ["worker"]})
    monkeypatch.setattr(celery_etas, "lake", lake)
    return lake


@pytest.fixture
def _worker() -> Iterator[None]:
    app.conf.update(result_backend="cache+memory://", worker_hijack_root_logger=False)
    with start_worker(app, perform_ping_check=False, shutdown_timeout=60):
        yield


@pytest.mark.usefixtures("_worker")
def test_a_task_is_done_when_it_is_due_unless_it_is_revoked(lake: FakeClient) -> None:
    assert remind.delay("at once").get(timeout=60) == "call at once"
    later = remind.apply_async(("mother",), eta=lake.now + timedelta(hours=1))
    revoked = remind.apply_async(("nobody",), eta=lake.now + timedelta(hours=2))
    again = remind.apply_async(("mother",), eta=lake.now + timedelta(hours=1), task_id=later.id)
    assert again.id == later.id
    lake.assert_scheduled(TOPIC, at=lake.now + timedelta(hours=1))
    revoke(revoked.id)
    assert not later.ready()
    due = lake.advance(timedelta(hours=3))
    assert len(due) == 1
    hand_over(due[0].payload)
    assert later.get(timeout=60) == "call mother"
    with pytest.raises(NotFound):
        revoke("unknown")


def test_a_countdown_counts_from_the_call(lake: FakeClient) -> None:
    remind.apply_async(("x",), countdown=3_600)
    assert not lake.advance(timedelta(minutes=59))
    assert len(lake.advance(timedelta(minutes=2))) == 1
