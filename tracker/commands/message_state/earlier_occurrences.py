"""The occurrences of recurring messages that were done (delivered or skipped), or rescheduled, before a rebuild."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import pyarrow as pa

from tracker.commands.message_state.rebuilt import OCCURRENCES_DONE
from tracker.messages import concat
from tracker.packing import pack, unpack
from tracker.store import Store

_TABLE = "occurrences_done"

# A message of a subscription: subscription number, ledger id, entry id, batch index (0: the entry is one message).
Message = tuple[int, int, int, int]

_T = TypeVar("_T")


class Done(NamedTuple):
    """An occurrence that was done before a rebuild. Times are ms since the epoch."""

    at: int  # the next occurrence is later than this
    sent_at: int | None  # when it was sent; None: not known

    def since(self, now: int) -> tuple[int, int]:
        """Returns the two times by which the following occurrence is computed, ms since the epoch.

        Args:
            now: used instead of `sent_at` if that is not known, ms since the epoch.

        Returns:
            the following occurrence is later than the first time; `misfire` applies to occurrences due by the second.
        """
        return self.at, now if self.sent_at is None else self.sent_at


class EarlierOccurrences:
    """Keeps the occurrences that were done, or rescheduled, before a rebuild, until their messages are past them.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: dict[Message, dict[int, Done]] = {}
        self._rescheduled: dict[Message, dict[int, int]] = {}
        self._is_changed = False
        if data := store.get(_TABLE, (0, 0)):
            self._read(unpack(data))

    def __bool__(self) -> bool:
        return bool(self._done or self._rescheduled)

    def __contains__(self, message: Message) -> bool:
        return message in self._done or message in self._rescheduled

    def done(self, message: Message) -> Mapping[int, Done]:
        """Returns by number the occurrences of a message that were done."""
        return self._done.get(message, {})

    def rescheduled(self, message: Message) -> Mapping[int, int]:
        """Returns by number when the rescheduled occurrences of a message are due, ms since the epoch."""
        return self._rescheduled.get(message, {})

    def forget(self, message: Message, last: int) -> None:
        """Forgets the occurrences of a message up to the number `last`."""
        _forget(self._done, message, last)
        _forget(self._rescheduled, message, last)
        self._is_changed = True

    def rebuild(self, rows: pa.Table) -> None:
        """Restores the state after a rebuild, from OCCURRENCES_DONE."""
        self._read(rows)
        self._is_changed = bool(rows.num_rows)

    def save(self) -> None:
        """Writes the changes to the store."""
        if not self._is_changed:
            return
        rows: list[tuple[int | None, ...]]
        rows = [(*message, n, at, None, sent) for message, of in self._done.items() for n, (at, sent) in of.items()]
        rows += [(*message, n, 0, due, None) for message, of in self._rescheduled.items() for n, due in of.items()]
        if rows:
            columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
            self._store.put(_TABLE, (0, 0), pack(pa.table(columns, names=OCCURRENCES_DONE.names)))
        else:
            self._store.remove(_TABLE, (0, 0))
        self._is_changed = False

    def _read(self, rows: pa.Table) -> None:
        """Reads rows of OCCURRENCES_DONE. Earlier versions did not have all columns."""
        columns = (concat([rows], OCCURRENCES_DONE)[name].to_pylist() for name in OCCURRENCES_DONE.names)
        for subscription, ledger, entry, index, number, at, due, sent_at in zip(*columns, strict=True):
            message = subscription, ledger, entry, max(index, 0)
            if due is None:
                self._done.setdefault(message, {})[number] = Done(at, sent_at)
            else:
                self._rescheduled.setdefault(message, {})[number] = due


def _forget(kept: dict[Message, dict[int, _T]], message: Message, last: int) -> None:
    """Forgets the occurrences of a message up to the number `last`."""
    left = {number: one for number, one in kept.pop(message, {}).items() if number > last}
    if left:
        kept[message] = left
