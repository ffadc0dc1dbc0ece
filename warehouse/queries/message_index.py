"""Finds the entry with a broker entry index, in the table `entries`."""

from __future__ import annotations

import threading
from typing import Any

from broker.entries.message_ids import MessageRef
from conf.errors import DelayLakeError
from tracker.messages import FIRST_IMPORTED_LEDGER
from tracker.schemas import MAX_BATCH_INDEX
from warehouse.delta.tables import Tables, literal
from warehouse.queries.expired import expired_around


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
        of_topic = f"topic = {literal(topic)} AND ledger_id < {FIRST_IMPORTED_LEDGER}"
        of_partition = f"{of_topic} AND partition = {partition}"
        # The lower bound lets the reader skip files. Indexes of a topic that was deleted and created again are there
        # twice: those in the highest ledgers count.
        near = f"first_index BETWEEN {index - MAX_BATCH_INDEX} AND {index} AND first_index + batch_size > {index}"
        with self._lock:
            if found := self._entries(f"{of_partition} AND {near} ORDER BY ledger_id DESC"):
                return _ref(found[0], partition)
            return self._between(topic, of_topic, of_partition, partition, index)

    def _between(self, topic: str, of_topic: str, of_partition: str, partition: int, index: int) -> MessageRef:
        known = self._rows(
            'SELECT count(*) AS entries, count(first_index) AS indexed, min(first_index) AS "first",'  # noqa: S608
            f' max(first_index + batch_size) AS "end" FROM entries WHERE {of_partition}'
        )[0]
        if not known["entries"]:
            if partition < 0 and self._rows(f"SELECT 1 FROM entries WHERE {of_topic} LIMIT 1"):  # noqa: S608
                raise PartitionedTopicError("the topic is partitioned: name a partition")
            raise NoSuchIndexError("no entry of the topic is known yet")
        if index < 0:
            raise NoSuchIndexError(f"no message has the index {index}")
        if known["indexed"] < known["entries"]:
            raise IndexNotRecordedError(
                "some entries were recorded without an index: set brokerEntryMetadataInterceptors"
            )
        # Entries are read before deleted ranges, so that each entry is found in at least one of both.
        following = self._entries(f"{of_partition} AND first_index > {index} ORDER BY first_index")
        first_expired, end_of_expired = expired_around(self._tables, topic, partition, index)
        if index < min(known["first"], known["first"] if first_expired is None else first_expired):
            return EXPIRED
        if index >= known["end"]:
            raise NoSuchIndexError(f"no message has the index {index} yet; the next is {known['end']}")
        is_expired = end_of_expired is not None and end_of_expired <= following[0]["first_index"]
        return EXPIRED if is_expired else _ref(following[0], partition)

    def _entries(self, condition: str) -> list[dict[str, Any]]:
        return self._rows(f"SELECT ledger_id, entry_id, first_index FROM entries WHERE {condition} LIMIT 1")  # noqa: S608

    def _rows(self, sql: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._tables.query("entries", sql).to_pylist()
        return rows


def _ref(entry: dict[str, Any], partition: int) -> MessageRef:
    return MessageRef(entry["ledger_id"], entry["entry_id"], partition)
