"""How many messages the broker may send to a consumer: a budget in bytes, told in messages, as the protocol has it."""

from __future__ import annotations

from broker.protocol.byte_budget import Share

# Before any message has come, its size is unknown: so many permits at most, and one for so many bytes of the budget.
_FIRST_PERMITS = 16
_FIRST_BYTES = 1 << 20
_MOST_PERMITS = 2**31 - 1  # of one command
_READ_ENTRIES = 100  # the broker sends so many entries for any number of permits that is not smaller


class FlowControl:
    """Counts permits of one consumer, as the broker does.

    The broker takes one permit for each message of an entry. It sends an entry for each permit, up to a hundred at a
    time, while it has any. So its number falls below zero where entries are batches: what it owes has to be granted,
    too, before it sends again.

    A consumer with a share of a budget has as many permits as its entries fit into its own bytes. Where an entry does
    not, it is large: it comes alone, and in its turn. A permit can't be taken back, and the protocol does not bound
    what comes for it. So permits are few before it is known how large messages are, and a topic that has no more gets
    its next permit without a turn, if its share has nothing of the pool: what comes then counts when it has come.

    Args:
        max_bytes: about so many bytes may be on their way or wait with the consumer.
        max_messages: so many messages may.
        share: of a budget that others share; None: the consumer has `max_bytes` for itself.
        largest: the bytes of the largest entry that there can be.
    """

    def __init__(self, max_bytes: int, max_messages: int, share: Share | None = None, largest: int = 0) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._share = share
        self._open = 0  # permits that the broker has; below 0: it has sent more than that
        self._n_came = 0  # messages that have come
        self._mean = 0.0  # bytes of a message, of late; 0: none has come
        self._entry = 0.0 if share is None else share.entry_bytes or largest  # bytes of an entry, of late
        self._is_asking = True
        self._has_ended = False
        self.waiting_messages = 0
        self.waiting_bytes = 0

    @property
    def has_permits(self) -> bool:
        """Whether the broker may send something."""
        return self._open > 0

    @property
    def wants_turn(self) -> bool:
        """Whether the next entry is large, and the broker has no permit for it."""
        if self._share is None or self._open > 0 or self.waiting_bytes or not self._is_large:
            return False
        return self._is_asking and not self._share.turn and not self._share.is_waiting

    @property
    def has_reserved(self) -> bool:
        """Whether room is reserved for what has not come: for a large entry, or for small ones beyond its own bytes.

        Its own bytes may have become fewer since it reserved them, because others have joined.
        """
        if self._share is None or self._open <= 0:
            return False
        free = 0 if self._is_large else self._share.own_bytes
        return self._share.ahead > max(self.waiting_bytes, free)

    @property
    def _is_large(self) -> bool:
        return self._entry > self.window

    @property
    def window(self) -> int:
        """The bytes of small entries that it may have ahead."""
        return self._max_bytes if self._share is None else min(self._max_bytes, self._share.own_bytes)

    def came(self, n_messages: int, n_bytes: int) -> None:
        """Notes an entry from the broker, with as many messages as it takes permits for."""
        self._open = _as_counted(self._open - n_messages)
        self.waiting_messages += n_messages
        self.waiting_bytes += n_bytes
        mean = n_bytes / max(n_messages, 1)
        # A large one counts at once, small ones bit by bit: a backlog of both must not pile up.
        self._entry = max(n_bytes, 0.9 * self._entry + 0.1 * n_bytes) if self._n_came else n_bytes
        self._mean = max(mean, 0.9 * self._mean + 0.1 * mean)
        self._n_came += max(n_messages, 1)
        if self._share is not None and self.waiting_bytes > self._share.ahead:
            self._share.note(ahead=self.waiting_bytes)

    def taken(self, n_messages: int, n_bytes: int) -> None:
        """Notes that the consumer has handed an entry over."""
        self.waiting_messages -= n_messages
        self.waiting_bytes -= n_bytes
        if self._share is not None and not self._has_ended:
            left = max(self._share.ahead - n_bytes, self.waiting_bytes) if self._open > 0 else self.waiting_bytes
            self._share.note(ahead=left, handed=self._share.handed + n_bytes)

    def grant(self, is_at_end: bool = False) -> int:
        """Returns how many permits the broker gets now; 0: none, because few are free, or there is no turn yet.

        Args:
            is_at_end: the topic has no entry that is still to come.
        """
        window = self.window
        if not self._is_asking:
            return 0
        if self._share is not None and self._is_large:
            most = 0 if self.waiting_bytes else 1
            ahead = 0 if is_at_end and not self._share.pooled else int(self._entry)
        else:
            most, ahead = self._fitting(window), window
        permits = most - self._open
        if most <= 0 or permits <= 0 or (permits < most // 2 and self._open > 0):
            if self._share is not None and self._share.turn:
                self._share.give_up_turn()
            return 0  # a command for many permits is cheaper than many commands
        if self._share is not None and ahead:
            least = 0 if self._is_large else self.waiting_bytes + int(self._entry)
            reserved = self._share.reserve(ahead, least)
            if not reserved:
                return 0
            if reserved < ahead:
                permits = max(self._fitting(reserved) - self._open, 0)
        permits = min(permits, _MOST_PERMITS)  # what is missing then comes with the next grant
        self._open = _as_counted(self._open + permits)
        return permits

    def stop_asking(self) -> None:
        """Notes that nothing more comes."""
        self._is_asking, self._open = False, 0
        if self._share is not None and not self._has_ended:
            self._share.give_up_turn()
            self._share.note(ahead=self.waiting_bytes)

    def unreserve(self) -> None:
        """Ends the reservation of what does not come; the permit stays."""
        if self._share is not None:
            self._share.note(ahead=self.waiting_bytes)

    def end(self) -> None:
        """Notes that nothing more comes, and nobody takes what waits. Its share is for the next consumer."""
        self.waiting_messages = self.waiting_bytes = 0
        self.stop_asking()
        if self._share is not None and self._n_came and not self._has_ended:
            self._share.entry_bytes = int(self._entry)
        self._has_ended = True

    @property
    def _first_permits(self) -> int:
        return 1 if self._share is not None else min(_FIRST_PERMITS, max(self._max_bytes // _FIRST_BYTES, 1))

    def _fitting(self, window: int) -> int:
        """Returns for how many messages the broker may have permits, with so many bytes ahead."""
        if not self._mean:
            return min(self._first_permits, self._max_messages)
        room = max(window - self.waiting_bytes, 0)
        most = min(int(room / self._mean), self._max_messages - self.waiting_messages)
        most = min(most, self._first_permits + 2 * self._n_came)
        if window < _READ_ENTRIES * self._entry:
            most = min(most, int(room / self._entry))
        # A message that is larger than the budget comes alone.
        return most if self.waiting_messages else max(most, 1)


def _as_counted(permits: int) -> int:
    """Returns permits as the broker counts them, in 32 bits: a producer may claim any number of messages."""
    return (permits + 2**31) % 2**32 - 2**31
