"""The subscriptions of each source topic. Each has a number that it keeps for the life of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array

# A subscription is a bit of an int64 that is never negative.
MAX_SUBSCRIPTIONS = 63

# In a command: all subscriptions, and those that are added later. In outcomes: that those will get it, too.
ALSO_LATER = "*"


@dataclass(frozen=True)
class Subscriptions:
    """The subscriptions of all source topics, by number. State and commands know a subscription by its number.

    A subscription that is taken out of the settings keeps its number, and gets nothing more. A topic that has no route
    for a while keeps its subscriptions: what comes due for them is held back until the route is there again.

    Attributes:
        names: by topic the names of its subscriptions; the index is the number.
        removed: by topic a mask of the subscriptions that are not in the settings any more; bit i is number i.
        without_route: topics that have no route now.
    """

    names: Mapping[str, Sequence[str]]
    removed: Mapping[str, int] = field(default_factory=dict)
    without_route: Collection[str] = frozenset()

    @staticmethod
    def of(names: Subscriptions | Mapping[str, Sequence[str]]) -> Subscriptions:
        """Makes subscriptions of names by topic, all of them in the settings; subscriptions stay as they are."""
        return names if isinstance(names, Subscriptions) else Subscriptions(names)

    @property
    def most(self) -> int:
        """The number of subscriptions of the topic that has the most."""
        return max(map(len, self.names.values()), default=0)

    def known(self, topic: str) -> int:
        """A mask of all subscriptions of a topic, removed ones included."""
        return (1 << len(self.names.get(topic, ()))) - 1

    def wanted(self, topic: str) -> int:
        """A mask of the subscriptions of a topic that its messages go to: those that are not removed."""
        return self.known(topic) & ~self.removed.get(topic, 0)

    def names_of(self, topics: pa.ChunkedArray, subscription: int | str) -> pa.Array:
        """The name of the subscription of a number, or a name for all, for each row of a column of topics."""
        if isinstance(subscription, str):
            return pa.repeat(subscription, len(topics))
        encoded = topics.combine_chunks().dictionary_encode()
        names = [self.names[topic][subscription] for topic in encoded.dictionary.to_pylist()]
        return pa.array(names, pa.string()).take(encoded.indices)


def by_topic(rows: pa.Table, bits: Callable[[str], int]) -> Int64Array:
    """The mask of each row's topic.

    Args:
        rows: with the column topic.
        bits: gives the mask of a topic; -1 is all bits.

    Returns:
        int64, (rows,).
    """
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    of_topics = np.array([bits(topic) for topic in topics.dictionary.to_pylist()], np.int64)
    of_rows: Int64Array = of_topics[topics.indices.to_numpy()]
    return of_rows
