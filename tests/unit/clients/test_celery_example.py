"""Celery's tasks wait in the service, and a worker of Celery does them when they are due."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any, NoReturn
from uuid import UUID

import celery_etas
import pytest
from celery import Task, group
from celery.contrib.testing.worker import start_worker
from celery_etas import TOPIC, app, hand_over, remind, revoke
from delaylake import NotFound
from delaylake.testing import FakeClient

from tests.support.service.harness import wait_until

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


@app.task(bind=True)  # type: ignore[untyped-decorator]
def fail(self: Task) -> NoReturn:
    raise self.retry(countdown=60, max_retries=1)


@app.task(queue="slow", priority=7, soft_time_limit=9, ignore_result=True)  # type: ignore[untyped-decorator]
def pay(*_: object) -> None:
    pass


@pytest.mark.usefixtures("_worker")
def test_a_task_that_retries_waits_again(lake: FakeClient) -> None:
    later = fail.apply_async(countdown=60)
    for retries in (0, 1):
        [due] = lake.advance(timedelta(minutes=2))
        assert due.properties["requestId"] == f"{later.id}:{retries}"
        hand_over(due.payload)
        if retries == 0:
            wait_until(lambda: list(lake.pending(TOPIC)), 60, "no retry")
    with pytest.raises(fail.MaxRetriesExceededError):
        later.get(timeout=60)


def _handed_over(lake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns what Celery is asked to send of all that waits."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "send_task", lambda **call: asked.append(call))
    for one in lake.advance(timedelta(hours=1)):
        hand_over(one.payload)
    return asked


def test_the_options_of_the_task_and_of_the_call_are_kept(lake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    expires = lake.now + timedelta(hours=2)
    given = (expires, UUID(int=7), Decimal("9.90"))
    pay.apply_async(given, countdown=60, priority=3, expires=expires, add_to_parent=False, publisher=None)
    [call] = _handed_over(lake, monkeypatch)
    assert call.pop("task_id")
    assert call.pop("name") == pay.name
    assert tuple(call.pop("args")) == given
    own = {"queue": "slow", "soft_time_limit": 9, "ignore_result": True, "serializer": "json"}
    assert call == {"kwargs": {}, "priority": 3, "expires": expires, **own}


def test_a_group_waits(lake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    results = group(remind.s("mother"), remind.s("father")).apply_async(countdown=60)
    calls = _handed_over(lake, monkeypatch)
    assert [call["args"] for call in calls] == [["mother"], ["father"]]
    assert [call["task_id"] for call in calls] == [one.id for one in results]
    assert {call["group_id"] for call in calls} == {results.id}


def test_a_countdown_counts_from_the_call(lake: FakeClient) -> None:
    remind.apply_async(("x",), countdown=3_600)
    assert not lake.advance(timedelta(minutes=59))
    assert len(lake.advance(timedelta(minutes=2))) == 1
