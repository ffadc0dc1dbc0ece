"""The schedule page's histogram: a window of time that fits the messages that are due, and the counts of its bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.settings import Settings
from tracker.messages import Int64Array, int64
from warehouse.queries.listing import PendingFilter
from warehouse.queries.pending_messages import Pending

# The lengths of windows, ms, by the names on the page.
SPANS = {
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 7 * 86_400_000,
    "month": 30 * 86_400_000,
    "year": 366 * 86_400_000,
}
FIT = "most"  # a window with nearly all messages
ALL = "all"  # a window with all messages
_MOST = 0.95  # the share of messages in a window FIT: the last ones may be far away
_MINUTE = 60_000
_BARS = 100  # the maximum number of bars, but for the last one
_SHORT = 30 * _MINUTE  # a window of this length or less may have bars of less than a minute
# Lengths of bars, ms.
_WIDTHS = (
    *(1_000, 2_000, 5_000, 10_000, 30_000),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720)),
    *(n * 86_400_000 for n in (1, 2, 7, 14, 28)),
)


@dataclass(frozen=True)
class Histogram:
    """Numbers of pending messages by time; a message counts for each of its subscriptions.

    Attributes:
        version: version of the delayed index.
        as_of: when the histogram was made, ms since the epoch.
        width: length of a bar, ms.
        subscriptions: names of the subscriptions.
        starts: starts of the bars, ms since the epoch, int64, (bars,), without gaps.
        counts: numbers of messages, int64, (bars, subscriptions).
        n_before: the number of messages that are due before the first bar, and not delivered yet.
        n_after: the number of messages that are due after the window; None: not counted.
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
        topic: the source topic.
        subscription: the subscription; None: all of the topic's.
        span: the window's length: a name in SPANS, FIT or ALL.
        start: the window's beginning, ms since the epoch; None: now.
        end: the window's end, ms since the epoch, instead of `span`; None: by `span`.

    Raises:
        PendingError: the messages can't be counted, as `Pending` says.
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
    # The first bar has all messages of the minute (or of a shorter bar) that has begun.
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
    """Finds the minute by which a share of the messages due after `begin` is due.

    It looks for the span of four weeks, then for the day, then for the minute: in long spans most messages are counted
    by statistics.

    Args:
        question: makes a listing of messages due in [due_from, due_before).
        begin: the window's beginning, ms since the epoch.
        part: the share, 0 to 1.

    Returns:
        the minute's end, ms since the epoch, and the number of messages due after it; a day after `begin` and 0 if
        nothing is due.
    """
    start, before, after = begin // _MINUTE * _MINUTE, 0, 0
    end: int | None = None
    total: int | None = None
    for width in (_WIDTHS[-1], SPANS["day"], _MINUTE):
        at, counts = _columns(question(due_from=start, due_before=end).histogram(width, start))
        if not len(at):
            break  # no messages are due, or not any more
        reached = before + np.cumsum(counts.sum(axis=1))
        total = int(reached[-1]) if total is None else total
        place = min(int(np.searchsorted(reached, total * part)), len(at) - 1)
        before, after = int(reached[place] - counts[place].sum()), total - int(reached[place])
        start, end = int(at[place]), int(at[place]) // width * width + width
    return begin + SPANS["day"] if end is None else end, after


def width_for(length: int) -> int:
    """Returns the length of a bar, in ms, for a window's length, in ms: so that there are at most _BARS bars."""
    least = 0 if length <= _SHORT else _MINUTE
    longest = _WIDTHS[-1]
    whole = -(-length // (_BARS * longest)) * longest
    return next((width for width in _WIDTHS if width >= least and length <= width * _BARS), whole)


def _columns(rows: pa.Table) -> tuple[Int64Array, Int64Array]:
    """Returns a histogram's times, int64, (rows,), and counts, int64, (rows, subscriptions)."""
    counts = [int64(rows, name) for name in rows.column_names if name != "at"]
    return int64(rows, "at"), np.stack(counts, axis=1)
