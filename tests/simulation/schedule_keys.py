"""Which of the messages with a schedule key are delivered, by docs/schedules.md alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.simulation.accounts import Account, Accounts, Command, require
from tests.simulation.expected import Arrival, ScheduleKey


@dataclass
class Keyed:
    """A message with a schedule key.

    Attributes:
        number: in the order in which the topic has them.
        asked: when it is due without a limit, ms since the epoch.
        published_at: ms since the epoch.
        since: when the first message of its key was published, likewise.
    """

    position: str
    key: ScheduleKey
    number: int
    asked: int
    published_at: int
    since: int

    @property
    def times_without_others(self) -> tuple[int, int]:
        """When it is due without a limit, and with one of its own alone, ms since the epoch."""
        return self.asked, min(self.asked, self.published_at + self.key.limit)

    @property
    def entry(self) -> str:
        return self.position.rsplit(":", 2)[0]


class ScheduleKeys:
    """The accounts of keys: which messages yield to which others.

    Args:
        accounts: of all messages; a debounced one is due earlier by its limit.
        taken_at: since when some table has an entry, ms since the epoch.
    """

    def __init__(self, accounts: Accounts, taken_at: Mapping[str, int]) -> None:
        self._accounts, self._taken_at = accounts, taken_at
        self._messages: dict[str, Keyed] = {}
        self._by_key: dict[tuple[str, str], list[Keyed]] = defaultdict(list)  # by topic and key, in their order
        self._before: dict[str, list[Keyed]] = defaultdict(list)  # by position: those from which the limit counts
        self._yields_to: dict[tuple[str, str], Keyed] = {}  # by position and subscription

    def sent(self, position: str, topic: str, key: ScheduleKey, asked: int, now: int) -> None:
        """A message with a key is in a source topic."""
        one = Keyed(position, key, len(self._messages), asked, now, now)
        self._messages[position] = one
        self._by_key[topic, key.name].append(one)

    def _is_taken(self, one: Keyed, by: int) -> bool:
        """Whether a message was read, for certain, before a time."""
        taken_at = self._taken_at.get(one.entry)
        return taken_at is not None and taken_at < by

    def not_found(self, command: Command, name: str, at: int) -> None:
        """A command by key is answered NOT_FOUND: none of the key waits."""
        for one in self._by_key[command.topic, command.schedule_key] if command.schedule_key else ():
            account = self._accounts.accounts[one.position, name]
            waits = (
                self._is_taken(one, command.sent_at)
                and not account.is_gone
                and account.due > at + self._accounts.dispatched_millis
            )
            is_certain = not account.is_moved and self._accounts.is_named_only_by(one.position, command)
            require(not (waits and is_certain), f"{command.id} of {name}: NOT_FOUND, and {one.position} waits")

    def superseded(self, row: Mapping[str, Any]) -> None:
        """A row of `outcomes` says that a message yields to another one."""
        what = f"{row['position']} of {row['subscription']} yields to {row['superseded_by']}"
        one, other = self._messages.get(row["position"]), self._messages.get(row["superseded_by"])
        require(one is not None and other is not None, f"{what}: without a key")
        assert one is not None
        assert other is not None
        of_topic = self._by_key[row["topic"], one.key.name]
        require(one in of_topic and other in of_topic and one is not other, f"{what}: another key")
        newer = max(one, other, key=lambda keyed: keyed.number)
        require((newer.key.mode == "keep") == (newer is one), f"{what}: {newer.position} says {newer.key.mode}")
        name = row["subscription"]
        account = self._accounts.accounts[one.position, name]
        is_waiting = not account.is_gone and len(account.came_at) <= len(account.earlier)
        require(is_waiting or account.is_unsure, f"{what}: it has come, or is gone")
        account.is_cancelled = True
        self._yields_to[one.position, name] = other
        if other is newer:
            self._limit(one, other, account.due, row["applied_at"])

    def _limit(self, one: Keyed, other: Keyed, due: int, at: int) -> None:
        """A debounced message is due no later than its limit after the first of its key."""
        if one.since >= other.since:
            return
        limit = one.since + other.key.limit
        other.since = one.since
        self._before[other.position].append(one)
        # What has been parked, or came to another subscription, counts as delivered, and the limit begins again.
        is_begun = due <= at or any(account.came_at or account.is_moved for account in self._of(one))
        for account in self._of(other):
            if other.key.limit and not account.is_moved:  # it may have come before this answer was in the table
                account.due = min(account.due, limit)
            account.is_moved = account.is_moved or is_begun

    def _of(self, one: Keyed) -> list[Account]:
        return self._accounts.accounts_of(one.position)

    def arrived(self, arrival: Arrival) -> None:
        """A message has come to a destination: its key has no other that was to be delivered in its place."""
        one = self._messages.get(arrival.position)
        if one is None:
            return
        account = self._accounts.accounts[arrival.position, arrival.subscription]
        if account.is_moved or self._accounts.is_named(arrival.position, one.since):
            return
        # What was parked, or put off by a rate or windows, has another time; without a limit it has one of these.
        is_in_time = arrival.deliver_at <= account.due or arrival.deliver_at not in one.times_without_others
        is_in_time = is_in_time or self._may_begin_again(one)
        require(is_in_time, f"{one.position} has come {arrival.deliver_at - account.due} ms after the limit of its key")
        for other in self._others(arrival.topic, one):
            is_newer = other.number > one.number
            if is_newer and other.key.mode != "keep":
                is_wrong = self._is_taken(other, account.due - self._accounts.dispatched_millis)
            else:
                before = self._yields_to.get((other.position, arrival.subscription))
                waits_at = self._accounts.accounts[other.position, arrival.subscription].due
                is_wrong = (
                    not is_newer
                    and one.key.mode == "keep"
                    # Of a changed topic the older one may be gone before the job has read it.
                    and all(self._is_taken(both, waits_at - self._accounts.dispatched_millis) for both in (one, other))
                    and (before is None or before.number > one.number)
                )
            name = arrival.subscription
            require(not is_wrong, f"{name} has got {one.position}, which was to yield to {other.position}")

    def _may_begin_again(self, one: Keyed) -> bool:
        """Whether some subscription may have had a message before, so that the limit begins again with this one."""
        return any(self._has_come(before) or self._may_begin_again(before) for before in self._before[one.position])

    def _has_come(self, one: Keyed) -> bool:
        """Whether a message may have come, or been cancelled, for a subscription before it yielded for others."""
        pairs = [pair for pair in self._accounts.accounts if pair[0] == one.position]
        return any(pair not in self._yields_to for pair in pairs)

    def _others(self, topic: str, one: Keyed) -> Iterator[Keyed]:
        """The other messages of its key, but for those that commands name, which may have been cancelled first."""
        for other in self._by_key[topic, one.key.name]:
            is_sure = not any(account.is_unsure for account in self._of(other))
            if other is not one and is_sure and not self._accounts.is_named(other.position):
                yield other
