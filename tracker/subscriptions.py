"""The subscriptions of each source topic. A subscription keeps its number for the life of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tracker.backoff import DEFAULT_BACKOFF, Backoff
from tracker.messages import Int64Array

# A subscription is a bit of an int64, whose sign bit is not used.
MAX_SUBSCRIPTIONS = 63

# In a command: all subscriptions, and those that are added later. In an outcome: the subscriptions added later.
ALSO_LATER = "*"


@dataclass(frozen=True)
class Subscriptions:
    """The subscriptions of all source topics, by number. State and commands name a subscription by its number.

    A subscription that is removed from the settings keeps its number, and gets no further messages. A topic whose route
    is missing keeps its subscriptions: messages that come due for them are held back until the route is back.

    Attributes:
        names: by topic: the names of its subscriptions; the index is the number.
        removed: by topic: a mask of the subscriptions that are not in the settings any more; bit i is number i.
        without_route: topics whose route is missing now.
        backoffs: by topic and subscription number: how messages are retried, where the settings say it.
        shaping: by topic and subscription number: the rule by which messages are shaped, as `tracker.shaping.rule`
            writes it.
        in_order: by topic: a mask of the subscriptions with `order: key`; topics without any are left out.
    """

    names: Mapping[str, Sequence[str]]
    removed: Mapping[str, int] = field(default_factory=dict)
    without_route: Collection[str] = frozenset()
    backoffs: Mapping[str, Mapping[int, Backoff]] = field(default_factory=dict)
    shaping: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    in_order: Mapping[str, int] = field(default_factory=dict)

    def backoff(self, topic: str, subscription: int) -> Backoff:
        """Returns how messages of a topic's subscription, given by its number, are retried."""
        return self.backoffs.get(topic, {}).get(subscription, DEFAULT_BACKOFF)

    @property
    def retried_topics(self) -> list[str]:
        """The topics with a subscription that has a backoff: a retry by id finds all of their messages."""
        return [topic for topic, of_topic in self.backoffs.items() if of_topic]

    def most_retries(self, subscription: int, topic: str) -> int:
        """Returns how many retries a message gets at most for a topic's subscription, given by its number."""
        return self.backoff(topic, subscription).attempts

    @staticmethod
    def of(names: Subscriptions | Mapping[str, Sequence[str]]) -> Subscriptions:
        """Makes `Subscriptions` of names by topic, all of them in the settings; returns `Subscriptions` unchanged."""
        return names if isinstance(names, Subscriptions) else Subscriptions(names)

    @property
    def max_count(self) -> int:
        """The largest number of subscriptions that a topic has."""
        return max(map(len, self.names.values()), default=0)

    def all_of(self, topic: str) -> int:
        """Returns a mask of all subscriptions of a topic, removed ones included."""
        return (1 << len(self.names.get(topic, ()))) - 1

    def active(self, topic: str) -> int:
        """Returns a mask of a topic's subscriptions that are in the settings: its messages go to these."""
        return self.all_of(topic) & ~self.removed.get(topic, 0)

    def names_by_topic(self, masks: Mapping[str, int]) -> dict[str, list[str]]:
        """Returns by topic the names of the subscriptions in its mask, except removed ones. Leaves empty topics out."""
        found = {
            topic: [name for n, name in enumerate(self.names.get(topic, ())) if bits & self.active(topic) & 1 << n]
            for topic, bits in masks.items()
        }
        return {topic: names for topic, names in found.items() if names}

    def names_of(self, topics: pa.ChunkedArray, subscription: int | str) -> pa.Array:
        """Returns the name of a subscription of each row's topic.

        Args:
            topics: a column of strings, (rows,).
            subscription: its number, the same in each topic; or a name, which all rows get.

        Returns:
            strings, (rows,).
        """
        if isinstance(subscription, str):
            return pa.repeat(subscription, len(topics))
        encoded = topics.combine_chunks().dictionary_encode()
        names = [self.names[topic][subscription] for topic in encoded.dictionary.to_pylist()]
        if len(names) == 1 and not topics.null_count:
            return pa.repeat(names[0], len(topics))
        return pa.array(names, pa.string()).take(encoded.indices)


def numbers_in(masks: Int64Array) -> range:
    """Returns the numbers of subscriptions up to the highest one in some masks, int64, (n,); not all need occur."""
    return range(int(masks.max(initial=0)).bit_length())


def by_topic(rows: pa.Table, bits: Callable[[str], int]) -> Int64Array:
    """Returns the mask of each row's topic.

    Args:
        rows: with the column topic.
        bits: returns the mask of a topic; called once for each topic. -1 is all bits.

    Returns:
        int64, (rows,).
    """
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    of_topics = np.array([bits(topic) for topic in topics.dictionary.to_pylist()], np.int64)
    of_rows: Int64Array = of_topics[topics.indices.to_numpy()]
    return of_rows
