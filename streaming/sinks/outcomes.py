"""Publishes the outcomes of commands on the outcome topic."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pulsar
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from broker.client import connect
from broker.protocol.brokers import Brokers
from broker.protocol.entries import Message
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import one_line
from conf.settings import Settings
from status.alerts import FOREIGN_PRODUCER, Alerts
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Generation
from streaming.release.last_sent import ProducerLookup, latest_possible_tick
from streaming.release.sequence_ids import before_first, sequence_id_of, tick_of
from tracker.messages import int64, typed, where, with_columns
from tracker.requests import OPERATION
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import ControlOutcome

_log = logging.getLogger(__name__)

_PRODUCER_SECONDS = 60

# Options with which the producer never blocks and drops nothing by itself, and only flush_async ends its batches.
_PRODUCER_OPTIONS: dict[str, Any] = {
    "batching_max_messages": 5_000,
    "batching_max_allowed_size_in_bytes": 4 * 1024 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
    "max_pending_messages": 0,
    "send_timeout_millis": 0,
}
_BATCH_OUTCOMES = 500
_BATCH_BYTES = 1024 * 1024  # with the names and keys of outcomes it is less than twice as much

# Bytes of a text in a published outcome; what is beyond is cut off. Texts that come in are far shorter; those that an
# earlier version took in need not be.
_MAX_TEXT_BYTES = 4_096

_SUMMED_BY = ["request_id", "topic", "subscription", "result", "reason", "operation"]

# The columns of published outcomes; see ControlOutcome.
PUBLISHED = pa.schema(
    [
        *(OUTCOME_ROWS.field(name) for name in (*_SUMMED_BY, "ledger_id", "entry_id", "batch_index")),
        *(OUTCOME_ROWS.field(name) for name in ("superseded_by", "schedule_key", "occurrence", "deliver_at")),
        ("has_more", pa.bool_()),
        ("n_named", pa.int64()),
        OUTCOME_ROWS.field("is_repeat"),
    ]
)

_TEXTS = ("request_id", "topic", "subscription", "reason", "operation", "superseded_by", "schedule_key")

_ENTRY = ("request_id", "subscription", "ledger_id", "entry_id", "is_repeat")


class OutcomePublisher:
    """Publishes ControlOutcome messages; the request id is the message's key.

    A replayed tick publishes the same outcomes under the same sequence ids, in the same producer batches, so the broker
    drops those that it has; it remembers the first sequence id of a batch. A sequence id of a later tick shows that
    somebody else has published under the producer's name: then the publisher takes another name, unless it was the job
    that has taken the warehouse over.

    Args:
        app_id: of the checkpoint; the producer's name begins with it.
        check_epoch: raises FencedError if another job has taken the warehouse over.
        alerts: records a foreign producer.
    """

    def __init__(
        self, settings: Settings, app_id: str, check_epoch: Callable[[], None], alerts: Alerts | None = None
    ) -> None:
        self._settings = settings
        self._check_epoch = check_epoch
        self._topic = settings.control.outcome_topic
        self._first_name = self._name = _producer_name(app_id)
        self._generation = Generation(0, 0)
        self._alerts = alerts or Alerts()
        self._client: pulsar.Client | None = None
        self._producer: pulsar.Producer | None = None
        # A replay after an edit of this setting may publish outcomes again, which consumers of the topic may see.
        self._most_bytes = min(_BATCH_BYTES, settings.pulsar.max_message_size_bytes // 4)
        self._published = -1  # the producer's last sequence id when it was opened, as the broker knows it

    @property
    def name(self) -> str:
        """The name of the producer: other programs tell the job's outcomes by it from those of others."""
        return self._name

    def publish(self, outcomes: pa.Table, tick: int, now: int) -> None:
        """Publishes outcomes, and waits until the broker has them.

        Args:
            outcomes: all outcomes of a tick, as OUTCOME_ROWS.
            tick: its number.
            now: when the commands are applied, ms since the epoch.

        Raises:
            pulsar.PulsarException: the broker has not taken them.
            FencedError: another job has taken the warehouse over, and has told later ones.
        """
        rows = to_publish(outcomes).to_pylist()
        while not self._has_published(rows, tick, now):
            self._close_producer()

    def _has_published(self, rows: list[dict[str, Any]], tick: int, now: int) -> bool:
        """Publishes rows of PUBLISHED; returns False if the broker dropped the last one, which is no repetition."""
        producer = self._open(tick)
        dropped = threading.Event()

        def acknowledged(result: Any, message_id: Any) -> None:
            if message_id is not None and message_id.ledger_id() < 0:
                dropped.set()

        first_id, n_in_batch, n_bytes = before_first(tick), 0, 0
        outcomes = _readable_outcomes(rows, now)
        if not outcomes:
            return True
        last = max(outcomes)
        for number, (key, body) in outcomes.items():
            sequence_id = sequence_id_of(tick, number)
            # The ends of batches follow from the outcomes alone.
            if not n_in_batch or n_in_batch == _BATCH_OUTCOMES or n_bytes + len(body) > self._most_bytes:
                if n_in_batch and first_id > self._published:
                    producer._producer.flush_async(_ignore)  # cuts the batch, and sends it
                first_id, n_in_batch, n_bytes = sequence_id, 0, 0
            n_in_batch, n_bytes = n_in_batch + 1, n_bytes + len(body)
            if first_id <= self._published:
                continue
            callback = acknowledged if number == last else None
            producer.send_async(body, callback, partition_key=key, sequence_id=sequence_id)
        producer.flush()
        if producer.last_sequence_id() < first_id:
            raise pulsar.PulsarException(f"outcomes of tick {tick} did not reach the broker")
        return not dropped.is_set()

    def close(self) -> None:
        """Closes the connection to the broker."""
        if self._client is not None:
            self._client.close()
            self._client = self._producer = None

    def _close_producer(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _open(self, last_tick: int) -> pulsar.Producer:
        """Returns the producer. For its name the broker has no sequence id of a tick later than `last_tick`."""
        deadline = time.monotonic() + _PRODUCER_SECONDS
        while self._producer is None:
            try:
                self._client = self._client or connect(self._settings.pulsar)
                producer = self._client.create_producer(
                    self._topic, producer_name=self._name, batching_enabled=True, **_PRODUCER_OPTIONS
                )
            except (pulsar.ProducerBusy, pulsar.ConnectError, pulsar.Timeout, pulsar.ServiceUnitNotReady):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            self._published = producer.last_sequence_id()
            if tick_of(self._published) <= last_tick:
                self._producer = producer
                continue
            producer.close()
            self._check_epoch()  # the answers of its successor's ticks are no foreign ones
            text = f"somebody else has published as {self._name}, up to the sequence id {self._published}"
            self._generation = Generation(self._generation.number + 1, last_tick)
            self._name = self._generation.name(self._first_name)
            _log.warning("%s: %s; it goes on as %s", self._topic, text, self._name)
            self._alerts.begin(FOREIGN_PRODUCER, self._topic, f"{text}: whoever it was may produce there")
        return self._producer


def last_published(settings: Settings, app_id: str, newest: Offset) -> int:
    """Asks the broker for the last tick whose outcomes a checkpoint's job has published.

    Args:
        app_id: of the checkpoint.
        newest: the checkpoint's newest offset.

    Returns:
        the tick; -1: the job has published none. Messages of somebody else under the job's name do not count.

    Raises:
        PulsarError: the broker does not answer.
    """
    topic, deadline = settings.control.outcome_topic, time.monotonic() + _PRODUCER_SECONDS
    most = latest_possible_tick(newest, time.time_ns() // 1_000_000)
    names = ProducerLookup(topic, ((_producer_name(app_id), topic),), {}, newest.tick, most, deadline, _is_outcome)
    brokers = Brokers(settings.pulsar)
    try:
        with AdminClient(settings.pulsar) as admin:
            return names.last_tick(brokers, admin)
    finally:
        brokers.close()


def _producer_name(app_id: str) -> str:
    return f"{app_id}-outcomes-batched"


def _is_outcome(message: Message, _: str) -> bool:
    """Whether a message looks as an OutcomePublisher publishes them; anybody can copy one."""
    try:
        outcome = ControlOutcome.FromString(message.payload or b"")
    except DecodeError:
        return False
    return bool(outcome.request_id) and message.key == outcome.request_id.encode()


def to_publish(outcomes: pa.Table) -> pa.Table:
    """Makes the rows to publish of a tick's outcomes.

    Outcomes that may be summed up (`sum_up`) and name a message become one row for each request, subscription, result
    and reason, without a position and with their number in `n_named`; `n_named` is 0 in all other rows. `has_more` says
    that the next row is of the same request, subscription and entry. Outcomes that repeat an earlier answer are summed
    up apart from new ones, because they are the whole answer to the repeated command.

    Args:
        outcomes: as OUTCOME_ROWS.

    Returns:
        the rows, as PUBLISHED.
    """
    outcomes = with_columns(outcomes, is_repeat=pc.fill_null(outcomes["is_repeat"], False))
    is_summed = pc.fill_null(outcomes["sum_up"], False).to_numpy() & (int64(outcomes, "ledger_id") >= 0)
    single, several = where(outcomes, ~is_summed), where(outcomes, is_summed)
    n = single.num_rows
    keys = [pc.fill_null(single[name], "") if name == "subscription" else single[name] for name in _ENTRY]
    is_same = [pc.equal(key[1:], key[:-1]).to_numpy() for key in keys]
    alone = {
        **{name: single[name] for name in single.column_names},
        "has_more": pa.array(np.append(np.logical_and.reduce(is_same), False)[:n]),
        "n_named": pa.array(np.zeros(n, np.int64)),
    }
    by = [*_SUMMED_BY, "is_repeat"]
    counted = several.group_by(by, use_threads=False).aggregate([([], "count_all")])
    nowhere = pa.array(np.full(counted.num_rows, -1))
    summed = {
        **{name: counted[name] for name in by},
        **dict.fromkeys(("ledger_id", "entry_id", "batch_index"), nowhere),
        "has_more": pa.array(np.zeros(counted.num_rows, np.bool_)),
        "n_named": counted["count_all"],
    }
    return pa.concat_tables([typed(alone, PUBLISHED), typed(summed, PUBLISHED)])


def _readable_outcomes(rows: list[dict[str, Any]], now: int) -> dict[int, tuple[str, bytes]]:
    """Builds the outcomes that rows of PUBLISHED stand for.

    Args:
        rows: of PUBLISHED.
        now: when the commands are applied, ms since the epoch.

    Returns:
        by the number of the row: the message's key and payload; without rows of which none can be built.
    """
    found: dict[int, tuple[str, bytes]] = {}
    for number, row in enumerate(rows):
        try:
            outcome = _outcome(row, now)
            found[number] = outcome.request_id, outcome.SerializeToString()
        except MemoryError:
            raise
        except Exception as error:  # the table has it
            _log.warning("an outcome is not published: %s: %s", type(error).__name__, one_line(error)[:500])
    return found


def _outcome(row: dict[str, Any], now: int) -> ControlOutcome:
    texts = {name: _cut(row[name] or "") for name in _TEXTS}
    return ControlOutcome(
        **texts,
        ledger_id=row["ledger_id"],
        entry_id=row["entry_id"],
        batch_index=row["batch_index"],
        result=row["result"],
        applied_at=now,
        occurrence=row["occurrence"] or 0,
        deliver_at=row["deliver_at"] or 0 if row["operation"] == OPERATION else 0,
        has_more=row["has_more"],
        n_named=row["n_named"],
        is_repeat=row["is_repeat"],
    )


def _cut(text: str) -> str:
    """Returns the beginning of a text, of _MAX_TEXT_BYTES at most."""
    if len(text) * 4 <= _MAX_TEXT_BYTES:
        return text
    return text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore")


def _ignore(_: Any) -> None:
    """Ignores the result of a flush: an error shows in the last one."""
