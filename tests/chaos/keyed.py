"""Messages with schedule keys: what the job has written down as superseded must not come; all else must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.chaos.ledger import EITHER, NOT_MEANT, Ledger

Position = tuple[int, int, int]  # ledger, entry, and number in the entry


class Keyed:
    """The messages for a subscription that have a schedule key, and where the broker has stored them.

    Attributes:
        superseded: how many of them are.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[int, str] = {}
        self._numbers: dict[Position, int] = {}
        self.superseded = 0

    def send(self, number: int, key: str) -> None:
        """A message with a key is about to be published."""
        self._keys[number] = key

    def stored(self, number: int, message_id: Any) -> None:
        """The broker has it."""
        at = message_id.ledger_id(), message_id.entry_id(), max(message_id.batch_index(), 0)
        if at[0] >= 0:  # else it answers a repetition, and does not say where the first one is
            self._numbers[at] = number

    def settle(self, ledger: Ledger, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Has the ledger expect what the table `outcomes` says.

        Args:
            rows: its rows that are SUPERSEDED.

        Returns:
            what is wrong with them: a message has to yield to another one of its key, and not, by way of others, to
            itself.
        """
        yields_to: dict[int, int] = {}
        wrong = []
        for unknown in self._keys.keys() - set(self._numbers.values()):
            ledger.expect(self._name, unknown, EITHER)
        for row in rows:
            number, other = (self._numbers.get(_position(row[column])) for column in ("position", "superseded_by"))
            if number is None or row["subscription"] != self._name:
                continue
            ledger.expect(self._name, number, NOT_MEANT)
            if other is not None:
                yields_to[number] = other
                if self._keys[other] != self._keys[number]:
                    wrong.append(f"message {number} of {self._keys[number]} yields to one of {self._keys[other]}")
        self.superseded = len(yields_to)
        return wrong + [f"message {number} yields to itself" for number in _in_circles(yields_to)]


def _position(text: str) -> Position:
    ledger, entry, _, batch_index = map(int, text.split(":"))
    return ledger, entry, max(batch_index, 0)


def _in_circles(yields_to: Mapping[int, int]) -> list[int]:
    """Returns a message of each circle of messages that yield to one another."""
    found = []
    ended: set[int] = set()
    for at in yields_to:
        path: set[int] = set()
        while at in yields_to and at not in ended and at not in path:
            path.add(at)
            at = yields_to[at]
        if at in path:
            found.append(at)
        ended |= path
    return found
