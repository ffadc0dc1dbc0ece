"""Functions that are called later, in another process, as Celery's `apply_async(countdown=...)` and `revoke()` do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pulsar

from delaylake import Client, MessageId


@dataclass(frozen=True)
class Result:
    """A call that was asked for."""

    tasks: Tasks
    id: MessageId

    def revoke(self) -> None:
        """Takes the call back; raises `delaylake.TooLate` where it is on its way."""
        self.tasks.lake.cancel(self.tasks.topic, self.id)


class Task:
    """A function that can be called now, or later by a worker."""

    def __init__(self, tasks: Tasks, function: Callable[..., Any]) -> None:
        self.tasks = tasks
        self.name = function.__name__
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def apply_async(self, arguments: tuple[Any, ...] = (), countdown: float = 0, eta: datetime | None = None) -> Result:
        """Asks for a call with arguments that JSON has: in so many seconds, or at a time."""
        payload = json.dumps({"task": self.name, "arguments": arguments})
        after = None if eta else timedelta(seconds=countdown)
        return Result(self.tasks, self.tasks.lake.schedule(self.tasks.topic, payload, at=eta, after=after))


class Tasks:
    """The functions of a program, by name: `tasks = Tasks(lake, "tasks")`, then `@tasks.task`."""

    def __init__(self, lake: Client, topic: str) -> None:
        self.lake = lake
        self.topic = topic
        self._tasks: dict[str, Task] = {}

    def task(self, function: Callable[..., Any]) -> Task:
        """Makes a task of a function."""
        return self._tasks.setdefault(function.__name__, Task(self, function))

    def work(self, consumer: pulsar.Consumer) -> None:
        """Waits for the next call of the topic's destination, and makes it; a call that fails comes again."""
        message = consumer.receive()
        wanted = json.loads(message.data())
        try:
            self._tasks[wanted["task"]](*wanted["arguments"])
        except Exception:
            consumer.negative_acknowledge(message)
            raise
        consumer.acknowledge(message)
