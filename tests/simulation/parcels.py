"""The account of messages of a source topic that admins change (`source_topics.py`).

By docs/guarantees.md what the job has read is delivered, whatever becomes of the topic: "Never lost". What is skipped
or gone before the job has read it is named in `rejects`, once: "Nothing is skipped in silence". With a topic that is
deleted what the job had not read is gone; nobody names that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.simulation.accounts import Accounts, require
from tests.simulation.expected import entry_of

TOPIC = "persistent://public/default/parcels"
SUBSCRIPTION = "p"

_COUNTED = re.compile(r"not seen: (up to )?([\d,]+) messages by their indexes")


class Parcels:
    """The account of what is gone from the topic before the job had it. All else of its messages is in the others.

    Args:
        are_durable: whether an entry is in `entries` for good.
        accounts: of all messages.
    """

    def __init__(self, are_durable: Callable[[str], bool], accounts: Accounts) -> None:
        self._is_durable, self._accounts = are_durable, accounts
        self._positions: dict[str, list[str]] = defaultdict(list)  # by entry
        self._topics: list[list[str]] = [[]]  # entries of each topic of this name: it is deleted, and made again
        self._lost_by: dict[str, str] = {}  # what has taken an entry before any table had it for good, as `_CHANGES`
        self._read: set[str] = set()  # entries that the checkpoint has
        self._nameless: set[str] = set()  # their topic was deleted, or the job had not connected to it
        self._named: dict[str, str] = {}  # reasons by entry
        self._named_before: dict[str, str] = {}  # those when the checkpoint was last rebuilt
        self.n_rebuilds = 0
        self.n_lost: Counter[str] = Counter()

    def sent(self, position: str) -> None:
        """A message is in the topic."""
        entry = entry_of(position)
        if entry not in self._positions:
            self._topics[-1].append(entry)
        self._positions[entry].append(position)

    def taken(self, entries: Iterable[str], by: str, is_nameless: bool) -> None:
        """Entries are gone, or are not sent any more: the job has them already, or they are lost."""
        gone = {entry for entry in entries if entry in self._positions and not self._is_durable(entry)}
        self._lost_by = dict.fromkeys(sorted(gone), by) | self._lost_by
        # Of a topic of which the job has read nothing it may not know the beginning: it was killed before its first
        # offset. Of one that was made again it seems that indexes have gone on.
        is_unknown = not any(map(self._is_known, self._topics[-1]))
        if is_nameless or is_unknown:
            self._nameless |= gone

    def read(self, entries: Iterable[str]) -> None:
        """The checkpoint has these entries: whatever becomes of the topic, they come, unless it is lost before."""
        self._read.update(entries)

    def forget_read(self) -> None:
        """The checkpoint, with what it had read and no table has for good, is lost."""
        self._read = set(filter(self._is_durable, self._read))

    def deleted(self, entries: Iterable[str], n_acknowledged: int) -> None:
        """A topic with these entries is deleted: nobody can name any more what is not named of it."""
        entries = list(entries)
        self.taken(entries[n_acknowledged:], "deleted", is_nameless=True)
        self._nameless |= self._lost_by.keys() & {*entries}
        self._topics.append([])

    def rebuilt(self) -> None:
        """The checkpoint was rebuilt: of the topic the job knows what the tables have, and goes on after that."""
        self.n_rebuilds += 1
        self._named_before = {**self._named}
        self.forget_read()
        for entries in self._topics:
            first = min(map(_numbers, filter(self._is_durable, entries)), default=None)
            before = {one for one in entries if first is None or _numbers(one) < first}
            self._nameless |= self._lost_by.keys() & before

    def _is_known(self, entry: str) -> bool:
        """Whether the job has read an entry, and knows of it."""
        return entry in self._read or self._is_durable(entry)

    @property
    def n_named(self) -> int:
        """The number of rows of `rejects` that name what the job has not seen."""
        return len(self._named)

    def may_be_lost(self, entry: str) -> bool:
        """Whether the messages of an entry may not come."""
        return entry in self._lost_by and not self._is_known(entry)

    def recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of `rejects` are in the table for good: each names an entry that the job has not seen."""
        for row in rows:
            entry, reason = entry_of(row["position"]), row["reason"]
            require(reason.startswith("not seen"), f"{entry} is rejected: {reason}")
            require(entry not in self._named, f"{entry} is in `rejects` twice")
            self._named[entry] = reason
            if not _COUNTED.match(reason):
                require(self.may_be_lost(entry), f"{entry} is named, and nobody has skipped it: {reason}")

    def replaced(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """A rebuild has written `rejects` anew: it has these rows."""
        named = [(entry_of(row["position"]), row["reason"]) for row in rows]
        self._named = dict(named)
        require(len(named) == len(self._named), "a rebuild leaves entries in `rejects` twice")

    def check_end(self) -> None:
        """What was taken before the job had it is named, or counted; nothing else is."""
        self.n_lost.clear()
        n_not_named = n_may_be_counted = 0
        for position, entry in [(one, entry) for entry, positions in self._positions.items() for one in positions]:
            is_named = entry in self._named and not _COUNTED.match(self._named[entry])
            has_come, may_be_lost = (
                bool(self._accounts.accounts[position, SUBSCRIPTION].came_at),
                self.may_be_lost(entry),
            )
            # After a rebuild what was not durable is read again, and may be gone meanwhile.
            may_be_missed = may_be_lost and (not has_come or self.n_rebuilds > 0)
            require(may_be_missed or not is_named, f"{position} is named as not seen")
            # A rebuild does not know how many messages the entries had that are named.
            n_may_be_counted += may_be_missed and (not is_named or entry in self._named_before)
            if may_be_lost and not has_come:
                self.n_lost[self._lost_by[entry]] += 1
                n_not_named += not is_named and entry not in self._nameless
        counted, before = _counted(self._named), _counted(self._named_before)
        n_counted = sum(map(_number, counted))
        require(n_not_named <= n_counted, f"{n_not_named} messages are lost, and {n_counted} of them named")
        n_may_be_counted += sum(map(_number, before))  # nor which ones were counted
        n_sure = sum(_number(one) for one in counted if not one[1])
        require(n_sure <= n_may_be_counted, f"{n_may_be_counted} messages may be lost, and {n_sure} are counted")


def _counted(named: Mapping[str, str]) -> list[re.Match[str]]:
    return [found for reason in named.values() if (found := _COUNTED.match(reason))]


def _number(counted: re.Match[str]) -> int:
    return int(counted[2].replace(",", ""))


def _numbers(entry: str) -> list[int]:
    return [int(number) for number in entry.split(":")]
