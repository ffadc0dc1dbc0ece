"""What a subscription gets that comes and goes, by docs/settings.md and guarantees.md alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from tests.simulation.accounts import Accounts, require
from tests.simulation.expected import Arrival, Expected

ADDED = "d"  # the subscription

_NEVER = 1 << 62  # ms since the epoch


class Added:
    """The account of the subscription that comes and goes.

    Args:
        accounts: of the messages of the other subscriptions.
        expected: the messages, by position.
    """

    def __init__(self, accounts: Accounts, expected: Mapping[str, Expected]) -> None:
        self._accounts, self._expected = accounts, expected
        self.topic = ""  # its source topic
        self._edits: list[tuple[int, bool]] = []  # since when the job has it or not, ms since the epoch
        self._first_came: dict[str, int] = {}  # by position: when another subscription first got it, ms since the epoch
        self._given_up: set[str] = set()  # dispatched, and not sent when it was taken out
        self.came: Counter[str] = Counter()
        self._not_looked_for: Counter[str] = Counter()  # by position: rebuilds that did not look at its destination

    def begun(self, has_it: bool, now: int) -> None:
        """A start has fenced off the jobs before it, and has the subscription or not."""
        if has_it != bool(self._edits and self._edits[-1][1]):
            self._edits.append((now, has_it))

    def rebuilt(self, has_it: bool, now: int) -> None:
        """A checkpoint was rebuilt: settings that lack the subscription take it out, and nobody looks at what came."""
        if not has_it:
            self._not_looked_for.update(self.came.keys())
            self.begun(has_it, now)

    def restored(self, now: int) -> None:
        """A backup is the warehouse now: to its tables the subscription may be new."""
        if self._edits and self._edits[-1][1]:
            self._edits += [(now, False), (now, True)]

    def _most_times(self, position: str) -> int:
        return 1 + self._not_looked_for[position]

    def arrived_elsewhere(self, position: str, now: int) -> None:
        """Another subscription has got a message: it is dispatched."""
        self._first_came.setdefault(position, now)

    def arrived(self, arrival: Arrival, now: int) -> None:
        """The subscription has got a message: once, never early, and nothing that was dispatched before it."""
        position, message = arrival.position, self._expected[arrival.position]
        require(message.topic == self.topic, f"{ADDED} has got {position} of another topic")
        self.came[position] += 1
        due = message.due if message.repeat is None else message.repeat.due(arrival.occurrence)
        early = self._accounts.soonest(position, due) - now - self._accounts.ahead_millis
        require(early <= 0, f"{ADDED} has got {position} {early} ms early")
        if message.repeat is not None:
            return
        require(self.came[position] <= self._most_times(position), f"{ADDED} has got {position} twice")
        if self._is_moved(position, message):
            return
        dispatched = self._first_came.get(position, now)
        added = [at for at, has_it in self._edits if has_it]
        is_later = any(at <= dispatched for at in added)
        # After a rebuild what was not durable is taken in, and dispatched, anew.
        is_later |= self._accounts.n_rebuilds > 0
        require(is_later, f"{ADDED} has got {position}, which was dispatched before it was added")
        since, has_it = self._edits[-1]
        is_out = not has_it and message.due > since + self._accounts.dispatched_millis
        require(not is_out, f"{ADDED} has got {position}, due after it was taken out")

    def is_given_up(self, position: str, reason: str) -> bool:
        """Whether a rejected message was dispatched, and not sent, when the subscription was taken out."""
        message = self._expected.get(position)
        is_it = reason.startswith(f"not delivered to {ADDED}: ") and "the settings no longer have" in reason
        if is_it:
            is_right = message is not None and message.topic == self.topic and not message.rejected_for
            require(is_right and any(has_it for _, has_it in self._edits), f"{position} is put aside: {reason}")
            self._given_up.add(position)
        return is_it

    def check_end(self) -> None:
        """It has got whatever came due since it was added for good, and what others got while it was there."""
        if self._is_paused():
            return
        for (added_at, has_it), (until, _) in itertools.pairwise([*self._edits, (_NEVER, False)]):
            # A rebuild takes in anew, with the settings of then, what was not durable.
            if has_it and (until == _NEVER or not self._accounts.n_rebuilds):
                self._check_member(added_at + self._accounts.dispatched_millis, until)

    def _check_member(self, since: int, until: int) -> None:
        """It has got what was due from a time on and came to others before another one, both ms since the epoch."""
        for position, message in self._expected.items():
            if message.topic != self.topic or message.rejected_for or message.repeat is not None:
                continue
            is_its = message.due > since and (until == _NEVER or self._first_came.get(position, until) < until)
            if is_its and not self._is_moved(position, message):
                has_got = 1 <= self.came[position] <= self._most_times(position)
                has_got |= until != _NEVER and position in self._given_up
                require(has_got, f"{ADDED} has not got {position}")

    def _is_moved(self, position: str, message: Expected) -> bool:
        """Whether a message may be due at another time than its sender says, or for nobody."""
        is_plain = message.schedule_key is None and not message.ends_at
        return not is_plain or self._accounts.is_named(position)

    def _is_paused(self) -> bool:
        """Whether a command has paused subscriptions that are added later."""
        return any(c.operation == "PAUSE" and "*" in c.subscriptions for c in self._accounts.commands.values())
