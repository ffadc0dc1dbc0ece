"""How many messages of a subscription with a rate are sent a second, by docs/shaping.md alone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from tests.simulation.accounts import require


class Rates:
    """The accounts of rates: when each message of a subscription with one was sent.

    Attributes:
        most: by subscription: the most messages in any second, its rate and its burst.
        are_several_machines: whether two have sent: only the tasks of one keep to a rate together.
    """

    def __init__(self) -> None:
        self.most: Mapping[str, int] = {}
        self.are_several_machines = False
        self._sent: dict[str, deque[int]] = defaultdict(deque)  # by subscription: times of the last second, ascending

    def arrived(self, name: str, sent_at: int) -> None:
        """A message has come to a destination.

        Args:
            name: of the subscription.
            sent_at: its publish time, ms since the epoch.
        """
        if name not in self.most or self.are_several_machines:
            return
        sent = self._sent[name]
        sent.append(sent_at)
        while sent[0] <= max(sent) - 1_000:
            sent.popleft()
        require(len(sent) <= self.most[name], f"{name} has got {len(sent)} messages of one second")
