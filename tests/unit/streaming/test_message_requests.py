"""Messages with request ids from a receiver's rows to the published answers, over two shards, and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from delaylake.wire.delaylake_pb2 import ControlOutcome

from admin.control.scheduling import MessageRefusedError, ScheduledMessage, _scheduled
from conf.settings import Settings
from streaming.batch_schema import BatchOutput, InputKind, OutputKind, input_rows
from streaming.checkpoint.offset import Offset
from streaming.operator.processor import Operator
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.sinks import outcomes as module
from streaming.sinks.outcomes import to_publish
from tests.support.servers.fake_pulsar import one
from tests.support.service.receiver_harness import rows_of
from tests.unit.streaming.test_batches import State
from tracker.messages import MESSAGES, has_keys
from tracker.properties import MessagePosition
from tracker.requests import first_of_tick
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import outcomes_to_rows
from warehouse.routes.known_routes import known_routes

pytestmark = pytest.mark.slow

NOW = 1_790_000_000_000
KEYS = [0, 1]


class Job:
    """Batches through the operator of two shards, and what the sink does with their outcomes."""

    def __init__(self, folder: Path, topic: str) -> None:
        self.settings = Settings.model_validate(
            {
                "warehouse": f"file:{folder}",
                "tracker": {"shards": 2},
                "routes": [{"source": topic, "subscriptions": [{"name": "a"}]}],
            }
        )
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()
        self.states = [State(), State()]
        self.tick = 0
        self.rejects: list[str] = []

    def batch(self, rows: pa.Table) -> dict[tuple[int, int], ControlOutcome]:
        """Runs a batch twice, as after a crash; returns what is published, by the message's ledger and entry."""
        self.tick += 1
        now = NOW + 1_000 * self.tick
        offset = Offset(
            tick=self.tick,
            now=now,
            cutoff=now,
            seal_epoch=self.tick,
            load_horizon=now + 2_000,
            near_until=now + 1_000,
            run_id="run",
            routes=known_routes(self.settings).to_json(),
            ingested_through=self.tick,
        )
        content = [*input_rows(InputKind.TICK, offset.to_json(), KEYS), *input_rows(InputKind.MESSAGES, rows, KEYS)]
        content += input_rows(InputKind.MESSAGE_REQUESTS, first_of_tick(rows), KEYS)
        assert not has_keys(rows)
        before = [dict(state.values) for state in self.states]
        first = self._apply(content)
        found = first.rows(OutputKind.OUTCOMES)
        self.tables.append("outcomes", outcomes_to_rows(found, self.tick, now), {})
        for state, values in zip(self.states, before, strict=True):
            state.values.clear()
            state.values.update(values)
        again = self._apply(content)
        assert again.rows(OutputKind.OUTCOMES).equals(found), "also when the table has the batch's outcomes already"
        assert again.rows(OutputKind.REJECTS).equals(first.rows(OutputKind.REJECTS))
        self.rejects += first.rows(OutputKind.REJECTS)["reason"].to_pylist()
        published = module._readable_outcomes(to_publish(found).to_pylist(), now).values()
        answers = [ControlOutcome.FromString(body) for _, body in published]
        return {(answer.ledger_id, answer.entry_id): answer for answer in answers}

    def _apply(self, content: list[Any]) -> BatchOutput:
        output: list[Any] = []
        for key, state in zip(KEYS, self.states, strict=True):
            own = [SimpleNamespace(kind=kind, body=body) for of, kind, body in content if of == key]
            operator = Operator(state, KEYS, self.settings.tracker.model_dump_json(), self.settings.warehouse)
            output += operator.apply(key, iter(own))
        columns = zip(*(tuple(row) for row in output), strict=True)
        return BatchOutput(pa.table(dict(zip(OUTPUT_SCHEMA.names, map(list, columns), strict=True))))


def sent(*messages: tuple[int, str, bytes]) -> pa.Table:
    """What a receiver makes of messages of (entry, request id, payload)."""
    entries = [
        entry
        for number, request_id, payload in messages
        for entry in one(number, props={"requestId": request_id, "deliverAt": str(NOW + 600_000)}, payload=payload)
    ]
    return pa.Table.from_pylist(rows_of(entries), schema=MESSAGES)


def test_each_call_is_answered_with_the_first_message_in_whichever_shard_and_batch_it_came(tmp_path: Path) -> None:
    # Neighbouring entries share a shard.
    entries = [64 * number for number in range(12)]
    first = sent(*((entry, "r", b"x") for entry in entries[:4]), (entries[4], "other", b"y"))
    topic = first["topic"][0].as_py()
    job = Job(tmp_path, topic)
    answers = job.batch(first)
    ledger = first["ledger_id"][0].as_py()
    expected = ScheduledMessage(f"{ledger}:0:{first['partition'][0].as_py()}:-1", NOW + 600_000)
    position = MessagePosition(ledger, 0, first["partition"][0].as_py(), -1)
    for entry in entries[:4]:
        assert _scheduled(answers[ledger, entry], position) == expected
    later = job.batch(sent(*((entry, "r", b"x") for entry in entries[5:11]), (entries[11], "r", b"another")))
    for entry in entries[5:11]:
        assert _scheduled(later[ledger, entry], position) == expected
    with pytest.raises(MessageRefusedError, match="another message"):
        _scheduled(later[ledger, entries[11]], position)
    assert len(job.rejects) == 3 + 6 + 1
    assert all(state.values for state in job.states)
    rows = job.tables.query("outcomes", "SELECT operation, result, deliver_at FROM outcomes").to_pylist()
    assert json.dumps(rows).count("ALREADY_APPLIED") == 9
    assert {row["operation"] for row in rows} == {"SCHEDULE"}
