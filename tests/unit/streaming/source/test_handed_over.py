"""Commands that wait when their topic gets its first message with a schedule key wait in all shards from then on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.batch_schema import InputKind, OutputKind, input_rows, shard_keys
from streaming.checkpoint.offset import Offset
from streaming.operator.processor import Operator
from streaming.source.reader import CommandsPart, SourceReader
from tests.support.servers.fake_pulsar import one
from tests.support.service.harness import wait_until
from tests.support.service.intake import ORDERS, Client, Consumer, offset, settings
from tests.support.tracker.messages import messages
from tests.support.warehouse.tables import NOW, TOPIC
from tests.unit.streaming.test_batches import State
from tracker.commands.decode import Limits
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.messages import concat
from tracker.packing import pack, unpack
from tracker.properties import key_hash
from tracker.schemas import OUTCOME_ROWS
from tracker.sharding import shard_of
from tracker.wire.delaylake_pb2 import CancelDelayedMessage, ControlCommand, Result, SkipEntry, SkipMessages
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import LOOKED_UP, outcomes_to_rows
from warehouse.queries.waiting_commands import find_waiting
from warehouse.routes.known_routes import KnownRoutes

SHARDS = 3
DUE = NOW + 400  # in state, not in the tables


@pytest.mark.parametrize("shards", [1, 2])
def test_an_offset_names_the_topics_that_get_their_first_schedule_key(start: Any, client: Client, shards: int) -> None:
    client.consumers[ORDERS] = Consumer()
    intake, last = start(settings(orders=["a"]), "now", shards=shards), offset(settings(orders=["a"]))
    first = intake.next_offset(last)
    assert (first.keyed, first.newly_keyed, first.lookup_versions) == ([], [], [])
    client.consumers[ORDERS].publish(one(6, ledger=1, props={"scheduleKey": "k", "deliverAt": str(DUE)}))
    wait_until(lambda: intake._receivers.open[ORDERS].has_keys, 5, "it came")
    new = intake.next_offset(first)
    assert new.keyed == [ORDERS]
    assert new.newly_keyed == ([ORDERS] if shards > 1 else [])
    # What waits is read from the tables as they are now, and waits until the topics have been read to their ends.
    assert bool(new.lookup_versions) == bool(new.barriers) == (shards > 1)
    assert intake.next_offset(new).newly_keyed == []


def cancel(entry: int) -> ControlCommand:
    named = CancelDelayedMessage(ledger_id=1, entry_id=entry, deliver_at=DUE)
    return ControlCommand(request_id=f"cancel {entry}", topic=TOPIC, subscriptions=["a"], cancel=named)


def skip(entry: int) -> ControlCommand:
    named = SkipMessages(entries=[SkipEntry(ledger_id=1, entry_id=entry)])
    return ControlCommand(request_id=f"skip {entry}", topic=TOPIC, subscriptions=["a"], skip=named)


def home_of(entry: int) -> int:
    return int(shard_of(np.array([1]), np.array([entry]), SHARDS)[0])


def with_key(entry: int) -> pa.Table:
    """A message with a schedule key whose shard is not the home of its entry."""
    keys = (f"{entry} {i}" for i in range(50))
    key = next(key for key in keys if key_hash(TOPIC, key)[1] % SHARDS != home_of(entry))
    return messages([(1, entry, DUE)], topic=TOPIC, schedule_key=key, properties=[("scheduleKey", key)])


class Job:
    """The shards of a job, which get of each batch what the source gives them, and the table of their outcomes."""

    def __init__(self, folder: Path) -> None:
        routes: Any = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
        self.settings = Settings(warehouse=f"file:{folder}/w", checkpoint=f"file:{folder}/c", routes=routes)
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()
        self.states = [State() for _ in range(SHARDS)]
        self.offset = Offset(run_id="r", routes=KnownRoutes({}).updated_to(self.settings).to_json())
        self.delivered: list[int] = []

    def step(
        self,
        rows: pa.Table | None = None,
        sent: Sequence[ControlCommand] = (),
        now: int = NOW,
        passed: int | None = None,
        is_replayed: bool = False,
        is_rebuilt: bool = False,
    ) -> list[tuple[str, str]]:
        """A batch that ends a seal epoch; returns the outcomes, each as (request id, result).

        Args:
            rows: the messages, as MESSAGES, all with a schedule key.
            sent: the commands.
            now: ms since the epoch.
            passed: the barriers up to this tick have been passed; None: those before this one.
            is_replayed: whether the batch runs again, after its outcomes were written.
            is_rebuilt: whether it is the first one after a rebuild.
        """
        tick = self.offset.tick + 1
        rebuilt = self._rebuilt() if is_rebuilt else []
        states = [dict(state.values) for state in self.states]
        keyed = [TOPIC] if rows is not None or self.offset.keyed else []
        batch = replace(
            self.offset,
            tick=tick,
            now=now,
            cutoff=now,
            seal_epoch=tick,
            load_horizon=now + 1_000,
            near_until=now + 500,
            confirmed=tick - 1,
            ingested_through=tick - 1 if passed is None else passed,
            lookup_versions=[self.tables.version(name) for name in LOOKED_UP],
            keyed=keyed,
            newly_keyed=keyed if not self.offset.keyed else [],
        )
        control = concat(messages([(9, tick, 0)], payload=one.SerializeToString()) for one in sent) if sent else None
        for _ in range(1 + is_replayed):
            for state, before in zip(self.states, states, strict=True):
                state.values.clear()
                state.values.update(before)
            told = self._apply(batch, rows, control, rebuilt)
            self.tables.append("outcomes", outcomes_to_rows(told, tick, now), {})
        self.offset = batch
        names = (Result.Name(number) for number in told["result"].to_pylist())
        return sorted(zip(told["request_id"].to_pylist(), names, strict=True))

    def _rebuilt(self) -> list[tuple[Any, ...]]:
        """Forgets the states, and returns what a rebuild gives to the shards: each gets all commands that wait."""
        for state in self.states:
            state.values.clear()
        waiting = find_waiting(self.tables, {TOPIC: ["a"]})
        begun = {"sealed": 0, "unwanted": 0, "request_ids": {}, "paused": {}, "released": 0}
        return [
            row
            for kind, content in ((InputKind.REBUILT, begun), (InputKind.REBUILT_WAITING, waiting))
            for row in input_rows(kind, dict.fromkeys(range(SHARDS), content), shard_keys(SHARDS))
        ]

    def _apply(
        self, batch: Offset, rows: pa.Table | None, control: pa.Table | None, rebuilt: Sequence[tuple[Any, ...]]
    ) -> pa.Table:
        keys = shard_keys(SHARDS)
        part = CommandsPart(
            pack(messages([]) if control is None else control),
            batch.lookup_versions,
            batch.routes,
            {},
            batch.keyed,
            batch.newly_keyed,
            Limits(10**13, {}),
        )
        options = {"settings": self.settings.model_dump_json(), "shard_keys": json.dumps(keys), "epoch": "0"}
        given = [tuple(row.values()) for read in SourceReader(options).read(part) for row in read.to_pylist()]
        given += rebuilt
        given += input_rows(InputKind.TICK, batch.to_json(), keys)
        if rows is not None:
            given += input_rows(InputKind.MESSAGES, rows, keys)
            given += input_rows(InputKind.NOTES, rows.select(ENTRY_LOG_ROWS.names), keys)
        told = []
        for key, state in zip(keys, self.states, strict=True):
            operator = Operator(state, keys, self.settings.tracker.model_dump_json(), self.settings.warehouse)
            own = (SimpleNamespace(kind=kind, body=body) for of, kind, body in given if of == key)
            for output in operator.apply(key, own):
                if output.kind == OutputKind.OUTCOMES:
                    told.append(unpack(output.body))
                elif "release" in output.kind or "notice" in output.kind:
                    self.delivered += unpack(output.body)["entry_id"].to_pylist()
        return concat(told, OUTCOME_ROWS)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_command_that_waits_is_applied_where_its_message_comes(tmp_path: Path, is_replayed: bool) -> None:
    job = Job(tmp_path)
    waiting = [(f"cancel {entry}", "WAITING") for entry in range(6)]
    assert job.step(sent=[cancel(entry) for entry in range(6)]) == waiting
    # Messages come with the topic's first keys, and later.
    applied = [("cancel 0", "APPLIED"), ("cancel 1", "APPLIED")]
    assert job.step(concat([with_key(0), with_key(1)]), is_replayed=is_replayed) == applied
    assert job.step(concat([with_key(2), with_key(3), with_key(6)])) == [
        ("cancel 2", "APPLIED"),
        ("cancel 3", "APPLIED"),
    ]
    # Those that meet nothing are answered once, by the homes of their entries.
    job.step(now=DUE)
    missing = [("cancel 4", "NOT_FOUND"), ("cancel 5", "NOT_FOUND")]
    assert job.step(now=DUE + 3_600_000) + job.step(now=DUE + 7_200_000) == missing
    assert job.delivered == [6]


def test_all_shards_give_up_in_the_same_tick(tmp_path: Path) -> None:
    """Else a command could be told NOT_FOUND, and be applied afterwards."""
    job = Job(tmp_path)
    assert job.step(sent=[skip(0), skip(1)], passed=0) == [("skip 0", "WAITING"), ("skip 1", "WAITING")]
    # The home would give up now: what was published before the command has come.
    assert job.step(with_key(9), passed=1) == []
    assert job.step(with_key(0), passed=1) == [("skip 0", "APPLIED")]
    assert job.step(passed=2) == [("skip 1", "NOT_FOUND")]
    assert job.step(with_key(1), passed=4) == []
    job.step(now=DUE + 1)
    assert sorted(job.delivered) == [1, 9]


def test_what_was_answered_before_is_not_handed_over(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step(sent=[skip(0)], passed=0)
    assert job.step(passed=1) == [("skip 0", "NOT_FOUND")]
    assert job.step(with_key(0)) == []
    job.step(now=DUE + 1)
    assert job.delivered == [0]


@pytest.mark.parametrize("is_first_tick", [True, False])
def test_after_a_rebuild_no_command_waits_twice_in_a_shard(tmp_path: Path, is_first_tick: bool) -> None:
    """A rebuild has given it to each shard: its topic had no key, but may get one."""
    job = Job(tmp_path)
    waiting = [(f"cancel {entry}", "WAITING") for entry in range(4)]
    assert job.step(sent=[cancel(entry) for entry in range(4)]) == waiting
    if not is_first_tick:
        assert job.step(is_rebuilt=True) == []
    applied = [("cancel 0", "APPLIED"), ("cancel 1", "APPLIED")]
    assert job.step(concat([with_key(0), with_key(1)]), is_rebuilt=is_first_tick) == applied
    assert job.step(with_key(2)) == [("cancel 2", "APPLIED")]
    job.step(now=DUE)
    missing = [("cancel 3", "NOT_FOUND")]
    assert job.step(now=DUE + 3_600_000) + job.step(now=DUE + 7_200_000) == missing
    assert job.delivered == []
