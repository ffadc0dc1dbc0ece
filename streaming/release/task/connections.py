"""The connections of a task: those that the process keeps, and others for destinations that may be slow.

A broker that throttles a topic reads nothing more from the connection, and so holds up all that are sent through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from broker.protocol.brokers import Brokers
from conf.settings import Settings
from streaming.release.attempt import MOST_CONNECTIONS
from streaming.release.naming import Recipient
from streaming.release.task import process_clients
from streaming.release.task.producer_line import Line


class Connections:
    """Gives the lines of a task their connections.

    Args:
        settings: of the job.
        apart: recipients that have none of the process's connections. Up to MOST_CONNECTIONS have their own each.
    """

    def __init__(self, settings: Settings, apart: Collection[Recipient]) -> None:
        self._settings = settings
        self._numbers = {recipient: i % MOST_CONNECTIONS for i, recipient in enumerate(sorted(apart))}
        self._own: dict[int, Brokers] = {}

    def brokers_of(self, recipient: Recipient) -> Brokers:
        """Returns the connections of a recipient."""
        number = self._numbers.get(recipient)
        if number is None:
            return process_clients.brokers(self._settings, process_clients.number_of(recipient))
        if number not in self._own:
            self._own[number] = process_clients.new_brokers(self._settings)
        return self._own[number]

    def is_alone(self, recipient: Recipient) -> bool:
        """Whether a recipient shares its connections with no other, so that it is late by itself."""
        if recipient not in self._numbers:
            return process_clients.is_alone(recipient)
        return len(self._numbers) <= MOST_CONNECTIONS

    def end(self, lines: Iterable[Line], has_failed: bool) -> None:
        """Ends the task's own connections, and those of the process on which the broker may not answer any more.

        The broker drops what it has not answered, and gives the producers' names away again.

        Args:
            lines: of the task, closed.
            has_failed: whether the broker has not answered something that is in no line.
        """
        failed = {line.recipient for line in lines if line.has_failed and not line.is_refused}
        for number in {process_clients.number_of(recipient) for recipient in failed if recipient not in self._numbers}:
            process_clients.forget_brokers(number)
        if has_failed:
            process_clients.forget_brokers()
        for own in self._own.values():
            own.close()
        self._own.clear()
