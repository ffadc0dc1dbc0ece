"""Divides the messages of a plan into producer batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conf.message_size import BATCH_BYTES
from streaming.release.naming import BATCH_MESSAGES
from streaming.release.task.planning.send_plan import PlannedLine, Sends
from streaming.release.task.shared_paces import RateLimit
from tracker.messages import BoolArray, Int64Array


def cut_batches(
    sends: Sends,
    lines: Sequence[PlannedLine],
    sizes: Int64Array,
    batch_millis: int,
    limits: Sequence[RateLimit | None],
) -> None:
    """Puts messages that are due within the same `batch_millis` into a batch, which is sent when the last one is due.

    Messages that were parked are all due now; for them the earlier time counts. A batch has no more messages than
    the burst of their rate.

    The broker remembers only the first sequence id of a batch. So the ends of batches must follow from the release
    alone: then a release that is sent again has the same batches, and the broker has each of them wholly or not at all.

    Args:
        sends: the messages of a release, in order; the batched ones are changed.
        lines: of these messages.
        sizes: int64, (messages,): about the bytes of each, those of batched ones below BATCH_BYTES.
        batch_millis: the time that a batch spans, ms.
        limits: the rate of each line; None: it has none.
    """
    are_batched = np.array([line.is_batched for line in lines], np.bool_)
    chosen = np.flatnonzero(are_batched[sends.line]) if lines else np.zeros(0, np.int64)
    if not len(chosen):
        return
    chosen = chosen[np.argsort(sends.line[chosen], kind="stable")]
    most = np.array([BATCH_MESSAGES if one is None else min(BATCH_MESSAGES, one.burst) for one in limits], np.int64)
    of_line = sends.line[chosen]
    begins = _changes(of_line, sends.due[chosen] // batch_millis, sends.was_at[chosen] // batch_millis)
    _cut_large(begins, np.cumsum(sizes[chosen]), most[of_line])
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(chosen)))
    last = chosen[np.repeat(first + lengths - 1, lengths)]
    sends.at[chosen], sends.was_at[chosen] = sends.due[last], sends.was_at[last]
    sends.first_id[chosen] = sends.sequence_id[chosen[np.repeat(first, lengths)]]
    sends.is_last[chosen] = chosen == last
    sends.n_places[chosen] = np.repeat(lengths, lengths)


def _changes(*values: Int64Array) -> BoolArray:
    """Tells where the first of equal values is, bool, (messages,)."""
    begins = np.ones(len(values[0]), np.bool_)
    begins[1:] = False
    for one in values:
        begins[1:] |= one[1:] != one[:-1]
    return begins


def _cut_large(begins: BoolArray, ends: Int64Array, most: Int64Array) -> None:
    """Cuts batches that have too many messages or bytes.

    Args:
        begins: bool, (messages,): where a batch begins; changed.
        ends: int64, (messages,): the bytes of the messages up to each, ascending.
        most: int64, (messages,): the most messages of a batch.
    """
    first = np.flatnonzero(begins)
    stop = np.append(first[1:], len(begins))
    before = np.where(first > 0, ends[first - 1], 0)
    is_large = (stop - first > most[first]) | (ends[stop - 1] - before > BATCH_BYTES)
    for begin, end in zip(first[is_large].tolist(), stop[is_large].tolist(), strict=True):
        n = int(most[begin])
        while begin < end:
            begins[begin] = True
            fitting = int(ends[begin - 1] if begin else 0) + BATCH_BYTES
            begin = min(begin + n, int(np.searchsorted(ends, fitting, "right")))
