"""How much of what is parked for a slow destination it is given next."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_MESSAGES = 100
_MOST_MESSAGES = 20_000
_SECONDS = 5.0  # a slow destination is given as much at a time as it took before in so long


@dataclass
class Drain:
    """The rounds in which a slow destination gets what is parked for it.

    Attributes:
        round: the number of the last round that was asked for; 0: none was.
        most: the most messages of that round.
        is_answered: whether an offset has had that round.
        n: the number of messages of the last round that was answered.
        others_wait: whether others waited after it.
    """

    round: int = 0
    most: int = _FIRST_MESSAGES
    is_answered: bool = True
    n: int = 0
    others_wait: bool = True
    _seconds: float = 0.0  # that the last parts took
    _kept_up_since: float = 0.0  # monotonic; 0: it does not keep up

    def note_sent(self, messages: int, seconds: float) -> None:
        """Notes how long the destination took for some messages."""
        self._seconds = seconds
        fitting = int(_SECONDS * messages / max(seconds, 0.1))
        self.most = min(max(fitting, _FIRST_MESSAGES), _MOST_MESSAGES)

    def ask(self, number: int) -> None:
        """Begins the next round."""
        self.round, self.is_answered = number, False

    def note_answer(self, n: int, others_wait: bool) -> None:
        """Notes that a tick has dispatched the messages of the last round."""
        self.is_answered, self.n, self.others_wait = True, n, others_wait

    def is_over(self, fast_seconds: float, seconds: float, now: float) -> bool:
        """Whether the destination has kept up for a while: each round had all that waited, and it took that in no time.

        So it does where nothing may go out, because what waits is parked for another reason, too. Called when all
        that was dispatched has arrived.

        Args:
            fast_seconds: it may take so long for a round.
            seconds: for so long it has to have kept up.
            now: the time, seconds, monotonic.
        """
        if not self.is_answered or not self.round:
            return False
        if self.n and (self.others_wait or self._seconds > fast_seconds):
            self._kept_up_since = 0.0
            return False
        self._kept_up_since = self._kept_up_since or now
        return now - self._kept_up_since >= seconds
