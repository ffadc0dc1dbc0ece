"""Rejects messages that can't be sent: sends them to rejects topics, and reports them to the driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from typing import Any

import pyarrow as pa

from broker.client import NoAnswerError, PulsarError
from broker.protocol.building import single_entry
from broker.protocol.producer import EntryProducer
from conf.message_size import max_size_bytes
from conf.settings import Settings, rejects_topic
from streaming.release import outgoing
from streaming.release.task import process_clients
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.producer_line import TOO_LARGE
from tracker.commands.outcomes import NOT_DELIVERED, NOT_TAKEN
from tracker.messages import MESSAGES, concat, typed, with_columns
from tracker.packing import pack
from tracker.payload_refs import COLUMN

_log = logging.getLogger(__name__)

_REJECT_SECONDS = 5.0  # how long messages for rejects topics may take

Refused = tuple[PlannedSend, Plan, str]  # a message, its plan, and why it can't be sent


def send_to_rejects_topics(settings: Settings, messages: list[Refused]) -> None:
    """Sends messages that can't be sent as they are to rejects topics; after a failure only `rejects` has them."""
    producers: dict[tuple[str, str], EntryProducer] = {}
    progress = threading.Event()
    try:
        for send, plan, why in sorted(messages, key=lambda message: message[0].sequence_id):
            topic = plan.columns["topic"][send.row]
            key = (rejects_topic(topic), f"{send.producer}-refused")
            if key not in producers:
                producers[key] = process_clients.brokers(settings).produce(*key, on_progress=progress.set)
            reasons: list[Any] = [_reason(send, why)] * (send.row + 1)
            # max_size=0 leaves out payload and keys, because the message is beyond the broker's limit.
            max_size = 0 if why.startswith(TOO_LARGE) else max_size_bytes(settings, topic)
            message = outgoing.rejected({**plan.columns, "reason": reasons}, send.row, send.sequence_id, max_size)
            producers[key].send(single_entry(message, producers[key].name, time.time_ns() // 1_000_000))
        _wait(producers.values(), progress)
    except PulsarError as error:
        _log.warning("what can't be sent did not reach the rejects topic: %s", error)
    finally:
        for waits in [producer.close() for producer in producers.values()]:
            waits(_REJECT_SECONDS)


def _wait(producers: Collection[EntryProducer], progress: threading.Event) -> None:
    """Waits until all has arrived, for some seconds at most.

    Raises:
        PulsarError: something has not.
    """
    ends_at = time.monotonic() + _REJECT_SECONDS
    while pending := [producer for producer in producers if producer.n_pending]:
        for producer in pending:
            if producer.error is not None:
                raise producer.error
        if time.monotonic() > ends_at:
            raise NoAnswerError(f"{pending[0].topic} has not answered for {_REJECT_SECONDS:.0f} s")
        progress.wait(0.05)
        progress.clear()


def packed_by_release(messages: list[Refused]) -> dict[tuple[int, int], bytes]:
    """Packs messages that can't be sent, each with the reason, by release (tick, kind)."""
    of_release: dict[tuple[int, int], list[Refused]] = {}
    for message in messages:
        of_release.setdefault((message[1].tick, message[1].kind), []).append(message)
    return {release: _packed(some) for release, some in of_release.items()}


def _packed(messages: list[Refused]) -> bytes:
    rows = concat([typed(plan.rows.slice(send.row, 1), MESSAGES) for send, plan, _ in messages])
    payloads = pa.array([plan.columns["payload"][send.row] for send, plan, _ in messages], pa.binary())
    rows = with_columns(rows, payload=payloads, **{COLUMN: pa.nulls(len(messages), pa.string())})
    names = [send.subscription for send, *_ in messages]
    reasons = [_reason(send, why) for send, _, why in messages]
    return pack(with_columns(rows, subscription=pa.array(names, pa.string()), reason=pa.array(reasons, pa.string())))


def _reason(send: PlannedSend, why: str) -> str:
    return f"{NOT_DELIVERED}{send.subscription}{NOT_TAKEN}{why}"
