"""Finds incomplete chunked messages, whose first chunks must not be acknowledged."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from broker.position import START, Position
from broker.pulsar_admin.topic_questions import TopicQuestions

_log = logging.getLogger(__name__)

# The client gives up a message whose chunks do not come within a minute, and acknowledges the chunks that it has.
_INCOMPLETE_SECONDS = 90.0
_MAX_QUESTIONS = 2_000  # the most entries to ask the broker about for one acknowledgement
_ASKED_AT_ONCE = 8

Gaps = Sequence[tuple[Position, Position]]  # (entry before, entry after) of each gap, ascending


class ChunkedMessages:
    """Says up to which entry a topic partition may be acknowledged.

    The client hands over a chunked message when its last chunk has come; the position of the message is that of its
    last chunk. If the first chunk were acknowledged before, a restart would not get the whole message. The client does
    not show incomplete messages, but their chunks are gaps between the entries of other messages.

    Args:
        topic: the topic partition's name.
        broker: says which entries in gaps are first chunks.
        clock: a monotonic one, seconds.
    """

    def __init__(self, topic: str, broker: TopicQuestions, clock: Callable[[], float] = time.monotonic) -> None:
        self._topic = topic
        self._broker = broker
        self._clock = clock
        self._lock = threading.Lock()
        self._whole: dict[Position, Position] = {}  # the last chunk of each whole message, by its first
        # (entry before, when it was found) of each incomplete message, by its first chunk.
        self._begun: dict[Position, tuple[Position, float]] = {}
        self._examined = START

    def add(self, first: Position, last: Position) -> None:
        """Notes the first and the last chunk of a whole message."""
        with self._lock:
            self._whole[first] = last

    def limit(self, last: Position, gaps: Gaps) -> Position:
        """Returns the last entry that may be acknowledged, `last` or one before it.

        Args:
            last: all entries up to this one are durable.
            gaps: after the last acknowledged entry, up to `last`.

        Raises:
            PulsarError: the broker does not answer a question for an entry in a gap.
        """
        last = self._examine(last, gaps)
        allowed = last
        with self._lock:
            self._whole = {f: end for f, end in self._whole.items() if end > last or f in self._begun}
            for first, (before, since) in list(self._begun.items()):
                end = self._whole.get(first)
                if end is not None and end <= last:
                    del self._begun[first], self._whole[first]
                elif end is None and self._clock() - since > _INCOMPLETE_SECONDS:
                    _log.warning(
                        "%s: of what may be a chunked message that begins with %s not all came", self._topic, first
                    )
                    del self._begun[first]
                else:
                    allowed = min(allowed, before)
        return allowed

    def _examine(self, last: Position, gaps: Gaps) -> Position:
        """Looks for first chunks in gaps up to an entry; returns the last entry that it has looked at."""
        gaps = [gap for gap in gaps if gap[1] > self._examined]
        if gaps:
            cursor = self._broker.cursor(self._topic)
            missing = _missing(gaps, max(self._examined, cursor.acknowledged), last, cursor.ledgers)
            asked = list(islice(missing, _MAX_QUESTIONS))
            with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
                firsts = pool.map(lambda place: self._broker.is_first_chunk(self._topic, place[1]), asked)
                for (before, entry), is_first in zip(asked, firsts, strict=True):
                    if is_first:
                        with self._lock:
                            self._begun.setdefault(entry, (before, self._clock()))
                    self._examined = entry
            if next(missing, None) is not None:
                return self._examined
        self._examined = max(self._examined, last)
        return last


def _missing(
    gaps: Gaps, after: Position, last: Position, ledgers: Mapping[int, int]
) -> Iterator[tuple[Position, Position]]:
    """Yields (entry before the gap, missing entry) for the entries that the broker has between two others.

    Args:
        gaps: where entries are missing.
        after: missing entries up to this one are passed over.
        last: the last missing entry to yield.
        ledgers: the number of entries of each ledger.
    """
    for before, behind in gaps:
        first, end = max(before, after).next, min(behind, last.next)
        for ledger, entries in sorted(ledgers.items()):
            if first.ledger_id <= ledger <= end.ledger_id:
                start = first.entry_id if ledger == first.ledger_id else 0
                stop = end.entry_id if ledger == end.ledger_id else entries
                yield from ((before, Position(ledger, entry)) for entry in range(start, stop))
