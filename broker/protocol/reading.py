"""Reads the entries that a topic partition has, without a subscription that stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from broker.client import NoAnswerError, PulsarError
from broker.position import Position
from broker.protocol.brokers import Brokers
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.session import DisconnectedError

_MOST_MESSAGES = 5_000  # ahead of the caller
_MOST_BYTES = 4 << 20
_SECONDS = 30.0  # without an entry or a connection, after which the broker does not answer
_AGAIN_SECONDS = 0.2  # before a new connection


def read_entries(
    brokers: Brokers, topic: str, after: Position, up_to: Position | None = None, seconds: float = _SECONDS
) -> Iterator[ReceivedEntry]:
    """Yields the entries of a topic partition in order. After a reconnection it goes on where it was.

    Args:
        brokers: of the cluster.
        topic: the topic partition. A topic that is not there may be created.
        after: the entry before the first one; START: from the beginning.
        up_to: the last entry; None: the last one that the topic has when the reading begins.
        seconds: how long the broker may send nothing.

    Raises:
        NoAnswerError: the broker sends nothing for that long.
        PulsarError: the broker refuses.
    """
    ends_at = time.monotonic() + seconds
    while True:
        try:
            consumer = brokers.read(topic, after, max_bytes=_MOST_BYTES, max_messages=_MOST_MESSAGES)
            try:
                end = consumer.last_entry()
                up_to = end if up_to is None else min(up_to, end)
                while after < up_to:
                    entry = consumer.receive(max(ends_at - time.monotonic(), 0))
                    if entry is None:
                        raise NoAnswerError(f"the broker sends nothing of {topic} after {after}")
                    if after < entry.position <= up_to:  # the broker begins with the entry `after` itself
                        yield entry
                    after = max(after, entry.position)
                    ends_at = time.monotonic() + seconds
            finally:
                with suppress(PulsarError):
                    consumer.close()
            return
        except DisconnectedError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(_AGAIN_SECONDS)
