"""Finds the broker entry indexes of messages: counts from entry to entry, and asks the broker after a gap."""

from __future__ import annotations

import logging

from broker.client import PulsarError
from broker.position import Position
from broker.pulsar_admin.topic_questions import TopicQuestions

_log = logging.getLogger(__name__)

_ASKED_EACH = 1_000  # entries until the broker is asked again after it has not told an index


class EntryIndexes:
    """Finds the index of each entry, in the order in which they come.

    Args:
        topic: the topic partition's name.
        broker: says the index of the first entry, and of one after a gap.
    """

    def __init__(self, topic: str, broker: TopicQuestions) -> None:
        self._topic = topic
        self._broker = broker
        self._next: int | None = None  # the index of the next message; None: not known

    def first_index(self, position: Position, batch_size: int, follows: bool) -> int | None:
        """Returns the broker entry index of an entry's first message; None: not known.

        Args:
            position: of the entry.
            batch_size: the number of its messages.
            follows: whether the entry comes directly after the one of the last call.
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
