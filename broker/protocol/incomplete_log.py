"""Names chunked messages of which not all came in the log, without a flood of lines: anybody may send such chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from broker.protocol.chunks import Incomplete

_log = logging.getLogger(__name__)

NAMED = 20  # messages named in each span; of the others one line has the number
SPAN_SECONDS = 60.0


class IncompleteLog:
    """The log lines of one topic partition.

    Args:
        topic: its name.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._span_ends = 0.0  # seconds, of the caller's clock
        self._n = 0  # messages in this span

    def note(self, messages: Iterable[Incomplete], seconds: float) -> None:
        """Names messages; called again and again, also without any.

        Args:
            messages: those that were given up.
            seconds: now, of a clock that never jumps.
        """
        if seconds >= self._span_ends and self._n:
            if self._n > NAMED:
                _log.warning("%s: of %d more chunked messages not all came", self._topic, self._n - NAMED)
            self._n = 0
        for message in messages:
            if not self._n:
                self._span_ends = seconds + SPAN_SECONDS
            self._n += 1
            if self._n <= NAMED:
                why = "%s: of a chunked message that begins with %s not all came: %s"
                _log.warning(why, self._topic, message.first, message.reason)
