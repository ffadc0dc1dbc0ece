"""Whether source topics still are those that were read: in a cluster that was made anew ledger ids begin again.

What such a topic gets has positions that were read long ago, and would be taken for repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from conf.errors import DelayLakeError
from streaming.pulsar_client import AdminClient, TopicLedgers
from streaming.receiver import Position


class NewClusterError(DelayLakeError):
    """A topic is not the one that the checkpoint has read. The message is one line, and says what to do."""


def check_topics(admin: AdminClient, positions: Mapping[str, str]) -> None:
    """Whether topic partitions still have, or have had, the entries that were read of them.

    Args:
        positions: by topic partition the last entry that was read.

    Raises:
        NewClusterError: one ends before that.
        PulsarError: the broker does not answer.
    """
    for name, position in positions.items():
        last = Position.parse(position)
        ledgers = admin.internal_stats(name)
        if ledgers is not None and ends_before(ledgers, last):
            newest = max(ledgers.ledgers)
            raise NewClusterError(
                f"{name} was read up to entry {last}, and ends with {newest}:{ledgers.ledgers[newest] - 1}: the topic "
                "is of a new cluster, or was put back; see 'A new Pulsar cluster' in docs/operations.md"
            )


def ends_before(topic: TopicLedgers, last: Position) -> bool:
    """Whether a topic partition never had an entry. A ledger that is not there any more is taken to have had it."""
    if not topic.ledgers:
        return False
    newest = max(topic.ledgers)
    if last.ledger_id in topic.ledgers:
        return last.entry_id >= topic.ledgers[last.ledger_id]
    return newest < last.ledger_id
