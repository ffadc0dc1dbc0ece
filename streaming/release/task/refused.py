"""Rejects messages that the client does not take: sends them to rejects topics, and reports them to the driver."""

from __future__ import annotations

import logging
from typing import Any

import pulsar
import pyarrow as pa

from broker.client import close_quietly
from conf.settings import Settings, rejects_topic
from streaming.release import outgoing
from streaming.release.naming import PRODUCER_OPTIONS, max_size_bytes
from streaming.release.task import process_clients
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from tracker.commands.holding.giving_up import NOT_DELIVERED, NOT_TAKEN
from tracker.messages import MESSAGES, concat, typed, with_columns
from tracker.packing import pack

_log = logging.getLogger(__name__)

_REJECT_MILLIS = 5_000  # how long a message for a rejects topic may take

Refused = tuple[PlannedSend, Plan, str]  # a message, its plan, and why the client does not take it


def send_to_rejects_topics(settings: Settings, messages: list[Refused]) -> None:
    """Sends messages that the client does not take to rejects topics; after a failure only `rejects` has them."""
    producers: dict[tuple[str, str], Any] = {}
    try:
        for send, plan, why in sorted(messages, key=lambda message: message[0].sequence_id):
            key = (rejects_topic(plan.columns["topic"][send.row]), f"{send.producer}-refused")
            if key not in producers:
                options = PRODUCER_OPTIONS | {"send_timeout_millis": _REJECT_MILLIS}
                producers[key] = process_clients.pulsar_client(settings).create_producer(
                    key[0], producer_name=key[1], batching_enabled=False, **options
                )
            reasons: list[Any] = [_reason(send, why)] * (send.row + 1)
            # max_size=0 leaves out payload and keys, because the message is beyond the broker's limit.
            topic = plan.columns["topic"][send.row]
            max_size = 0 if why.startswith(pulsar.MessageTooBig.__name__) else max_size_bytes(settings, topic)
            message = outgoing.rejected({**plan.columns, "reason": reasons}, send.row, send.sequence_id, max_size)
            producers[key]._producer.send_async(message, None)
        for producer in producers.values():
            producer.flush()
    except pulsar.PulsarException as error:
        _log.warning("what the client does not take did not reach the rejects topic: %s", error)
    finally:
        for producer in producers.values():
            close_quietly(producer)


def packed_by_release(messages: list[Refused]) -> dict[tuple[int, int], bytes]:
    """Packs messages that the client does not take, each with the reason, by release (tick, kind)."""
    of_release: dict[tuple[int, int], list[Refused]] = {}
    for message in messages:
        of_release.setdefault((message[1].tick, message[1].kind), []).append(message)
    return {release: _packed(some) for release, some in of_release.items()}


def _packed(messages: list[Refused]) -> bytes:
    rows = concat([typed(plan.rows.slice(send.row, 1), MESSAGES) for send, plan, _ in messages])
    names = [send.subscription for send, *_ in messages]
    reasons = [_reason(send, why) for send, _, why in messages]
    return pack(with_columns(rows, subscription=pa.array(names, pa.string()), reason=pa.array(reasons, pa.string())))


def _reason(send: PlannedSend, why: str) -> str:
    return f"{NOT_DELIVERED}{send.subscription}{NOT_TAKEN}{why}"
