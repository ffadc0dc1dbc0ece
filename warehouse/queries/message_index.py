"""Finds the entry with a broker entry index, in the table `entries`."""

from __future__ import annotations

import threading
from typing import Any

from broker.entries.message_ids import MessageRef
from conf.errors import DelayLakeError
from tracker.messages import FIRST_IMPORTED_LEDGER
from tracker.schemas import MAX_BATCH_INDEX
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Value
from warehouse.queries.expired import expired_around

_SQL = NamedQueries(__file__, first_imported_ledger=FIRST_IMPORTED_LEDGER)


class NoSuchIndexError(DelayLakeError):
    """No entry of the topic in the table has the index."""


class IndexNotRecordedError(DelayLakeError):
    """Entries were recorded without an index: the broker has no AppendIndexMetadataInterceptor, or had none."""


class PartitionedTopicError(DelayLakeError):
    """The topic is partitioned, and each partition has indexes of its own."""


EXPIRED = MessageRef(-1, -1)  # stands for an entry that retention has removed from the table


class MessageIndex:
    """Finds entries by index, as PIP-415 says. Safe in several threads.

    An entry is in the table some seconds after it came in. Each index of a batch leads to the batch's entry.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._lock = threading.Lock()

    def find(self, topic: str, partition: int, index: int) -> MessageRef:
        """Returns the entry with an index; EXPIRED if retention has deleted it.

        An index between two entries that was never in the table is not that of a user message (but of a marker): it
        leads to the next entry, or to EXPIRED if that has been deleted.

        Args:
            topic: a source topic, as the route names it.
            partition: number of the partition; -1: the topic is not partitioned.
            index: the broker entry index.

        Raises:
            NoSuchIndexError: no message has the index yet, or the table has no entry of the topic.
            IndexNotRecordedError: no entry with the index was found, and some entries were recorded without an index.
            PartitionedTopicError: the topic is partitioned, and no partition is given.
            deltalake.exceptions.TableNotFoundError: the job has never run on this warehouse.
        """
        with self._lock:
            least = index - MAX_BATCH_INDEX
            if found := self._rows("with_index", topic=topic, partition=partition, index=index, least=least):
                return _ref(found[0], partition)
            return self._between(topic, partition, index)

    def _between(self, topic: str, partition: int, index: int) -> MessageRef:
        known = self._rows("known", topic=topic, partition=partition)[0]
        if not known["entries"]:
            if partition < 0 and self._rows("any_partition", topic=topic):
                raise PartitionedTopicError("the topic is partitioned: name a partition")
            raise NoSuchIndexError("no entry of the topic is known yet")
        if index < 0:
            raise NoSuchIndexError(f"no message has the index {index}")
        if known["indexed"] < known["entries"]:
            raise IndexNotRecordedError(
                "some entries were recorded without an index: set brokerEntryMetadataInterceptors"
            )
        # Entries are read before deleted ranges, so that each entry is found in at least one of both.
        following = self._rows("after_index", topic=topic, partition=partition, index=index)
        first_expired, end_of_expired = expired_around(self._tables, topic, partition, index)
        if index < min(known["first"], known["first"] if first_expired is None else first_expired):
            return EXPIRED
        if index >= known["end"]:
            raise NoSuchIndexError(f"no message has the index {index} yet; the next is {known['end']}")
        is_expired = end_of_expired is not None and end_of_expired <= following[0]["first_index"]
        return EXPIRED if is_expired else _ref(following[0], partition)

    def _rows(self, query: str, **values: Value) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._tables.query("entries", _SQL(query, **values)).to_pylist()
        return rows


def _ref(entry: dict[str, Any], partition: int) -> MessageRef:
    return MessageRef(entry["ledger_id"], entry["entry_id"], partition)
