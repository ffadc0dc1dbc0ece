"""The occurrences of recurring messages that were done, or rescheduled, before a rebuild."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import pyarrow as pa

from tracker.commands.message_state.rebuilt import OCCURRENCES_DONE
from tracker.messages import concat
from tracker.packing import pack, unpack
from tracker.store import Store

_TABLE = "occurrences_done"

# The number of a subscription, ledger, entry, number in the entry.
Message = tuple[int, int, int, int]

_T = TypeVar("_T")


class Done(NamedTuple):
    """An occurrence that was done before a rebuild. Times are ms since the epoch."""

    at: int  # the next occurrence is later than this
    sent_at: int | None  # None: not known

    def since(self, now: int) -> tuple[int, int]:
        """Returns the times, ms since the epoch, from which the following one is computed.

        Args:
            now: ms since the epoch, which counts where it is not known when this one was sent.

        Returns:
            what follows is later than the first one; what was missed by the second one is as `misfire` says.
        """
        return self.at, now if self.sent_at is None else self.sent_at


class EarlierOccurrences:
    """The occurrences that were done, or rescheduled, before a rebuild, and are still to be passed.

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
        """Returns a message's occurrences that were done, by number."""
        return self._done.get(message, {})

    def rescheduled(self, message: Message) -> Mapping[int, int]:
        """Returns a message's occurrences that were rescheduled: by number when they are due, ms since the epoch."""
        return self._rescheduled.get(message, {})

    def forget(self, message: Message, last: int) -> None:
        """Forgets a message's occurrences up to one."""
        _forget(self._done, message, last)
        _forget(self._rescheduled, message, last)
        self._is_changed = True

    def rebuild(self, rows: pa.Table) -> None:
        """Takes over what was done before a rebuild: see `OCCURRENCES_DONE`."""
        self._read(rows)
        self._is_changed = bool(rows.num_rows)

    def save(self) -> None:
        """Writes what is not in the store yet."""
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
        """Takes rows over, as OCCURRENCES_DONE, of which earlier versions did not have all columns."""
        columns = (concat([rows], OCCURRENCES_DONE)[name].to_pylist() for name in OCCURRENCES_DONE.names)
        for subscription, ledger, entry, index, number, at, due, sent_at in zip(*columns, strict=True):
            message = subscription, ledger, entry, max(index, 0)
            if due is None:
                self._done.setdefault(message, {})[number] = Done(at, sent_at)
            else:
                self._rescheduled.setdefault(message, {})[number] = due


def _forget(kept: dict[Message, dict[int, _T]], message: Message, last: int) -> None:
    """Forgets the occurrences of a message up to one."""
    left = {number: one for number, one in kept.pop(message, {}).items() if number > last}
    if left:
        kept[message] = left
