"""Checks that source topics are still those that were read, and not those of a new cluster.

Ledger ids of a new cluster begin anew, so that its messages have positions that were read long ago, and would be taken
for repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.position import Position
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from conf.errors import DelayLakeError


class NewClusterError(DelayLakeError):
    """A topic is not the one that the checkpoint has read. The message is one line, and names the docs."""


def check_topics(admin: AdminClient, positions: Mapping[str, str]) -> None:
    """Checks that topic partitions have, or once had, the entries that were read from them.

    Args:
        admin: a client for the broker.
        positions: the last entry that was read, as `ledger:entry`, by topic partition.

    Raises:
        NewClusterError: a topic partition never had its entry.
        PulsarError: the broker does not answer.
    """
    for name, position in positions.items():
        last = Position.parse(position)
        ledgers = admin.internal_stats(name)
        if ledgers is not None and never_had(ledgers, last):
            newest = max(ledgers.ledgers)
            end = f"ends with {newest}:{ledgers.ledgers[newest] - 1}"
            has = end if newest <= last.ledger_id else f"has older ledgers, and not that one, and {end}"
            raise NewClusterError(
                f"{name} was read up to entry {last}, and {has}: the topic "
                "is of a new cluster, or was put back; see 'A new Pulsar cluster' in docs/operations.md"
            )


def never_had(topic: TopicLedgers, last: Position) -> bool:
    """Whether a topic partition certainly never had an entry.

    The broker trims ledgers in their order: if it has an older ledger than the entry's, it must have that, too.

    Args:
        topic: the topic partition's ledgers.
        last: the entry; with entry_id -1 the beginning of a ledger.
    """
    if not topic.ledgers:
        return False
    if last.ledger_id in topic.ledgers:
        return last.entry_id >= topic.ledgers[last.ledger_id]
    # The broker deletes a closed ledger without entries at once.
    return (min(topic.ledgers) if last.entry_id >= 0 else max(topic.ledgers)) < last.ledger_id
