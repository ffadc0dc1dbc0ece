"""Releases that have been handed out and not yet confirmed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.backoff import DEFAULT_BACKOFF
from tracker.dead_letter_targets import dead_letter_masks, dead_letters_of
from tracker.messages import MESSAGES, Int64Array, concat, int64, is_rejected, where, with_columns
from tracker.packing import pack, unpack
from tracker.store import Store, get_present
from tracker.subscriptions import by_topic

SENDING = "sending"  # key of a release's schema metadata: how it is to be sent

# Column of a release from which rows have been taken out: the place that each had before.
PLACE = "place"

# The kind of a release is a sum of these.
PLANNED = 1  # its messages waited in the tracker; else they came in too late for that, and are sent at once
IN_ORDER = 2  # its messages have keys, and are for subscriptions that get those of a key in order

# By release (tick, kind) and topic the subscriptions at which it has not arrived, as bits; REJECTED is one. Under
# `dead_letters_of` the topic, those whose dead letters have not.
OpenReleases = Mapping[tuple[int, int], Mapping[str, int]]

REJECTED = -(1 << 63)  # the bit of the topic for rejects

# Column of a release: the subscriptions of its topic to which a row goes, as bits.
SUBSCRIPTION_MASK = "subscription_mask"
_STORED_MASK = "wants"  # the column's name in the store

_HANDED_OUT = MESSAGES.append(pa.field(SUBSCRIPTION_MASK, pa.int64()))

_TABLE = "in_flight"
_LIST = "in_flight_list"


@dataclass(frozen=True)
class Release:
    """Messages of one kind that one shard hands out in one tick, to be sent at their time.

    Attributes:
        tick: the tick's number.
        kind: a sum of PLANNED and IN_ORDER.
        rows: MESSAGES in the order of sending, and `subscription_mask`, int64: bit i is set if the message goes to
            its topic's subscription of number i. A row's sequence id is made of the tick and its place in the table, or
            of `place` where there is such a column. The schema's metadata under SENDING says how the rows are sent, so
            that they are sent the same way again after the settings have changed.
    """

    tick: int
    kind: int
    rows: pa.Table


class InFlight:
    """Keeps releases until they are confirmed, so that a new run of the job can hand them out again, unchanged.

    A release that is confirmed, but has not arrived at some destinations, is open: its messages for these are kept.

    Args:
        store: where the releases are kept.
        names: by topic the names of its subscriptions, by number.
    """

    def __init__(self, store: Store, names: Mapping[str, Sequence[str]] | None = None) -> None:
        self._names = names or {}
        self._store = store
        self._saved = store.get(_LIST, (0, 0))
        self._releases = [_Entry(*entry) for entry in json.loads(self._saved)] if self._saved else []

    def __len__(self) -> int:
        """The number of rows of releases that are not confirmed."""
        return sum(entry.rows for entry in self._releases if entry.open is None)

    @property
    def open(self) -> int:
        """The number of rows of open releases."""
        return sum(entry.rows for entry in self._releases if entry.open is not None)

    def add(self, release: Release) -> None:
        """Keeps a release until it is confirmed."""
        entry = _Entry(release.tick, release.kind, release.rows.num_rows)
        self._put(entry, release.rows)
        self._releases.append(entry)

    def confirm(self, tick: int, open_releases: OpenReleases | None = None) -> list[Release]:
        """Forgets the releases of a tick and of earlier ones, except rows that have not arrived at some destination.

        Args:
            tick: number of the last tick that is confirmed.
            open_releases: the subscriptions at which releases have not arrived; also of releases confirmed before.

        Returns:
            the open rows of the releases that this call confirms; `subscription_mask` has only the bits that are
            open, and `place`, int64, is each row's place in the release.
        """
        opened: list[Release] = []
        kept: list[_Entry] = []
        for entry in self._releases:
            wanted = dict((open_releases or {}).get((entry.tick, entry.kind), {}))
            if entry.tick > tick or (wanted and entry.open == wanted):
                kept.append(entry)
                continue
            rows = self._open_rows(self._get(entry), wanted) if wanted else None
            if rows is None or not rows.num_rows:
                self._store.remove(_TABLE, entry.key)
                continue
            self._put(entry, rows)
            kept.append(_Entry(entry.tick, entry.kind, rows.num_rows, wanted))
            if entry.open is None:
                opened.append(Release(entry.tick, entry.kind, rows))
        self._releases = kept
        return opened

    def take_open(self, given_up: OpenReleases) -> pa.Table:
        """Removes messages that will not be sent from releases, confirmed or not; the others keep their places.

        Args:
            given_up: by release and topic the subscriptions to which its messages are not sent any more.

        Returns:
            the messages removed, as MESSAGES and `subscription_mask`, int64: the bits that are given up.
        """
        taken: list[pa.Table] = []
        for i, entry in enumerate(self._releases):
            mask = given_up.get((entry.tick, entry.kind))
            if not mask:
                continue
            rows = self._get(entry)
            taken.append(self._open_rows(rows, mask).drop_columns([PLACE]))
            topics = rows["topic"].unique().to_pylist()
            others = {name: ~mask.get(name, 0) for topic in topics for name in (topic, dead_letters_of(topic))}
            left = self._open_rows(rows, others)
            self._put(entry, left)
            is_open = entry.open and {topic: bits & ~mask.get(topic, 0) for topic, bits in entry.open.items()}
            self._releases[i] = _Entry(entry.tick, entry.kind, left.num_rows, is_open)
        return concat(taken, _HANDED_OUT)

    def all(self) -> list[Release]:
        """Returns the releases that are not confirmed, or are open, oldest first; none that has no rows left."""
        return [Release(entry.tick, entry.kind, self._get(entry)) for entry in self._releases if entry.rows]

    def _get(self, entry: _Entry) -> pa.Table:
        rows = unpack(get_present(self._store, _TABLE, entry.key))
        return _renamed(rows, _STORED_MASK, SUBSCRIPTION_MASK)

    def _put(self, entry: _Entry, rows: pa.Table) -> None:
        self._store.put(_TABLE, entry.key, pack(_renamed(rows, SUBSCRIPTION_MASK, _STORED_MASK)))

    def _open_rows(self, rows: pa.Table, wanted: Mapping[str, int]) -> pa.Table:
        """Returns the rows of a release for some subscriptions. Their places stay: sequence ids are made of them.

        Args:
            rows: as `Release.rows`.
            wanted: as the values of OpenReleases, with REJECTED where rejected rows are wanted.
        """
        if PLACE not in rows.column_names:
            rows = rows.append_column(PLACE, pa.array(np.arange(rows.num_rows)))
        others = by_topic(rows, lambda topic: wanted.get(topic, 0))
        dead = by_topic(rows, lambda topic: wanted.get(dead_letters_of(topic), 0))
        are_dead = self._dead_letters(rows)
        mask, rejected = (others & ~are_dead) | (dead & are_dead), is_rejected(rows)
        left = np.where(rejected, 0, int64(rows, SUBSCRIPTION_MASK) & mask & ~REJECTED)
        return where(with_columns(rows, subscription_mask=pa.array(left)), (left != 0) | (rejected & (mask < 0)))

    def _dead_letters(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions for which rows of a release went out as dead letters, as bits, int64, (rows,)."""
        sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
        limits = sending.get("attempts", {})

        def most_retries(number: int, topic: str) -> int:
            name = self._names[topic][number] if number < len(self._names.get(topic, ())) else ""
            most: int = limits.get(topic, {}).get(name, DEFAULT_BACKOFF.attempts)
            return most

        return dead_letter_masks(rows, max(map(len, self._names.values()), default=0), most_retries)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        entries = [list(entry) if entry.open is not None else list(entry)[:3] for entry in self._releases]
        data = json.dumps(entries, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_LIST, (0, 0), data)
            self._saved = data


class _Entry(NamedTuple):
    tick: int
    kind: int
    rows: int
    open: dict[str, int] | None = None  # by topic, as in OpenReleases; None: the release is not confirmed

    @property
    def key(self) -> tuple[int, int]:
        """The release's key in the store."""
        return self.tick, self.kind


def _renamed(rows: pa.Table, column: str, to: str) -> pa.Table:
    names = [to if name == column else name for name in rows.column_names]
    return rows.rename_columns(names).replace_schema_metadata(rows.schema.metadata)
