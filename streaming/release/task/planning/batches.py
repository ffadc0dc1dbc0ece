"""Which messages of a plan go together as one producer batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.release.naming import BATCH_MESSAGES, OWN_BYTES
from streaming.release.task.planning.send_plan import PlannedSend
from streaming.release.task.shared_paces import RateLimit

BATCH_BYTES = 100_000  # the most bytes of a producer batch; a message of so many goes alone


def may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """Whether a message may be in a batch: no large one, and none with a key.

    A consumer of type Key_Shared gets whole batches, whatever their messages' keys.
    """
    has_key = columns["key"][row] is not None or columns["ordering_key"][row] is not None
    return not has_key and columns["ordering_key_bytes"][row] is None and size_of(columns, row) < BATCH_BYTES


def size_of(columns: dict[str, list[Any]], row: int) -> int:
    """Returns how many bytes a row's message has, about."""
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def cut_batches(
    sends: list[PlannedSend],
    columns: dict[str, list[Any]],
    batch_millis: int,
    limits: Mapping[tuple[str, str | None], RateLimit],
) -> None:
    """Puts messages that are due within the same few milliseconds into a batch, which goes when the last one is due.

    For messages that were held back, and are all due now, it is when they were due before that counts. A batch has no
    more messages than the burst of their rate.

    The broker remembers of a batch only its first sequence id. So where one ends must follow from the release alone:
    then a release that is sent again has the same batches, and each of them is there wholly or not at all.
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
