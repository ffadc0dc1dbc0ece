"""Divides the messages of a plan into producer batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.release.naming import BATCH_MESSAGES, OWN_BYTES
from streaming.release.task.planning.send_plan import PlannedSend
from streaming.release.task.shared_paces import RateLimit

BATCH_BYTES = 100_000  # the most bytes of a producer batch; a larger message is sent alone


def may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """Whether a message may be in a producer batch: it is small and has no key.

    A consumer of type Key_Shared gets whole batches, so messages with a key must not be in one.
    """
    has_key = columns["key"][row] is not None or columns["ordering_key"][row] is not None
    return not has_key and columns["ordering_key_bytes"][row] is None and size_of(columns, row) < BATCH_BYTES


def size_of(columns: dict[str, list[Any]], row: int) -> int:
    """Returns the approximate number of bytes of a row's message."""
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def cut_batches(
    sends: list[PlannedSend],
    columns: dict[str, list[Any]],
    batch_millis: int,
    limits: Mapping[tuple[str, str | None], RateLimit],
) -> None:
    """Puts messages that are due within the same `batch_millis` into a batch, which is sent when the last one is due.

    Messages that were held back are all due now; for them the earlier time counts. A batch has no more messages than
    the burst of their rate.

    The broker remembers only the first sequence id of a batch. So the ends of batches must follow from the release
    alone: then a release that is sent again has the same batches, and the broker has each of them wholly or not at all.

    Args:
        sends: the messages of a release, in order; the batched ones are changed.
        columns: of the release's rows, by name.
        batch_millis: the time that a batch spans, ms.
        limits: the rates, by source topic and subscription.
    """
    batches: dict[tuple[str, str], list[PlannedSend]] = {}
    sizes: dict[tuple[str, str], int] = {}

    def end(batch: list[PlannedSend]) -> None:
        for send in batch:
            send.at, send.first_id, send.is_last = batch[-1].due, batch[0].sequence_id, send is batch[-1]
            send.was_at, send.n_places = batch[-1].was_at, len(batch)

    for send in sends:
        if not send.is_batched:
            continue
        key, size = (send.topic, send.producer), size_of(columns, send.row)
        batch = batches.setdefault(key, [])
        limit = limits.get((columns["topic"][send.row], send.subscription))
        if batch and (
            send.due // batch_millis != batch[0].due // batch_millis
            or send.was_at // batch_millis != batch[0].was_at // batch_millis
            or len(batch) == (BATCH_MESSAGES if limit is None else min(BATCH_MESSAGES, limit.burst))
            or sizes[key] + size > BATCH_BYTES
        ):
            end(batch)
            batch.clear()
        if not batch:
            sizes[key] = 0
        batch.append(send)
        sizes[key] += size
    for batch in batches.values():
        end(batch)
