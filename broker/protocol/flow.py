"""How many messages the broker may send to a consumer: a budget in bytes, told in messages, as the protocol has it."""

from __future__ import annotations

# Before any message has come, its size is unknown: so many permits at most, and one for so many bytes of the budget.
_FIRST_PERMITS = 16
_FIRST_BYTES = 1 << 20
_MOST_PERMITS = 2**31 - 1  # of one command


class FlowControl:
    """Counts permits of one consumer, as the broker does.

    The broker takes one permit for each message of an entry. While it has a permit it sends up to a hundred entries, so
    its number falls below zero: what it owes has to be granted, too, before it sends again.

    Args:
        max_bytes: about so many bytes may be on their way or wait with the consumer.
        max_messages: so many messages may.
    """

    def __init__(self, max_bytes: int, max_messages: int) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._open = 0  # permits that the broker has; below 0: it has sent more than that
        self._mean = 0.0  # bytes of a message, of late; 0: none has come
        self.waiting_messages = 0
        self.waiting_bytes = 0

    def came(self, n_messages: int, n_bytes: int) -> None:
        """Notes an entry from the broker, with as many messages as it takes permits for."""
        self._open = _as_counted(self._open - n_messages)
        self.waiting_messages += n_messages
        self.waiting_bytes += n_bytes
        mean = n_bytes / max(n_messages, 1)
        # A large message counts at once, small ones bit by bit: a backlog of both must not pile up.
        self._mean = max(mean, 0.9 * self._mean + 0.1 * mean)

    def taken(self, n_messages: int, n_bytes: int) -> None:
        """Notes that the consumer has handed an entry over."""
        self.waiting_messages -= n_messages
        self.waiting_bytes -= n_bytes

    def grant(self) -> int:
        """Returns how many permits the broker gets now; 0: none, because few are free."""
        if not self._mean:
            most = min(_FIRST_PERMITS, max(self._max_bytes // _FIRST_BYTES, 1), self._max_messages)
        else:
            room = max(self._max_bytes - self.waiting_bytes, 0)
            most = min(int(room / self._mean), self._max_messages - self.waiting_messages)
            if not self.waiting_messages:
                most = max(most, 1)  # a message that is larger than the budget comes alone
        permits = min(most - self._open, _MOST_PERMITS)  # what is missing then comes with the next grant
        if most <= 0 or permits <= 0 or (permits < most // 2 and self._open > 0):
            return 0  # a command for many permits is cheaper than many commands
        self._open = _as_counted(self._open + permits)
        return permits


def _as_counted(permits: int) -> int:
    """Returns permits as the broker counts them, in 32 bits: a producer may claim any number of messages."""
    return (permits + 2**31) % 2**32 - 2**31
