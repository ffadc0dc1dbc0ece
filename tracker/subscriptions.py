"""The subscriptions of each source topic, how their messages are retried, and which go to the dead letters.

A subscription keeps its number for the life of a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array, attempts_of


class Backoff(NamedTuple):
    """How a subscription's messages are retried.

    Attributes:
        first_millis: wait before the first retry, ms.
        factor: each further retry waits this many times longer than the previous one.
        max_millis: the longest wait, ms.
        jitter: fraction of a wait, 0 to 1, by which it may be longer or shorter.
        attempts: how many retries a message gets; a further one goes to the dead letters.
    """

    first_millis: int = 10_000
    factor: float = 2.0
    max_millis: int = 3_600_000
    jitter: float = 0.1
    attempts: int = 5

    def wait_millis(self, attempt: int, message: str) -> int:
        """Returns how long a retry waits, ms.

        Args:
            attempt: its number, from 1.
            message: any text that names message and subscription. It seeds the jitter, so that a replayed batch gets
                the same wait.
        """
        wait = float(self.first_millis)
        for _ in range(attempt - 1):
            wait = min(wait * self.factor, float(self.max_millis))
            if wait == self.max_millis:
                break
        digest = hashlib.blake2b(f"{message} {attempt}".encode(), digest_size=8).digest()
        spread = int.from_bytes(digest, "little") / 2**63 - 1
        return min(round(wait * (1 + self.jitter * spread)), self.max_millis)


DEFAULT_BACKOFF = Backoff()

# A subscription is a bit of an int64, whose sign bit is not used.
MAX_SUBSCRIPTIONS = 63

# In a command: all subscriptions, and those that are added later. In an outcome: the subscriptions added later.
ALSO_LATER = "*"


@dataclass(frozen=True)
class Subscriptions:
    """The subscriptions of all source topics, by number. State and commands name a subscription by its number.

    A subscription that is removed from the settings keeps its number, and gets no further messages. A topic whose route
    is missing keeps its subscriptions: messages that come due for them are parked until the route is back.

    Attributes:
        names: by topic: the names of its subscriptions; the index is the number.
        removed: by topic: a mask of the subscriptions that are not in the settings any more; bit i is number i.
        without_route: topics whose route is missing now.
        backoffs: by topic and subscription number: how messages are retried, where the settings say it.
        shaping: by topic and subscription number: the rule by which messages are shaped, as
            `tracker.shaping.token_bucket` writes it.
        in_order: by topic: a mask of the subscriptions with `order: key`; topics without any are left out.
        expire_after: by topic and subscription number: how long after it is due a message is sent at the latest, ms,
            where the settings say it.
        cumulative: by topic: a mask of the subscriptions whose consumers acknowledge cumulatively, so that no single
            message can be skipped; topics without any are left out.
    """

    names: Mapping[str, Sequence[str]]
    removed: Mapping[str, int] = field(default_factory=dict)
    without_route: Collection[str] = frozenset()
    backoffs: Mapping[str, Mapping[int, Backoff]] = field(default_factory=dict)
    shaping: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    in_order: Mapping[str, int] = field(default_factory=dict)
    expire_after: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    cumulative: Mapping[str, int] = field(default_factory=dict)

    def backoff(self, topic: str, subscription: int) -> Backoff:
        """Returns how messages of a topic's subscription, given by its number, are retried."""
        return self.backoffs.get(topic, {}).get(subscription, DEFAULT_BACKOFF)

    @property
    def retried_topics(self) -> list[str]:
        """The topics with a subscription that has a backoff: a retry by id finds all of their messages."""
        return [topic for topic, topic_backoffs in self.backoffs.items() if topic_backoffs]

    def most_retries(self, subscription: int, topic: str) -> int:
        """Returns how many retries a message gets at most for a topic's subscription, given by its number."""
        return self.backoff(topic, subscription).attempts

    @staticmethod
    def from_names(names: Subscriptions | Mapping[str, Sequence[str]]) -> Subscriptions:
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
        """Returns the name of a subscription of each row's topic: strings, (rows,).

        Args:
            topics: a column of strings, (rows,).
            subscription: its number, the same in each topic; or a name, which all rows get.
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
    """Returns the mask of each row's topic: int64, (rows,).

    Args:
        rows: with the column topic.
        bits: returns the mask of a topic; called once for each topic. -1 is all bits.
    """
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    topic_masks = np.array([bits(topic) for topic in topics.dictionary.to_pylist()], np.int64)
    row_masks: Int64Array = topic_masks[topics.indices.to_numpy()]
    return row_masks


# Suffix of a subscription's name, or of a topic's in `tracker.in_flight.OpenReleases`, that stands for its dead letters
# alone. The names themselves have no space.
_SUFFIX = " dlq"


def dead_letters_of(name: str) -> str:
    """Returns the name that stands for the dead letters of a subscription, or of all subscriptions of a topic."""
    return name + _SUFFIX


def without_dead_letters(name: str) -> tuple[str, bool]:
    """Returns the name of the subscription, and whether the given name stands for its dead letters alone."""
    return name.removesuffix(_SUFFIX), name.endswith(_SUFFIX)


def dead_letters_in(rows: pa.Table, subscriptions: Subscriptions) -> Int64Array:
    """Returns the subscriptions for which each row is a dead letter by the settings, as bits, int64, (rows,).

    Args:
        rows: with the columns topic and attempt.
    """
    return dead_letter_masks(rows, subscriptions.max_count, subscriptions.most_retries)


def dead_letter_masks(rows: pa.Table, n_subscriptions: int, most_retries: Callable[[int, str], int]) -> Int64Array:
    """Returns the subscriptions for which each row is a dead letter, as bits, int64, (rows,).

    Args:
        rows: with the columns topic and attempt.
        n_subscriptions: the largest number of subscriptions that a topic has.
        most_retries: returns how many retries a message gets at most, by a subscription's number and its topic.
    """
    masks, attempts = np.zeros(rows.num_rows, np.int64), attempts_of(rows)
    for number in range(n_subscriptions if attempts.any() else 0):
        masks[attempts > by_topic(rows, partial(most_retries, number))] |= 1 << number
    return masks
