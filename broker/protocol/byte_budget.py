"""The bytes that many consumers may hold together, with a turn for each whose entries are large."""

from __future__ import annotations

import threading
from collections.abc import Callable

_SMALL_PART = 4  # of the pool such a part is for small entries alone


class ByteBudget:
    """Bytes of entries, from the moment when the broker may send them until nobody needs them. Thread-safe.

    Each consumer's share has a few bytes of its own, for which it waits for nobody. What a share holds beyond these is
    taken from a pool that all have in common, in turns: who waits for longest comes first, however much it wants. A
    quarter of the pool is for small entries, of which many fit into a share's own bytes: these wait for no large one.

    All together hold at most `max_bytes` and their own bytes. Beyond that is what can't wait: what a hurried share
    reserves, an entry larger than the pool, which comes when no other large one has anything of it, and what a share
    notes without having reserved it, because it is there already.

    Args:
        max_bytes: the pool.
        own_bytes: what all shares have as their own, together.
        most_own_bytes: the most that each has.

    Attributes:
        share_bytes: what each has as its own.
        n_turns: how many turns have been given to those that had to wait.
    """

    def __init__(self, max_bytes: int, own_bytes: int, most_own_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._own_bytes = own_bytes
        self._most_own_bytes = most_own_bytes
        self._lock = threading.Lock()
        self._shares: set[Share] = set()
        self._pooled = 0  # what all shares hold beyond their own bytes
        self._pooled_small = 0  # of that by shares with small entries
        self._waiting: dict[Share, int] = {}  # the bytes that each wants to have ahead, in the order of their turns
        self._served: list[Share] = []  # those whose turn has come, and who do not know it yet
        self.share_bytes = most_own_bytes
        self.n_turns = 0

    @property
    def held_bytes(self) -> int:
        """What all shares hold."""
        with self._lock:
            return sum(share.held_bytes for share in self._shares)

    def join(self) -> Share:
        """Returns a share for one more consumer."""
        with self._lock:
            share = Share(self)
            self._shares.add(share)
            self._divide()
            return share

    def wake(self) -> None:
        """Tells those whose turn has come. The caller has no lock that they take in `Share.on_turn`."""
        if self._served:
            with self._lock:
                served, self._served = self._served, []
            for share in served:
                share.on_turn()

    def _divide(self) -> None:
        """Divides the own bytes among all shares: by a power of two, so that it changes seldom."""
        parts = 1 << max(0, len(self._shares) - 1).bit_length()
        share_bytes = max(1, min(self._most_own_bytes, self._own_bytes // parts))
        if share_bytes != self.share_bytes:
            self.share_bytes = share_bytes
            for share in self._shares:
                self._count(share)
        self._serve()

    def _count(self, share: Share) -> None:
        """Counts anew what a share holds beyond its own bytes."""
        pooled = max(0, share.held_bytes - self.share_bytes)
        small = pooled if share.is_small else 0
        self._pooled += pooled - share.pooled
        self._pooled_small += small - share.pooled_small
        share.pooled, share.pooled_small = pooled, small

    def _fits(self, share: Share, ahead: int) -> bool:
        """Whether a share may have so many bytes ahead."""
        pooled = share.kept + share.handed + ahead - self.share_bytes
        others = self._pooled - share.pooled
        for_small = 0 if share.is_small else self._max_bytes // _SMALL_PART
        is_alone = others <= for_small and not share.pooled
        return share.is_hurried or pooled <= 0 or others + pooled <= self._max_bytes - for_small or is_alone

    def _is_next(self, share: Share) -> bool:
        """Whether a share need not wait for others that wait."""
        is_for_small = share.is_small and self._pooled_small <= self._max_bytes // _SMALL_PART
        return share.is_hurried or is_for_small or not self._waiting

    def _serve(self) -> None:
        """Gives turns to the first that wait, as long as there is room for them."""
        while self._waiting:
            share, ahead = next(iter(self._waiting.items()))
            if not self._fits(share, ahead):
                return
            self._give_turn(share)

    def _give_turn(self, share: Share) -> None:
        share.turn = self._waiting.pop(share)
        self.n_turns += 1
        self._served.append(share)
        self._count(share)


class Share:
    """What one consumer holds of a budget. Its methods may be called in any thread.

    Attributes:
        ahead: bytes that the broker may send, or that wait for the consumer's `receive`.
        handed: bytes that were handed over, and of which nobody has noted yet what is kept of them.
        kept: bytes that are kept of them.
        turn: bytes that it may have ahead now, and has not reserved yet.
        is_small: its entries are small.
        pooled: what it holds beyond its own bytes.
        pooled_small: the same, if its entries are small.
        is_hurried: everybody waits for it, so it has its turn at once.
        entry_bytes: of an entry, as its last consumer knew it; 0: none has come.
        on_turn: called when its turn has come, in any thread.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.ahead = self.handed = self.kept = self.turn = self.pooled = self.pooled_small = 0
        self.is_hurried = False
        self.is_small = False
        self.entry_bytes = 0
        self.on_turn: Callable[[], None] = _nothing
        self._has_left = False

    @property
    def held_bytes(self) -> int:
        """What counts of it."""
        return max(self.ahead, self.turn) + self.handed + self.kept

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its turn."""
        return self in self.budget._waiting

    @property
    def own_bytes(self) -> int:
        """What it may hold without a turn."""
        return self.budget.share_bytes

    def reserve(self, ahead: int, least: int = 0) -> int:
        """Takes room for so many bytes ahead; where there is none it waits for its turn. Call `ByteBudget.wake` then.

        Args:
            ahead: so many bytes.
            least: rather than wait it takes what its own bytes have left, if these are so many; 0: it waits.

        Returns:
            how many bytes it may have ahead now; 0: it waits.
        """
        budget = self.budget
        with budget._lock:
            if self._has_left:
                return 0
            self.is_small = ahead <= self.own_bytes
            own_left = self.own_bytes - self.handed - self.kept
            if not self.turn and ahead > own_left and not (budget._is_next(self) and budget._fits(self, ahead)):
                if not 0 < least <= own_left:
                    budget._waiting[self] = ahead  # one that waits keeps its place
                    return 0
                ahead = own_left
            budget._waiting.pop(self, None)
            self.ahead, self.turn = ahead, 0
            budget._count(self)
            budget._serve()
            return ahead

    def note(self, *, ahead: int | None = None, handed: int | None = None, kept: int | None = None) -> None:
        """Notes what it holds now; call `ByteBudget.wake` then.

        Args:
            ahead, handed, kept: see the attributes; None: as before.
        """
        budget = self.budget
        with budget._lock:
            if self._has_left:
                return
            self.ahead = self.ahead if ahead is None else ahead
            self.handed = self.handed if handed is None else handed
            self.kept = self.kept if kept is None else kept
            budget._count(self)
            wanted = budget._waiting.get(self)
            if wanted is not None and (self._is_own(wanted) or (budget._is_next(self) and budget._fits(self, wanted))):
                budget._give_turn(self)
            budget._serve()

    def give_up_turn(self) -> None:
        """Neither waits for a turn, nor has one that it has not used; call `ByteBudget.wake` then."""
        with self.budget._lock:
            self.budget._waiting.pop(self, None)
            self.turn = 0
            self.budget._count(self)
            self.budget._serve()

    def hurry(self, is_hurried: bool) -> None:
        """Lets it have all that it wants, at once, or no more; call `ByteBudget.wake` then."""
        with self.budget._lock:
            self.is_hurried = is_hurried
            if is_hurried and self in self.budget._waiting:
                self.budget._give_turn(self)

    def leave(self) -> None:
        """Gives everything back, for good; call `ByteBudget.wake` then."""
        with self.budget._lock:
            self._has_left = True
            self.budget._waiting.pop(self, None)
            self.ahead = self.handed = self.kept = self.turn = 0
            self.budget._count(self)
            self.budget._shares.discard(self)
            self.budget._divide()

    def _is_own(self, ahead: int) -> bool:
        """Whether it has room for so many bytes ahead within its own bytes."""
        return ahead + self.handed + self.kept <= self.own_bytes


def _nothing() -> None:
    pass
