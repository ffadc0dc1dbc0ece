"""The connections of a task: those that the process keeps, and others for destinations that may be slow.

A broker that throttles a topic reads nothing more from the connection, and so holds up all that are sent through it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable

import pulsar

from broker.client import close_quietly
from conf.settings import Settings
from streaming.release.attempt import MOST_CONNECTIONS
from streaming.release.naming import Target
from streaming.release.task import process_clients
from streaming.release.task.producer_line import Line


class Connections:
    """Gives the lines of a task their clients.

    Args:
        settings: of the job.
        apart: targets that have none of the process's clients. Up to MOST_CONNECTIONS have a client each.
    """

    def __init__(self, settings: Settings, apart: Collection[Target]) -> None:
        self._settings = settings
        self._numbers = {target: i % MOST_CONNECTIONS for i, target in enumerate(sorted(apart))}
        self._own: dict[int, pulsar.Client] = {}

    def client_of(self, target: Target) -> pulsar.Client:
        """Returns the client of a target."""
        number = self._numbers.get(target)
        if number is None:
            return process_clients.pulsar_client(self._settings, process_clients.number_of(target))
        if number not in self._own:
            self._own[number] = process_clients.new_client(self._settings)
        return self._own[number]

    def is_alone(self, target: Target) -> bool:
        """Whether a target shares its client with no other, so that it is late by itself."""
        if target not in self._numbers:
            return process_clients.is_alone(target)
        return len(self._numbers) <= MOST_CONNECTIONS

    def end(self, lines: Iterable[Line], has_failed: bool) -> None:
        """Ends the task's own clients, and those of the process that may hang.

        A client with a slow line is shut down: the broker drops what it has not answered, and gives the producers'
        names away again. To close it would take until the broker has answered all.

        Args:
            lines: of the task, closed.
            has_failed: whether the broker has not answered something that is in no line.
        """
        lines = list(lines)
        kept: dict[int, list[Line]] = {}
        for line in lines:
            if line.target not in self._numbers:
                kept.setdefault(process_clients.number_of(line.target), []).append(line)
        for number, its in kept.items():
            if any(line.is_slow for line in its):
                _end(process_clients.taken(number), its)
            elif any(line.has_failed and not line.is_refused for line in its):
                process_clients.forget_clients(functools.partial(_wait_opened, its), number)
        if has_failed:
            shared = [line for its in kept.values() for line in its]
            process_clients.forget_clients(lambda: _wait_opened(shared))
        for number, client in self._own.items():
            _end([client], [line for line in lines if self._numbers.get(line.target) == number])
        self._own.clear()


def _wait_opened(lines: Iterable[Line]) -> None:
    for line in lines:
        line.wait_opened()


def _end(clients: Iterable[pulsar.Client], lines: Collection[Line]) -> None:
    """Ends clients: at once where all of their lines have a producer, else in the background, when nobody waits."""
    end: Callable[[pulsar.Client], None] = _shut_down if any(line.has_failed for line in lines) else close_quietly

    def run() -> None:
        _wait_opened(lines)
        for client in clients:
            end(client)

    if end is _shut_down and not any(line.is_opening for line in lines):
        run()
    else:
        threading.Thread(target=run, daemon=True).start()


def _shut_down(client: pulsar.Client) -> None:
    with contextlib.suppress(pulsar.PulsarException):
        client.shutdown()
