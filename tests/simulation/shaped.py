"""When messages of a subscription with a rate, or with windows, are sent, by docs/shaping.md alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.simulation.accounts import require


class Rates:
    """The accounts of rates: when each message of a subscription with one was sent.

    Attributes:
        most: by subscription: the most messages in any second, its rate and its burst.
        are_several_machines: whether two have sent: only the tasks of one keep to a rate together.
    """

    def __init__(self) -> None:
        self.most: Mapping[str, int] = {}
        self.are_several_machines = False
        self._sent: dict[str, list[int]] = defaultdict(list)  # by subscription: ascending; producers resend late

    def arrived(self, name: str, sent_at: int) -> None:
        """A message has come to a destination.

        Args:
            name: of the subscription.
            sent_at: its publish time, ms since the epoch.
        """
        if name not in self.most or self.are_several_machines:
            return
        sent, most = self._sent[name], self.most[name]
        at = bisect_left(sent, sent_at)
        sent.insert(at, sent_at)
        for i in range(max(0, at - most), min(at + 1, len(sent) - most)):
            seconds = (sent[i + most] - sent[i]) / 1_000
            require(seconds >= 1, f"{name} has got {most + 1} messages that were sent within {seconds} s")


class Windows:
    """The accounts of windows: whether each message of a subscription with some was sent while one was open.

    Attributes:
        open: by subscription: when it is open, as (from, to), minutes of the day in UTC.
    """

    def __init__(self) -> None:
        self.open: Mapping[str, Sequence[tuple[int, int]]] = {}

    def arrived(self, name: str, place: int, sent_at: int, known_at: int) -> None:
        """A message has come to a destination: what was on its way when the window closed may be late.

        Args:
            name: of the subscription.
            place: when the message was due by its `delaylake.deliverAt`, ms since the epoch.
            sent_at: its publish time, likewise.
            known_at: before then the service could not have it on its way, likewise.
        """
        if name not in self.open or self._closed_at(name, sent_at) is None:
            return
        what = f"{name} has got a message, of {place}, at {sent_at}"
        # What comes due late goes at once where a window is open then, and may still be on its way when it closes.
        was_open = self._closed_at(name, place) != self._closed_at(name, sent_at)
        require(was_open, f"{what}: no window is open at either time, nor between them")
        is_late = self._closed_at(name, sent_at) == self._closed_at(name, known_at)
        require(not is_late, f"{what}: it was published when the window had closed")

    def _closed_at(self, name: str, at: int) -> int | None:
        """Returns since when no window is open at a time, ms since the epoch; None: one is open."""
        minute = at // 60_000 % (24 * 60)
        if any(start <= minute < end for start, end in self.open[name]):
            return None
        ended = max((end for _, end in self.open[name] if end <= minute), default=0)
        return (at // 60_000 - minute + ended) * 60_000
