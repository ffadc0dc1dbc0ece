"""The broker entry indexes of a topic partition's messages: counted on from entry to entry, asked for after a gap."""

from __future__ import annotations

import logging

from broker.client import PulsarError
from broker.position import Position
from broker.pulsar_admin.topic_questions import TopicQuestions

_log = logging.getLogger(__name__)

_ASKED_EACH = 1_000  # where the broker does not tell an index it is asked again at every so many entries


class EntryIndexes:
    """Tells the index of each entry that comes, in order.

    Args:
        topic: the topic partition's name.
        broker: is asked where an index can't be counted on.
    """

    def __init__(self, topic: str, broker: TopicQuestions) -> None:
        self._topic = topic
        self._broker = broker
        self._next: int | None = None  # the index of the next message; None: not known

    def first_index(self, position: Position, batch_size: int, follows: bool) -> int | None:
        """Returns the broker entry index of an entry's first message; None: not known.

        Args:
            position: the entry.
            batch_size: how many messages it has.
            follows: whether it is the one behind the entry that was asked about before.
        """
        if not follows or self._next is None:
            if follows and position.entry_id % _ASKED_EACH:
                return None  # the broker did not tell: do not ask for each entry
            last_index = self._last_index(position)
            self._next = None if last_index is None else last_index - batch_size + 1
        first = self._next
        if first is not None:
            self._next = first + batch_size
        return first

    def _last_index(self, position: Position) -> int | None:
        try:
            return self._broker.last_index(self._topic, position)
        except (PulsarError, ValueError) as error:
            _log.warning("%s: the index of entry %s stays unknown: %s", self._topic, position, error)
            return None
