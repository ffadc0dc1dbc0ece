"""Finds messages in several chunks that are not whole yet: their first chunks must not be acknowledged."""

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

# The client gives up a message whose chunks do not come within a minute: it acknowledges the ones it has.
_INCOMPLETE_SECONDS = 90.0
_MAX_QUESTIONS = 100  # entries that the broker is asked about for one acknowledgement
_ASKED_AT_ONCE = 8

Gaps = Sequence[tuple[Position, Position]]  # each as the entries before and after it, ascending


class ChunkedMessages:
    """Says how far a topic partition may be acknowledged.

    The client hands over a message when its last chunk has come, and that chunk's entry is its position. If the first
    chunk had been acknowledged by then, a restart would find no whole message. The client does not tell what has come
    of messages that are not whole; but their chunks are entries that are missing between those of other messages.

    Args:
        topic: the topic partition's name.
        broker: is asked about entries in gaps.
        clock: a monotonic one, seconds.
    """

    def __init__(self, topic: str, broker: TopicQuestions, clock: Callable[[], float] = time.monotonic) -> None:
        self._topic = topic
        self._broker = broker
        self._clock = clock
        self._lock = threading.Lock()
        self._whole: dict[Position, Position] = {}  # by first chunk the last one
        self._begun: dict[Position, tuple[Position, float]] = {}  # by first chunk the entry before, and since when
        self._examined = START

    def add(self, first: Position, last: Position) -> None:
        """Notes the first and last chunk of a message that has come whole."""
        with self._lock:
            self._whole[first] = last

    def limit(self, last: Position, gaps: Gaps) -> Position:
        """Returns the last entry, up to a given one, that may be acknowledged.

        Args:
            last: the entry up to which everything is durable.
            gaps: the places beyond the last acknowledged entry where entries up to `last` have not come.

        Raises:
            PulsarError: the broker does not say what is in a gap.
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
        """Finds first chunks in gaps up to an entry; returns the entry up to which it has looked."""
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
    """Yields (the entry before the gap, entry) for the entries in gaps after one and up to another that the broker has.

    Args:
        ledgers: how many entries each ledger has.
    """
    for before, behind in gaps:
        first, end = max(before, after).next, min(behind, last.next)
        for ledger, entries in sorted(ledgers.items()):
            if first.ledger_id <= ledger <= end.ledger_id:
                start = first.entry_id if ledger == first.ledger_id else 0
                stop = end.entry_id if ledger == end.ledger_id else entries
                yield from ((before, Position(ledger, entry)) for entry in range(start, stop))
