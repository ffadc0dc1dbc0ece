"""In which order the messages of a key come where `order: key` is set, by docs/order.md alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.simulation.accounts import Accounts, require
from tests.simulation.expected import Arrival, Expected


class Order:
    """The accounts of keys: what has come of each, in its order.

    Args:
        accounts: of all messages.
        expected: the messages, by position.
        taken_at: since when some table has an entry, ms since the epoch.
    """

    def __init__(self, accounts: Accounts, expected: Mapping[str, Expected], taken_at: Mapping[str, int]) -> None:
        self.subscriptions: frozenset[str] = frozenset()  # those with `order: key`
        self._accounts, self._expected, self._taken_at = accounts, expected, taken_at
        self._came: dict[tuple[str, str, str], list[Arrival]] = defaultdict(list)  # by topic, key and subscription

    def arrived(self, arrival: Arrival) -> None:
        """A message has come to a destination: before none of its key that is due earlier, and was read in time."""
        key = self._expected[arrival.position].key
        # What comes again after a rebuild is taken in then, whatever a table had before.
        if not key or arrival.subscription not in self.subscriptions or self._accounts.n_rebuilds:
            return
        came = self._came[arrival.topic, key, arrival.subscription]
        known_at = self._known_at(arrival)
        for other in came if known_at is not None else ():
            assert known_at is not None
            is_late = self._goes_before(arrival, other) and (
                known_at < other.deliver_at - self._accounts.dispatched_millis
            )
            require(
                not is_late,
                f"{arrival.subscription} has got {arrival.position}, due {other.deliver_at - arrival.deliver_at} ms "
                f"before {other.position}, after it, of key {key}",
            )
        came.append(arrival)

    def _known_at(self, arrival: Arrival) -> int | None:
        """When the service knew, for certain, at which time it delivers a message; None: that is not known here.

        The time of a message that was moved, or parked, may have been decided as late as it was due.
        """
        taken_at = self._taken_at.get(arrival.position.rsplit(":", 2)[0])
        if taken_at is None:
            return None
        return taken_at if self._is_as_sent(arrival) else max(taken_at, arrival.deliver_at)

    def _goes_before(self, one: Arrival, other: Arrival) -> bool:
        """Whether a message is due before another one, or together with it and has the lower id."""
        if one.deliver_at != other.deliver_at:
            return one.deliver_at < other.deliver_at
        # What was moved, or parked, goes by other times, too.
        return _id_of(one) < _id_of(other) and self._is_as_sent(one) and self._is_as_sent(other)

    def _is_as_sent(self, arrival: Arrival) -> bool:
        """Whether a message has come at the time that its sender gave it."""
        account = self._accounts.accounts[arrival.position, arrival.subscription]
        return not account.is_moved and account.due == arrival.deliver_at


def _id_of(arrival: Arrival) -> tuple[int, ...]:
    """Returns ledger, entry and number in the entry."""
    ledger, entry, _, index = arrival.position.split(":")
    return int(ledger), int(entry), int(index)
