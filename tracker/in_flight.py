"""Releases that have been dispatched and not yet confirmed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.messages import MESSAGES, Int64Array, concat, int64, is_rejected, where, with_columns
from tracker.store import Store, get_rows, put_rows
from tracker.subscriptions import DEFAULT_BACKOFF, by_topic, dead_letter_masks, dead_letters_of

SENDING = "sending"  # key of a release's schema metadata: how it is to be sent

# Column of a release from which rows have been removed: the index that each row had before, int64.
PLACE = "place"

# The kind of a release is a sum of these.
PLANNED = 1  # its messages waited in the tracker; without this they came on short notice, and are sent at once
IN_ORDER = 2  # its messages have order keys, and are for subscriptions with `order: key`

# By release (tick, kind) and topic: the subscriptions at which it has not arrived, as bits; REJECTED is one. Under the
# key `dead_letters_of(topic)`: the subscriptions whose dead letters have not arrived.
OpenReleases = Mapping[tuple[int, int], Mapping[str, int]]

REJECTED = -(1 << 63)  # the bit that stands for the topic for rejects

# Column of a release: the subscriptions of its topic to which a row goes, as bits.
SUBSCRIPTION_MASK = "subscription_mask"
_STORED_MASK = "wants"  # the column's name in the store

_HANDED_OUT = MESSAGES.append(pa.field(SUBSCRIPTION_MASK, pa.int64()))

_TABLE = "in_flight"
_LIST = "in_flight_list"


@dataclass(frozen=True)
class Release:
    """Messages of one kind that one shard dispatches in one tick, to be sent at their time.

    Attributes:
        tick: the tick's number.
        kind: a sum of PLANNED and IN_ORDER.
        rows: MESSAGES in the order of sending, and `subscription_mask`, int64: bit i is set if the message goes to
            its topic's subscription of number i. A row's sequence id is made of the tick and the row's index, or of the
            column `place` if there is one. The schema's metadata under SENDING says how the rows are sent, so that they
            are sent again the same way after the settings have changed.
    """

    tick: int
    kind: int
    rows: pa.Table


class InFlight:
    """Keeps releases until they are confirmed, so that a new run of the job can hand them out again, unchanged.

    A release that is confirmed, but has not arrived at some destinations, is open: its messages for these are kept.

    Args:
        store: where the releases are kept.
        names: by topic: the names of its subscriptions, by number.
    """

    def __init__(self, store: Store, names: Mapping[str, Sequence[str]] | None = None) -> None:
        self._names = names or {}
        self._store = store
        self._saved = store.get(_LIST, (0, 0))
        self._releases = [_StoredRelease(*stored) for stored in json.loads(self._saved)] if self._saved else []

    def __len__(self) -> int:
        """The number of rows of releases that are not confirmed."""
        return sum(stored.rows for stored in self._releases if stored.open is None)

    @property
    def open(self) -> int:
        """The number of rows of open releases."""
        return sum(stored.rows for stored in self._releases if stored.open is not None)

    def add_release(self, release: Release) -> None:
        """Keeps a release until it is confirmed."""
        stored = _StoredRelease(release.tick, release.kind, release.rows.num_rows)
        self._put(stored, release.rows)
        self._releases.append(stored)

    def confirm_releases(self, tick: int, open_releases: OpenReleases | None = None) -> list[Release]:
        """Forgets the releases of a tick and of earlier ones, except rows that have not arrived at some destination.

        Args:
            tick: number of the last tick that is confirmed.
            open_releases: the subscriptions at which releases have not arrived; also of releases confirmed before.

        Returns:
            the open rows of the releases that this call confirms. `subscription_mask` has only the open bits, and
            `place`, int64, is each row's index in the original release.
        """
        opened: list[Release] = []
        kept: list[_StoredRelease] = []
        for stored in self._releases:
            wanted = dict((open_releases or {}).get((stored.tick, stored.kind), {}))
            if stored.tick > tick or (wanted and stored.open == wanted):
                kept.append(stored)
                continue
            rows = self._open_rows(self._get(stored), wanted) if wanted else None
            if rows is None or not rows.num_rows:
                self._store.remove(_TABLE, stored.key)
                continue
            self._put(stored, rows)
            kept.append(_StoredRelease(stored.tick, stored.kind, rows.num_rows, wanted))
            if stored.open is None:
                opened.append(Release(stored.tick, stored.kind, rows))
        self._releases = kept
        return opened

    def take_given_up(self, given_up: OpenReleases) -> pa.Table:
        """Removes messages that are given up from releases, confirmed or not; the others keep their sequence ids.

        Args:
            given_up: the subscriptions to which messages of releases are not sent any more.

        Returns:
            the removed messages, as MESSAGES and `subscription_mask`, int64: the bits that are given up.
        """
        taken: list[pa.Table] = []
        for i, stored in enumerate(self._releases):
            mask = given_up.get((stored.tick, stored.kind))
            if not mask:
                continue
            rows = self._get(stored)
            taken.append(self._open_rows(rows, mask).drop_columns([PLACE]))
            topics = rows["topic"].unique().to_pylist()
            others = {name: ~mask.get(name, 0) for topic in topics for name in (topic, dead_letters_of(topic))}
            left = self._open_rows(rows, others)
            self._put(stored, left)
            is_open = stored.open and {topic: bits & ~mask.get(topic, 0) for topic, bits in stored.open.items()}
            self._releases[i] = _StoredRelease(stored.tick, stored.kind, left.num_rows, is_open)
        return concat(taken, _HANDED_OUT)

    def all_releases(self) -> list[Release]:
        """Returns the releases that are not confirmed, or are open, and have rows left, oldest first."""
        return [Release(stored.tick, stored.kind, self._get(stored)) for stored in self._releases if stored.rows]

    def _get(self, stored: _StoredRelease) -> pa.Table:
        return _renamed(get_rows(self._store, _TABLE, stored.key), _STORED_MASK, SUBSCRIPTION_MASK)

    def _put(self, stored: _StoredRelease, rows: pa.Table) -> None:
        put_rows(self._store, _TABLE, stored.key, _renamed(rows, SUBSCRIPTION_MASK, _STORED_MASK))

    def _open_rows(self, rows: pa.Table, wanted: Mapping[str, int]) -> pa.Table:
        """Returns the rows of a release for some subscriptions, with the column `place`.

        Args:
            rows: as `Release.rows`.
            wanted: these subscriptions, as a value of OpenReleases; with REJECTED also rejected rows.
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
        """Returns the subscriptions to which rows of a release went as dead letters, as bits, int64, (rows,)."""
        sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
        limits = sending.get("attempts", {})

        def most_retries(number: int, topic: str) -> int:
            name = self._names[topic][number] if number < len(self._names.get(topic, ())) else ""
            most: int = limits.get(topic, {}).get(name, DEFAULT_BACKOFF.attempts)
            return most

        return dead_letter_masks(rows, max(map(len, self._names.values()), default=0), most_retries)

    def save(self) -> None:
        """Writes the changes to the store."""
        releases = [list(stored) if stored.open is not None else list(stored)[:3] for stored in self._releases]
        data = json.dumps(releases, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_LIST, (0, 0), data)
            self._saved = data


class _StoredRelease(NamedTuple):
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
