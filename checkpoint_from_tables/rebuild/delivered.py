"""Reads which messages have been delivered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from checkpoint_from_tables.rebuild.done_occurrences import DoneOccurrences
from checkpoint_from_tables.rebuild.message_set import MessageSet
from conf.partitions import partition_name
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    BoolArray,
    Int64Array,
    concat,
    has_occurrences,
    int64,
    subscription_numbers,
    typed,
    where,
)
from tracker.rebuilt import NOT_TO_DELIVER
from warehouse.delivery_key import attempt_ids
from warehouse.delta.tables import OnProgress, Tables
from warehouse.routes.membership import Memberships

# The most by which the clocks of producers, senders and the rebuild differ.
CLOCKS_MILLIS = 15 * 60 * 1000

# A time, ms since the epoch, by source topic and number of a subscription.
Times = dict[tuple[str, int], int]

_DELIVERIES = (
    "SELECT topic, subscription, partition, ledger_id, entry_id, batch_index, deliver_at, attempt, occurrence, "
    "occurrence_at, sent_at FROM deliveries"
)

# Messages that a subscription must not get (again), and when they were to be delivered.
DONE = pa.schema([*list(NOT_TO_DELIVER)[:-1], ("deliver_at", pa.int64())])


class Delivered:
    """The messages that have been delivered to the subscriptions of the routes.

    Args:
        names: the names of each source topic's subscriptions, in the order of their numbers.
        durable: the last entry of each topic partition that does not come again from the source topics.
        memberships: since when subscriptions are in the settings: a subscription has `missed` messages that were
            dispatched before; None: none has missed any.

    Attributes:
        occurrences: the delivered occurrences of recurring messages. The message itself counts as delivered only when
            its last occurrence has been.
    """

    def __init__(
        self,
        names: Mapping[str, Sequence[str]],
        durable: Mapping[str, Position],
        memberships: Memberships | None = None,
    ) -> None:
        self._names = names
        self._memberships = memberships or Memberships()
        self._durable = durable
        self._messages = MessageSet()
        self.occurrences = DoneOccurrences()
        self._not_durable: list[pa.Table] = []

    @property
    def durable(self) -> Mapping[str, Position]:
        """The last entry of each topic partition that does not come again from the source topics."""
        return self._durable

    @property
    def not_durable(self) -> pa.Table:
        """The delivered or missed messages that come again from the source topics, as DONE."""
        return concat(self._not_durable, DONE)

    def add(self, rows: pa.Table) -> None:
        """Adds rows of `deliveries`, except those of unknown subscriptions."""
        numbers = subscription_numbers(rows, self._names)
        if has_occurrences(rows):
            recurs = pc.is_valid(rows["occurrence"]).to_numpy(zero_copy_only=False)
            self.occurrences.add(where(rows, recurs & (numbers >= 0)), numbers[recurs & (numbers >= 0)])
            rows, numbers = where(rows, ~recurs), numbers[~recurs]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            self._messages.add(number, *attempt_ids(where(rows, numbers == number)))
        is_again = is_not_durable(rows, self._durable) & (numbers >= 0)
        again = rows.filter(pa.array(is_again))  # a copy, because a slice would keep all rows in memory
        self._not_durable.append(as_done(again, numbers[is_again]))
        of_all = again.drop_columns("subscription")
        for number, is_missed in self.missed(of_all):
            self._not_durable.append(as_done(where(again, is_missed), np.full(int(is_missed.sum()), number)))

    def contains(self, number: int, rows: pa.Table) -> BoolArray:
        """Says which messages have been delivered to a subscription.

        A retry counts as delivered only if the row's `attempt` was, an occurrence only if that occurrence was.

        Args:
            number: of the subscription.
            rows: the messages.

        Returns:
            a mask, bool, shape (rows,).
        """
        found = self._messages.contains(number, *attempt_ids(rows))
        return found | self.occurrences.contains(number, rows) if has_occurrences(rows) else found

    def add_ended(self, number: int, rows: pa.Table) -> None:
        """Adds recurring messages whose last occurrence a subscription has got."""
        self._messages.add(number, *attempt_ids(rows))

    def find(self, rows: pa.Table) -> Iterator[tuple[int, BoolArray]]:
        """Yields (number of a subscription, mask of the messages that have been delivered to it)."""
        for number in self._messages.subscriptions:
            yield number, self.contains(number, rows)

    def missed(self, rows: pa.Table) -> Iterator[tuple[int, BoolArray]]:
        """Yields (number of a subscription, mask of the messages that it missed) if it was absent for some time.

        Args:
            rows: with the columns that `Memberships.were_missed` needs.
        """
        for topic, names in self._names.items():
            for name in self._memberships.changed_names(topic):
                if name in names:
                    yield list(names).index(name), self._memberships.were_missed(rows, topic, name)


def as_done(rows: pa.Table, numbers: Int64Array) -> pa.Table:
    """Returns messages as DONE.

    Args:
        rows: the messages.
        numbers: of each row's subscription, int64, shape (rows,).
    """
    return typed({name: rows[name] for name in DONE.names} | {"subscription": pa.array(numbers)}, DONE)


def is_not_durable(rows: pa.Table, durable: Mapping[str, Position]) -> BoolArray:
    """Says which rows have an entry that comes again from the source topics; those of imported messages never do.

    Args:
        rows: with topic, partition, ledger_id and entry_id.
        durable: the last entry of each topic partition that does not come again.

    Returns:
        a mask, bool, shape (rows,).
    """
    if not rows.num_rows:
        return np.zeros(0, np.bool_)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    partitions, place = np.unique(int64(rows, "partition"), return_inverse=True)
    last = np.array(
        [
            [durable.get(partition_name(topic, p), Position(-1, -1)) for p in partitions.tolist()]
            for topic in topics.dictionary.to_pylist()
        ],
        np.int64,
    )
    ledger, entry = last[topics.indices.to_numpy(), place].T
    ledgers = int64(rows, "ledger_id")
    is_later: BoolArray = (ledgers > ledger) | ((ledgers == ledger) & (int64(rows, "entry_id") > entry))
    return is_later & (ledgers < FIRST_IMPORTED_LEDGER)


def may_come_again(rows: pa.Table, last: Mapping[int, int]) -> BoolArray:
    """Says which rows may have an entry that comes from the source topics from now on, for the first time or again.

    Args:
        rows: with ledger_id and entry_id.
        last: the last entry of each ledger that is in `entries`, by ledger id.

    Returns:
        a mask, bool, shape (rows,).
    """
    ledger_ids = int64(rows, "ledger_id")
    ledgers, place = np.unique(ledger_ids, return_inverse=True)
    entries = np.array([last.get(ledger, -1) for ledger in ledgers.tolist()], np.int64)
    may: BoolArray = (int64(rows, "entry_id") > entries[place]) & (ledger_ids < FIRST_IMPORTED_LEDGER)
    return may


def read_delivered(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    durable: Mapping[str, Position],
    memberships: Memberships,
    on_progress: OnProgress,
) -> Delivered:
    """Reads the table `deliveries`; the arguments are those of `Delivered`."""
    delivered = Delivered(names, durable, memberships)
    n = 0
    for rows in tables.stream(_DELIVERIES):
        delivered.add(rows)
        n += rows.num_rows
        on_progress("deliveries", "rows read", n)
    return delivered
