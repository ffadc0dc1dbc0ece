"""Handles messages that Pulsar itself delays: their times, and early acknowledgements.

Only the broker's admin API shows these times, and which entries a subscription has acknowledged one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.entries.continuity import Gap
from broker.position import Position
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from streaming.source.watch.native_delays import OWN_TIME
from tracker.messages import int64, with_columns
from tracker.properties.schedule import MAX_TIME_MILLIS, TOO_FAR

_ASKED_AT_ONCE = 8


def with_native_times(messages: pa.Table, admin: AdminClient, partition: str, max_delay_millis: int) -> pa.Table:
    """Gives messages without a time in their properties the time at which Pulsar would deliver them.

    It asks the broker for each such entry, which takes a millisecond or so. Messages of producer batches have no such
    time, because clients do not batch delayed messages.

    Args:
        messages: of a topic partition, with their positions there, as MESSAGES.
        admin: asks the broker.
        partition: the name of the topic partition.
        max_delay_millis: the longest delay of a message, ms; 0: any.

    Returns:
        the same rows in the same order, some with another `deliver_at`, or with a `reason`.

    Raises:
        PulsarError: the broker does not answer.
    """
    is_alone = (int64(messages, "batch_index") < 0) & ~np.asarray(pc.is_valid(messages["reason"]))
    properties = messages["properties"].to_pylist()
    rows = [i for i in np.flatnonzero(is_alone).tolist() if OWN_TIME.isdisjoint(name for name, _ in properties[i])]
    if not rows:
        return messages
    ledgers, entries = int64(messages, "ledger_id").tolist(), int64(messages, "entry_id").tolist()

    def ask(row: int) -> int | str | None:
        try:
            entry = admin.entry_metadata(partition, ledgers[row], entries[row])
        except UnreadableEntryError:
            return "the broker does not tell when it is due, as of a message with many properties"
        return None if entry is None else entry.deliver_at

    due, reasons = messages["deliver_at"].to_pylist(), messages["reason"].to_pylist()
    published = messages["publish_time"].to_pylist()
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        for row, answer in zip(rows, pool.map(ask, rows), strict=True):
            if isinstance(answer, str):
                reasons[row] = answer
            elif answer is not None and answer > MAX_TIME_MILLIS:
                reasons[row] = "its native deliverAt is beyond the year 9999"
            elif answer is not None and 0 < max_delay_millis < answer - published[row]:
                reasons[row] = TOO_FAR.format(max_delay_millis)
            elif answer is not None:
                due[row] = answer
    return with_columns(messages, deliver_at=pa.array(due, pa.int64()), reason=pa.array(reasons, pa.string()))


def not_acknowledged(gaps: Iterable[Gap], acknowledged: list[tuple[Position, Position]]) -> Iterator[Gap]:
    """Yields gaps without the entries that the subscription has acknowledged one by one.

    Args:
        gaps: of a topic partition.
        acknowledged: ranges of these entries, ascending: (position before the first entry, position of the last).
    """
    for gap in gaps:
        after = gap.after
        for before_first, last in acknowledged:
            if last > after and before_first < gap.before:
                if before_first > after:
                    yield Gap(after, before_first.next)
                after = last
        if after == gap.after:
            yield gap
        elif after < gap.before:
            yield Gap(after, gap.before)
