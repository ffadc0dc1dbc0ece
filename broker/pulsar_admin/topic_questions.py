"""Asks the admin API for facts about a source topic that a consumer does not get."""

from __future__ import annotations

from dataclasses import dataclass

from broker.client import PulsarError
from broker.position import START, Position
from broker.pulsar_admin.admin_rest import AdminClient


@dataclass(frozen=True)
class Cursor:
    """A subscription's cursor in a topic partition, and the entries that the topic has."""

    acknowledged: Position  # every entry up to this one is acknowledged
    next_read: Position  # every entry before this one has been sent to the consumer
    end: Position  # the topic's last entry
    ledgers: dict[int, int]  # the entries of each ledger that the topic still has

    def has_sent(self, position: Position) -> bool:
        """Whether the broker has sent the consumer every entry up to this one."""
        return self.next_read > min(position, self.end)


class TopicQuestions:
    """Requests to the broker's admin API about the topic partitions that one subscription reads.

    Each method raises PulsarError if the broker does not answer, or refuses.
    """

    def __init__(self, admin: AdminClient, subscription: str) -> None:
        self._admin = admin
        self._subscription = subscription

    def last_index(self, topic: str, position: Position) -> int | None:
        """Returns the broker entry index of an entry's last message; None: the broker keeps no indexes."""
        return self._admin.message_index(topic, position.ledger_id, position.entry_id)

    def cursor(self, topic: str) -> Cursor:
        """Returns the subscription's cursor in a topic partition.

        Raises:
            PulsarError: there is no such topic or subscription.
        """
        found = self._admin.internal_stats(topic)
        if found is None or self._subscription not in found.next_read:
            raise PulsarError(f"{topic} has no subscription {self._subscription}")
        return Cursor(
            Position(*found.acknowledged[self._subscription]),
            Position(*found.next_read[self._subscription]),
            Position(*found.end),
            found.ledgers,
        )

    def begin(self, topic: str) -> Position:
        """Returns the position before the first entry that the consumer will get; START: unknown.

        That is the acknowledged position; without a subscription the beginning of the topic's first ledger.
        """
        found = self._admin.internal_stats(topic)
        if found is None:
            return START
        if self._subscription in found.acknowledged:
            return Position(*found.acknowledged[self._subscription])
        return Position(min(found.ledgers), -1) if found.ledgers else START

    def index_up_to(self, topic: str, position: Position) -> int | None:
        """Returns the broker entry index of the last message up to a position, -1 before the first; None: unknown.

        Args:
            topic: the topic partition.
            position: of an entry; with entry_id -1 the beginning of a ledger.
        """
        if position.entry_id >= 0:
            return self.last_index(topic, position)
        first = self._admin.entry_of_index(topic, 0)
        return -1 if first is None or Position(*first) > position else None
