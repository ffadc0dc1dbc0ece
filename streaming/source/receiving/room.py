"""How much all receivers together may keep: the room that they share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

_MOST_OWN_BYTES = 1 << 20
_OWN_PART = 4  # all that receivers may keep in any case is so small a part of the room


@dataclass(eq=False)
class _Ticket:
    """A receiver's place among those that wait for room."""

    n_bytes: int
    has_room: threading.Event = field(default_factory=threading.Event)


class Room:
    """The bytes of messages that have come in and that Spark has not committed, of all receivers. Thread-safe.

    Each receiver may keep a little in any case, so that one with small messages waits for no other. Beyond that they
    have their turns, in the order in which they wait: a large message gets its room, however many small ones come.

    Args:
        max_bytes: of all receivers together. A message that is larger than what is left beside what each may keep in
            any case comes when nothing else is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, int] = {}
        self._taken: dict[str, int] = {}  # for what is not kept yet
        self._total = 0
        self._tickets: dict[str, _Ticket] = {}  # of those that wait, in order, and of those that have their room now

    @property
    def total_bytes(self) -> int:
        """What all receivers keep, and have taken room for."""
        return self._total

    def take(self, name: str, n_bytes: int, timeout_seconds: float = 0) -> bool:
        """Takes room for a receiver; waits for its turn if need be.

        Returns:
            whether it has the room; if not, it keeps its place among those that wait.
        """
        with self._lock:
            ticket = self._tickets.get(name)
            if ticket is None:
                if self._is_own(name, n_bytes) or (not self._is_awaited() and self._fits(n_bytes)):
                    self._add(name, n_bytes)
                    return True
                ticket = self._tickets[name] = _Ticket(n_bytes)
                self._serve()
        if not ticket.has_room.wait(timeout_seconds):
            return False
        with self._lock:
            self._tickets.pop(name, None)
        return True

    def note(self, name: str, n_bytes: int, is_all: bool = False) -> None:
        """Notes how many bytes a receiver keeps now.

        Args:
            name: of the receiver.
            n_bytes: what it keeps.
            is_all: what it has taken room for is among that, or was dropped.
        """
        with self._lock:
            self._total += n_bytes - self._kept.get(name, 0)
            self._kept[name] = n_bytes
            if is_all:
                ticket = self._tickets.get(name)
                left = ticket.n_bytes if ticket is not None and ticket.has_room.is_set() else 0
                self._total += left - self._taken.get(name, 0)
                self._taken[name] = left
            self._serve()

    def leave(self, name: str) -> None:
        """Ends a receiver's part in the room."""
        with self._lock:
            ticket = self._tickets.pop(name, None)
            if ticket is not None:
                ticket.has_room.set()
            self._total -= self._kept.pop(name, 0) + self._taken.pop(name, 0)
            self._serve()

    def _is_awaited(self) -> bool:
        return any(not ticket.has_room.is_set() for ticket in self._tickets.values())

    def _is_own(self, name: str, n_bytes: int) -> bool:
        own = min(_MOST_OWN_BYTES, self._max_bytes // _OWN_PART // max(len(self._kept), 1))
        return self._kept.get(name, 0) + self._taken.get(name, 0) + n_bytes <= own

    def _fits(self, n_bytes: int) -> bool:
        return self._total + n_bytes <= self._max_bytes or self._total <= self._max_bytes // _OWN_PART

    def _add(self, name: str, n_bytes: int) -> None:
        self._taken[name] = self._taken.get(name, 0) + n_bytes
        self._kept.setdefault(name, 0)
        self._total += n_bytes

    def _serve(self) -> None:
        """Gives those their room that wait for it, as far as there is any."""
        for name, ticket in self._tickets.items():
            if ticket.has_room.is_set():
                continue
            if not self._fits(ticket.n_bytes):
                return
            self._add(name, ticket.n_bytes)
            ticket.has_room.set()
