"""Tells on the outcome topic what commands did."""

from __future__ import annotations

import time

import pulsar
import pyarrow as pa

from conf.settings import Settings
from proto.delaylake_pb2 import ControlOutcome, Result
from streaming.pulsar_client import connect
from streaming.segments import positions
from streaming.sender import PRODUCER_OPTIONS, ROW_BITS, ignore
from streaming.tables import OUTCOMES

_PRODUCER_SECONDS = 60
_BATCH_OUTCOMES = 500

_ENTRY = ("request_id", "subscription", "ledger_id", "entry_id")


class OutcomePublisher:
    """Publishes ControlOutcome messages; the request id is the message's key.

    A tick that is replayed publishes the same under the same sequence ids, in the same batches, and the broker drops
    what it has. Of a batch it remembers the first sequence id.
    """

    def __init__(self, settings: Settings, application: str) -> None:
        self._settings = settings
        self._name = f"{application}-outcomes-batched"
        self._client: pulsar.Client | None = None
        self._producer: pulsar.Producer | None = None
        self._published = -1  # by an earlier run

    def publish(self, outcomes: pa.Table, tick: int) -> pa.Table:
        """Publishes outcomes; returns them as rows of the table `outcomes`.

        Raises:
            pulsar.PulsarException: the broker has not taken them.
        """
        now = time.time_ns() // 1_000_000
        producer = self._open()
        rows = outcomes.to_pylist()
        entries = [tuple(row[name] for name in _ENTRY) for row in rows]
        first_id = tick << ROW_BITS
        for number, row in enumerate(rows):
            sequence_id = (tick << ROW_BITS) + number + 1
            if number % _BATCH_OUTCOMES == 0:
                first_id = sequence_id
            if first_id <= self._published:
                continue
            outcome = ControlOutcome(
                request_id=row["request_id"],
                topic=row["topic"],
                subscription=row["subscription"] or "",
                ledger_id=row["ledger_id"],
                entry_id=row["entry_id"],
                batch_index=row["batch_index"],
                result=row["result"],
                reason=row["reason"] or "",
                applied_at=now,
                operation=row["operation"],
                has_more=entries[number] in entries[number + 1 : number + 2],
            )
            producer.send_async(
                outcome.SerializeToString(),
                None,
                partition_key=row["request_id"],
                sequence_id=sequence_id,
            )
            if number % _BATCH_OUTCOMES == _BATCH_OUTCOMES - 1:
                producer._producer.flush_async(ignore)  # cuts the batch, and sends it
        producer.flush()
        if producer.last_sequence_id() < first_id:
            raise pulsar.PulsarException(f"outcomes of tick {tick} did not reach the broker")
        return self._rows(outcomes, tick, now)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._producer = None

    def _open(self) -> pulsar.Producer:
        deadline = time.monotonic() + _PRODUCER_SECONDS
        while self._producer is None:
            try:
                self._client = self._client or connect(self._settings.pulsar)
                self._producer = self._client.create_producer(
                    self._settings.control.outcome_topic,
                    producer_name=self._name,
                    batching_enabled=True,
                    **PRODUCER_OPTIONS,
                )
                self._published = self._producer.last_sequence_id()
            except (pulsar.ProducerBusy, pulsar.ConnectError, pulsar.Timeout, pulsar.ServiceUnitNotReady):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return self._producer

    @staticmethod
    def _rows(outcomes: pa.Table, tick: int, now: int) -> pa.Table:
        n = outcomes.num_rows
        names = Result.DESCRIPTOR.values_by_number
        values = {
            **{name: outcomes[name] for name in outcomes.column_names},
            "position": positions(outcomes),
            "result": pa.array([names[number].name for number in outcomes["result"].to_pylist()], pa.string()),
            "applied_at": pa.array([now] * n, pa.int64()),
            "batch_id": pa.array([tick] * n, pa.int64()),
        }
        return pa.table([values[f.name] for f in OUTCOMES], schema=OUTCOMES)
