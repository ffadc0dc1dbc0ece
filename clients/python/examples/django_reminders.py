"""Reminders of a site with Django: what is saved in the database is scheduled once, and what is deleted is cancelled.

It is one file: an application of several would have the same models, views and settings. In the service's settings:
`routes: [{source: persistent://public/default/reminders, subscriptions: [{name: phone}]}]`; a consumer of the topic
`reminders-phone` sends them.

    python django_reminders.py runserver
"""

from __future__ import annotations

import json
import logging
import os
import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import path
from django.utils.dateparse import parse_datetime

from delaylake import Client, DelayLakeError, NotFound, TooLate, Unavailable

if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1", "testserver"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": os.environ.get("DATABASE", "reminders.sqlite3"),
            }
        },
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        ROOT_URLCONF=__name__,
        USE_TZ=True,
    )
    django.setup()

TOPIC = "reminders"

# A request of the site waits no longer for the service: `schedule_left` does it later.
lake = Client(os.environ.get("DELAYLAKE_URL", "http://127.0.0.1:8081"), timeout_seconds=3)


class Reminder(models.Model):
    """A reminder; `message` is empty until it is scheduled."""

    text = models.CharField(max_length=200)
    due = models.DateTimeField()
    message = models.CharField(max_length=80, blank=True)

    class Meta:
        app_label = "reminders"

    def schedule(self) -> None:
        """Schedules the reminder. Its request id is its key in the database: called again, it is the same message."""
        content = json.dumps({"reminder": self.pk, "text": self.text})
        message = lake.schedule(TOPIC, content, at=self.due, request_id=f"reminder-{self.pk}")
        self.message = str(message)
        Reminder.objects.filter(pk=self.pk).update(message=self.message)

    def cancel(self) -> None:
        """Cancels the reminder, also where it has only just been scheduled.

        Raises:
            TooLate: it is on its way.
        """
        if not self.message:  # it may be scheduled without an answer, or be scheduled just now: this gives its id
            self.schedule()
        lake.cancel(TOPIC, self.message, deliver_at=self.due)


def create_tables() -> None:
    """Makes the table; an application has migrations instead."""
    if Reminder._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Reminder)


def schedule_left() -> int:
    """Schedules what was saved and not scheduled, and counts it; for a task that runs now and then.

    Raises:
        Unavailable: the service can't be reached.
    """
    return sum(_is_scheduled(reminder) for reminder in list(Reminder.objects.filter(message="")))


def _is_scheduled(reminder: Reminder) -> bool:
    """Schedules a reminder; one that is refused is logged, and keeps no other back."""
    try:
        reminder.schedule()
    except Unavailable:
        raise
    except (DelayLakeError, ValueError) as error:
        logging.getLogger(__name__).error("reminder %s is refused: %s", reminder.pk, error)
        return False
    return True


def reminders(request: HttpRequest) -> HttpResponse:
    """POST `text` and `due`, a time with a zone."""
    try:
        due = parse_datetime(request.POST.get("due", ""))
    except ValueError:  # the 13th month
        due = None
    text = request.POST.get("text")
    if request.method != "POST" or not text or due is None or due.tzinfo is None:
        return HttpResponse(status=400)
    with transaction.atomic():
        reminder = Reminder.objects.create(text=text, due=due)
        # Not before: what is rolled back was never sent. Robust: it is saved, also where the service is away.
        transaction.on_commit(reminder.schedule, robust=True)
    return JsonResponse({"id": reminder.pk}, status=201)


def one(request: HttpRequest, pk: int) -> HttpResponse:
    """DELETE cancels; 409: it is too late; 503: the service is away, and DELETE can be repeated."""
    reminder = get_object_or_404(Reminder, pk=pk)
    if request.method != "DELETE":
        return HttpResponse(status=405)
    try:
        reminder.cancel()
    except TooLate:
        return HttpResponse(status=409)
    except Unavailable:
        return HttpResponse(status=503)
    except NotFound:
        pass  # nothing waits
    reminder.delete()
    return HttpResponse(status=204)


urlpatterns = [path("reminders", reminders), path("reminders/<int:pk>", one)]

if __name__ == "__main__":
    create_tables()
    execute_from_command_line(sys.argv)
