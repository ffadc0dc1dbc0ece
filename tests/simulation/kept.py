"""Which messages a cancel meets that was there before them, by docs/control.md and schedules.md alone."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.accounts import Accounts, require
from tests.simulation.expected import Arrival, Expected

_KEPT_MILLIS = 10_000  # before the time that a cancel names its message has been read, for certain


class KeptCancels:
    """The accounts of cancels that wait.

    Args:
        accounts: of all messages and commands.
        expected: the messages, by position.
        taken_at: since when some table has an entry, ms since the epoch.
    """

    def __init__(self, accounts: Accounts, expected: Mapping[str, Expected], taken_at: Mapping[str, int]) -> None:
        self._accounts, self._expected, self._taken_at = accounts, expected, taken_at
        self._first_keyed: dict[str, str] = {}  # by topic: the position of the first message with a schedule key

    def sent(self, position: str, message: Expected) -> None:
        """A message is in a source topic."""
        if message.schedule_key is not None:
            self._first_keyed.setdefault(message.topic, position)

    def arrived(self, arrival: Arrival) -> None:
        """A message has come to a destination: no cancel was there before it could be dispatched.

        A cancel may miss the very first message with a schedule key of its topic.
        """
        position, name = arrival.position, arrival.subscription
        account = self._accounts.accounts[position, name]
        taken_at = self._taken_at.get(position.rsplit(":", 2)[0])
        if taken_at is None or account.is_moved or self._first_keyed.get(arrival.topic) == position:
            return
        for command in self._accounts.commands_for(position):
            is_kept = (
                command.operation == "CANCEL"
                and command.waits_from.get(name, account.due) < account.due - self._accounts.dispatched_millis
                and command.value > max(taken_at + _KEPT_MILLIS, int(self._expected[position].properties["deliverAt"]))
                and self._accounts.is_named_only_by(position, command)
            )
            require(not is_kept, f"{name} has got {position}, for which {command.id} has waited to cancel it")
