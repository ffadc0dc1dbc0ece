"""What the schedule's histogram shows: a window of time that fits what is due, and the counts of its bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.settings import Settings
from tracker.messages import Int64Array, int64
from warehouse.queries.listing import PendingFilter
from warehouse.queries.waiting import Pending

# The lengths of windows, ms, by the names on the page.
SPANS = {
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 7 * 86_400_000,
    "month": 30 * 86_400_000,
    "year": 366 * 86_400_000,
}
FIT = "most"  # a window that has nearly all that is due
ALL = "all"  # one that has all of it

_MOST = 0.95  # of the messages that are due: the last ones may be far away
_MINUTE = 60_000
_BARS = 100  # at most, but for the last one
_SHORT = 30 * _MINUTE  # a window of this length or less has bars of less than a minute

# Lengths of bars, ms: each divides a later one, minute or day.
_WIDTHS = (
    *(1_000, 2_000, 5_000, 10_000, 30_000),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *(n * 86_400_000 for n in (1, 2, 7, 14, 28)),
)


@dataclass(frozen=True)
class Histogram:
    """Messages that are due, by time.

    Attributes:
        version: of the delayed index.
        as_of: when it was asked for, ms since the epoch.
        width: length of a bar, ms.
        subscriptions: their names.
        starts: of the bars, ms since the epoch, (bars,), without gaps.
        counts: (bars, subscriptions).
        n_before: messages that are due, and not delivered: they are going out.
        n_after: messages that are due later than the window; None: not counted. A message counts for each of its
            subscriptions.
    """

    version: int
    as_of: int
    width: int
    subscriptions: list[str]
    starts: Int64Array
    counts: Int64Array
    n_before: int
    n_after: int | None


def histogram(
    settings: Settings, topic: str, subscription: str | None, span: str, start: int | None, end: int | None
) -> Histogram:
    """Counts the messages of a window of time.

    Args:
        subscription: None: all of the topic's.
        span: a name of SPANS, FIT or ALL: how long the window is.
        start: its beginning, ms since the epoch; None: now, without what is due before.
        end: its end, whatever `span` says; None: as that says.

    Raises:
        PendingError: the tables can't be asked.
    """
    asked = PendingFilter(subscription=subscription, due_from=start)
    now = Pending(settings, topic, asked).as_of

    def question(due_from: int | None = start, due_before: int | None = None) -> Pending:
        if due_from is not None and start is not None:
            due_from = max(due_from, start)
        times = {"due_from": due_from, "due_before": due_before}
        return Pending(settings, topic, asked.model_copy(update=times), now=now)

    begin = now if start is None else start
    n_after = None
    if end is None and span in SPANS:
        end = begin + SPANS[span]
    if end is None:
        end, n_after = _window(question, begin, _MOST if span == FIT else 1.0)
    width = width_for(end - begin)
    until = question(due_before=end)
    # Of what is due in the minute that has begun, all counts as due in it.
    first = begin // min(width, _MINUTE) * min(width, _MINUTE)
    at, counts = _columns(until.histogram(width, first))
    starts = np.arange(begin // width * width, end, width, dtype=np.int64)
    placed = np.zeros((len(starts), counts.shape[1]), np.int64)
    np.add.at(placed, (at[at >= first] - starts[0]) // width, counts[at >= first])
    return Histogram(
        version=until.version,
        as_of=until.as_of,
        width=width,
        subscriptions=[s.name for s in until.subscriptions],
        starts=starts,
        counts=placed,
        n_before=int(counts[at < first].sum()),
        n_after=n_after,
    )


def _window(question: Callable[..., Pending], begin: int, part: float) -> tuple[int, int]:
    """Finds the minute by which a part of what is due after `begin` is due: a month, then a day, and then a minute.

    Most of what is due is counted by statistics as long as the spans are long.

    Args:
        question: makes one about what is due from `due_from` to before `due_before`.
        part: 0 to 1.

    Returns:
        the minute's end, ms since the epoch, and how many messages are due after it, each counted for each of its
        subscriptions; where nothing is due, a day and 0.
    """
    start, before, after = begin // _MINUTE * _MINUTE, 0, 0
    end: int | None = None
    total: int | None = None
    for width in (_WIDTHS[-1], SPANS["day"], _MINUTE):
        at, counts = _columns(question(due_from=start, due_before=end).histogram(width, start))
        if not len(at):
            break  # nothing is due, or not any more
        reached = before + np.cumsum(counts.sum(axis=1))
        total = int(reached[-1]) if total is None else total
        place = min(int(np.searchsorted(reached, total * part)), len(at) - 1)
        before, after = int(reached[place] - counts[place].sum()), total - int(reached[place])
        start, end = int(at[place]), int(at[place]) // width * width + width
    return begin + SPANS["day"] if end is None else end, after


def width_for(length: int) -> int:
    """Returns the length of a bar for a window of a length: at most _BARS bars, and whole minutes in longer windows."""
    least = 0 if length <= _SHORT else _MINUTE
    longest = _WIDTHS[-1]
    whole = -(-length // (_BARS * longest)) * longest
    return next((width for width in _WIDTHS if width >= least and length <= width * _BARS), whole)


def _columns(rows: pa.Table) -> tuple[Int64Array, Int64Array]:
    """The times of a histogram, (rows,), and its counts, (rows, subscriptions)."""
    counts = [int64(rows, name) for name in rows.column_names if name != "at"]
    return int64(rows, "at"), np.stack(counts, axis=1)
