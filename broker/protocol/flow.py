"""How many messages the broker may send to consumers: budgets in bytes, told in messages, as the protocol has it."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Before any message has come, its size is unknown: so many permits at most, and one for so many bytes of the budget.
_FIRST_PERMITS = 16
_FIRST_BYTES = 1 << 20
_UNKNOWN_BYTES = 256 << 10  # an entry counts for so many bytes until one has come
_MOST_PERMITS = 2**31 - 1  # of one command


class _Turns:
    """Turns of consumers, each with its bytes, as long as there is room; the others wait, in order. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._taken: dict[FlowControl, int] = {}  # the bytes of each turn
        self._bytes = 0
        self._waiting: dict[FlowControl, int] = {}  # those that want a turn, in order, and its bytes

    def take(self, flow: FlowControl, n_bytes: int) -> bool:
        """Takes a turn, if there is room and nobody waits for longer; returns whether it has one. Else it waits."""
        with self._lock:
            if flow in self._taken:
                return True
            if next(iter(self._waiting), flow) is flow and self._has_room(n_bytes):
                self._waiting.pop(flow, None)
                self._set(flow, n_bytes)
                return True
            self._waiting[flow] = n_bytes  # one that waits already keeps its place
            return False

    def set(self, flow: FlowControl, n_bytes: int) -> bool:
        """Gives a turn other bytes, or to a consumer that has none; 0 ends it. Returns whether there is more room."""
        if not n_bytes and flow not in self._taken:
            return False
        with self._lock:
            before = self._bytes
            self._set(flow, n_bytes)
            return self._bytes < before

    def has(self, flow: FlowControl) -> bool:
        """Whether a consumer has a turn."""
        return flow in self._taken

    def want_none(self, flow: FlowControl) -> None:
        """Lets a consumer wait no more."""
        if flow in self._waiting:
            with self._lock:
                self._waiting.pop(flow, None)

    def wake(self) -> None:
        """Lets those take their turns for which there is room now."""
        while True:
            with self._lock:
                first = next(iter(self._waiting), None)
                if first is None or not self._has_room(self._waiting[first]):
                    return
            first.wake()
            with self._lock:
                if next(iter(self._waiting), None) is first:
                    return

    def _has_room(self, n_bytes: int) -> bool:
        return not self._taken or self._bytes + n_bytes <= self._max_bytes

    def _set(self, flow: FlowControl, n_bytes: int) -> None:
        self._bytes += n_bytes - self._taken.pop(flow, 0)
        if n_bytes:
            self._taken[flow] = n_bytes


class FetchBudget:
    """The bytes that some consumers together may have on their way, and waiting. Thread-safe.

    Each has a share. A consumer whose entries are larger than that has a turn for one entry, with its bytes, as long as
    there is room for it; then it waits behind the others that want a turn. Those with small entries wait for nobody.
    While the size of a consumer's entries is unknown, it has a turn for its first one.

    A permit can't be taken back, nor does the protocol bound the entry that it brings. So a consumer to which nothing
    comes keeps its permit, and its turn ends. What comes then counts as soon as it has come.

    Args:
        max_bytes: of all shares together; of all turns together, too, as far as can be foreseen.
        most_each: the most bytes of a share; None: any.
    """

    def __init__(self, max_bytes: int, most_each: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._most_each = max_bytes if most_each is None else most_each
        self._lock = threading.Lock()
        self._n = 0
        self.turns = _Turns(max_bytes)

    @property
    def share(self) -> int:
        """The bytes that each consumer may have without a turn."""
        return max(1, min(self._most_each, self.max_bytes // max(self._n, 1)))

    def join(self, n: int = 1) -> None:
        """Counts so many consumers more."""
        with self._lock:
            self._n += n

    def wake(self) -> None:
        """Lets those take their turns for which there is room now. The caller has no lock of a consumer."""
        self.turns.wake()


class FlowControl:
    """Counts permits of one consumer, as the broker does. One thread at a time may use it.

    The broker takes one permit for each message of an entry, but sends an entry for each permit that it has. So its
    number falls below zero where entries are batches: what it owes has to be granted, too, before it sends again.

    Args:
        budget: the bytes that may be on their way or wait with the consumer, and with others.
        max_messages: so many messages may.
        wake: called in any thread when it may have its turn: `grant` may return permits now.
    """

    def __init__(self, budget: FetchBudget, max_messages: int, wake: Callable[[], None] = lambda: None) -> None:
        self._budget = budget
        self._max_messages = max_messages
        self.wake = wake
        self._open = 0  # permits that the broker has; below 0: it has sent more than that
        self._mean = 0.0  # bytes of an entry, of late; 0: none has come
        self.waiting_messages = 0
        self.waiting_bytes = 0
        budget.join()

    @property
    def waits_for_turn(self) -> bool:
        """Whether it has a turn, and nothing has come yet."""
        return not self.waiting_bytes and self._budget.turns.has(self)

    def came(self, n_messages: int, n_bytes: int) -> bool:
        """Notes an entry from the broker, with as many messages as it takes permits for.

        Returns:
            whether others may have their turns now: call `FetchBudget.wake` then.
        """
        self._open = _as_counted(self._open - n_messages)
        self.waiting_messages += n_messages
        self.waiting_bytes += n_bytes
        # A large entry counts at once, small ones bit by bit: a backlog of both must not pile up.
        self._mean = max(n_bytes, 0.9 * self._mean + 0.1 * n_bytes)
        return self._charge()

    def taken(self, n_messages: int, n_bytes: int) -> bool:
        """Notes that the consumer has handed entries over, and nobody holds them back; returns the same as `came`."""
        self.waiting_messages -= n_messages
        self.waiting_bytes -= n_bytes
        return self._charge()

    def pass_turn(self) -> None:
        """Ends a turn in which nothing comes; call `FetchBudget.wake` then."""
        self._budget.turns.set(self, 0)

    def leave(self) -> None:
        """Ends its part in the budget; call `FetchBudget.wake` then."""
        self._budget.join(-1)
        self._budget.turns.want_none(self)
        self._budget.turns.set(self, 0)

    def _charge(self) -> bool:
        return self._budget.turns.set(self, self.waiting_bytes if self.waiting_bytes > self._budget.share else 0)

    def grant(self) -> int:
        """Returns how many permits the broker gets now; 0: none, because few are free."""
        share, entry = self._budget.share, self._mean or _UNKNOWN_BYTES
        if entry > share:
            if self.waiting_bytes or self._open > 0 or not self._budget.turns.take(self, int(entry)):
                return 0
            most = 1
        elif not self._mean:
            self._budget.turns.want_none(self)
            most = min(_FIRST_PERMITS, max(share // _FIRST_BYTES, 1), self._max_messages)
        else:
            self._budget.turns.want_none(self)
            room = max(share - self.waiting_bytes, 0)
            most = min(int(room / self._mean), self._max_messages - self.waiting_messages)
            if not self.waiting_messages:
                most = max(most, 1)
        permits = min(most - self._open, _MOST_PERMITS)  # what is missing then comes with the next grant
        if most <= 0 or permits <= 0 or (permits < most // 2 and self._open > 0):
            return 0  # a command for many permits is cheaper than many commands
        self._open = _as_counted(self._open + permits)
        return permits


def _as_counted(permits: int) -> int:
    """Returns permits as the broker counts them, in 32 bits: a producer may claim any number of messages."""
    return (permits + 2**31) % 2**32 - 2**31
