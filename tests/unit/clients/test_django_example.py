"""Reminders of a site with Django, on the service in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from delaylake import NotFound, Unavailable
from delaylake.testing import FakeClient

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeClient]:
    monkeypatch.setenv("DATABASE", str(tmp_path / "reminders.sqlite3"))
    import django_reminders
    from django.db import connections

    connections["default"].settings_dict["NAME"] = str(tmp_path / "reminders.sqlite3")
    connections["default"].close()
    django_reminders.create_tables()
    lake = FakeClient({django_reminders.TOPIC: ["phone"]})
    monkeypatch.setattr(django_reminders, "lake", lake)
    yield lake
    connections["default"].close()


def test_a_reminder_is_sent_once_unless_it_is_deleted(lake: FakeClient) -> None:
    from django.test import Client
    from django_reminders import TOPIC, Reminder

    site = Client()
    due = lake.now + timedelta(hours=1)
    made = site.post("/reminders", {"text": "call mother", "due": due.isoformat()})
    assert made.status_code == 201
    pk = made.json()["id"]
    lake.assert_scheduled(TOPIC, at=due)
    assert Reminder.objects.get(pk=pk).message
    Reminder.objects.get(pk=pk).schedule()
    for wrong in ("2031-01-01T12:00", "2031-13-45T00:00Z", ""):
        assert site.post("/reminders", {"text": "no time", "due": wrong}).status_code == 400
    assert site.post("/reminders", {"due": due.isoformat()}).status_code == 400
    other = site.post("/reminders", {"text": "water the plants", "due": due.isoformat()}).json()["id"]
    assert site.delete(f"/reminders/{other}").status_code == 204
    [sent] = lake.advance(timedelta(hours=2))
    assert json.loads(sent.payload) == {"reminder": pk, "text": "call mother"}
    assert site.delete(f"/reminders/{pk}").status_code == 409
    assert site.delete("/reminders/999").status_code == 404


def test_what_was_saved_and_not_scheduled_is_scheduled_later(lake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    import django_reminders

    reminder = django_reminders.Reminder.objects.create(text="x", due=lake.now + timedelta(hours=1))
    assert django_reminders.schedule_left() == 1
    assert django_reminders.schedule_left() == 0
    django_reminders.Reminder.objects.filter(pk=reminder.pk).update(message="")  # it died between the two
    assert django_reminders.schedule_left() == 1
    assert len(lake.advance(timedelta(hours=2))) == 1


def _raise(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_what_is_saved_while_the_service_is_away_is_scheduled_later(
    lake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    import django_reminders
    from django.test import Client

    site, due = Client(), lake.now + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(lake, "schedule", _raise(Unavailable("no broker")))
        made = site.post("/reminders", {"text": "x", "due": due.isoformat()})
        assert made.status_code == 201
        assert site.delete(f"/reminders/{made.json()['id']}").status_code == 503
        with pytest.raises(Unavailable):
            django_reminders.schedule_left()
    assert django_reminders.schedule_left() == 1
    assert len(lake.advance(timedelta(hours=2))) == 1


def test_what_was_scheduled_without_an_answer_can_be_deleted(lake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.test import Client
    from django_reminders import Reminder

    site, due = Client(), lake.now + timedelta(hours=1)
    reminder = Reminder.objects.create(text="x", due=due)
    reminder.schedule()
    Reminder.objects.filter(pk=reminder.pk).update(message="")
    assert site.delete(f"/reminders/{reminder.pk}").status_code == 204
    assert not lake.advance(timedelta(hours=2))
    unknown = Reminder.objects.create(text="x", due=due, message="9:9:-1:-1")
    monkeypatch.setattr(lake, "cancel", _raise(NotFound("no such message")))
    assert site.delete(f"/reminders/{unknown.pk}").status_code == 204


def test_one_that_is_refused_keeps_no_other_back(
    lake: FakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import django_reminders

    due = lake.now + timedelta(hours=1)
    refused = django_reminders.Reminder.objects.create(text="x", due=due)
    django_reminders.Reminder.objects.create(text="y", due=due)
    lake.schedule(django_reminders.TOPIC, "another", at=due, request_id=f"reminder-{refused.pk}")
    assert django_reminders.schedule_left() == 1
    assert f"reminder {refused.pk} is refused" in caplog.text
