"""Celery's tasks with an `eta` or `countdown` wait in delaylake, not in a worker's memory.

A worker of Celery takes such a task at once and holds it until it is due: it is lost with the worker's machine, or done
twice after the broker's visibility time-out. Here it waits in the topic `celery`, whose route has the subscription
`worker`, and `bridge` hands it to Celery's broker when it is due.

    celery --app celery_etas worker
    python celery_etas.py          # the bridge
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
from celery import Celery, Task
from celery.result import AsyncResult
from celery.utils import uuid
from kombu.utils import json

from delaylake import Client

TOPIC = "celery"
OF_THIS_PROCESS = frozenset({"producer", "publisher", "connection", "router", "result_cls", "add_to_parent"})

lake = Client(os.environ.get("DELAYLAKE_URL", "http://127.0.0.1:8081"))


class WaitingTask(Task):
    """A task whose `eta` and `countdown` are kept by delaylake. An `expires` in seconds counts from when it is due."""

    def apply_async(
        self,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        task_id: str | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        **options: Any,
    ) -> AsyncResult:
        if countdown is None and eta is None:
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        due = eta or datetime.now(timezone.utc) + timedelta(seconds=countdown or 0)
        task_id = task_id or uuid()
        options = {**self._get_exec_options(), "ignore_result": self.ignore_result, **options}
        options = {name: value for name, value in options.items() if value is not None and name not in OF_THIS_PROCESS}
        call = {"name": self.name, "args": args or (), "kwargs": kwargs or {}, "task_id": task_id, **options}
        # A call that is made again is one task. The task's own retries have its id, too, and the number of the retry.
        request_id = f"{task_id}:{options.get('retries', 0)}"
        lake.schedule(TOPIC, json.dumps(call), at=due, schedule_key=task_id, request_id=request_id)
        return self.AsyncResult(task_id)


app = Celery("celery_etas", broker=os.environ.get("CELERY_BROKER_URL", "memory://"), task_cls=WaitingTask)


def revoke(task_id: str) -> None:
    """Cancels a task that waits.

    Raises:
        delaylake.NotFound: no such task waits, or it has only just been sent.
        delaylake.TooLate: it is on its way.
    """
    lake.cancel(TOPIC, schedule_key=task_id)


def hand_over(payload: bytes) -> None:
    """Gives a task that is due to Celery's broker."""
    app.send_task(**json.loads(payload))


def bridge(service_url: str) -> None:
    """Hands over what comes due, until it is interrupted. A task is acknowledged when Celery's broker has it."""
    client = pulsar.Client(service_url)
    consumer = client.subscribe(f"{TOPIC}-worker", "bridge", consumer_type=pulsar.ConsumerType.Shared)
    while True:
        message = consumer.receive()
        hand_over(message.data())
        consumer.acknowledge(message)


@app.task
def remind(who: str) -> str:
    return f"call {who}"


if __name__ == "__main__":
    bridge(os.environ.get("PULSAR_URL", "pulsar://localhost:6650"))
