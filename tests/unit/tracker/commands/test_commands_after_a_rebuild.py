"""Commands by id after a rebuild, for a message that is known by its schedule key before its entry comes again."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.keyed import NAMES, Job, by_key, keyed
from tests.support.tracker.messages import TOPIC, command
from tracker.commands.kinds import CANCEL, POSTPONE, RESCHEDULE, SKIP
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import concat
from tracker.properties import key_hash
from tracker.rebuilt import LIVE_KEYS, MOVED, Rebuilt
from tracker.schemas import PauseChange
from tracker.sharding import shard_of
from tracker.wire.delaylake_pb2 import Result

KEY = "k"
# Its home is not the shard of the key.
ENTRY = next(n for n in range(99) if shard_of(np.array([1]), np.array([n * 64]), 3)[0] != key_hash(TOPIC, KEY)[1] % 3)
KINDS = [CANCEL, SKIP, RESCHEDULE, POSTPONE]


def batch() -> pa.Table:
    """Three messages of an entry, of which the second has a schedule key."""
    return concat([keyed(ENTRY, KEY if i == 1 else None, 900 + 4_000 * (i != 1), 0, i, 3) for i in range(3)])


def job_after_a_rebuild(shards: int, rows: pa.Table) -> Job:
    """A job of which the message with the key was parked before its entry was durable."""
    job = Job(shards)
    job.step(pauses=[PauseChange("p", TOPIC, 3, True)])
    job.step(rows)
    job.step(later=1_000)
    job.step()
    parked = job.sealed.filter(pa.array([at == HELD_DELIVER_AT for at in job.sealed["deliver_at"].to_pylist()]))
    assert set(parked["subscription"].to_pylist()) == {"a", "b"}
    rows_of = parked.to_pylist()
    moves = [row | {"subscription": NAMES[TOPIC].index(row["subscription"]), "until": 10**9} for row in rows_of]
    whole = rows_of[0]["batch_index"] < 0
    # The tables have neither how many messages its entry has, nor when it was due.
    last = rows_of[0] | {"batch_size": 1 if whole else np.iinfo(np.int32).max, "deliver_at": 0, "since": 0}
    key, moved = pa.Table.from_pylist([last], schema=LIVE_KEYS), pa.Table.from_pylist(moves, schema=MOVED)
    job.lose_checkpoint(Rebuilt(keys=key, moved=moved, paused={TOPIC: 3}, released=job.now - 1))
    job.step()
    return job


def ask(job: Job, kind: str, batch_index: int = -1) -> None:
    """A command by id beside one by key, which is why the key's message is known."""
    value = {CANCEL: 900, SKIP: 0, RESCHEDULE: 9_000, POSTPONE: 700}[kind]
    by_id = command("id", 1, ENTRY * 64, (0,), batch_index, value, kind=kind)
    told = job.step(orders=[by_key("key", KEY, SKIP, subscriptions=(1,)), by_id])
    assert [row["result"] for row in told if row["request_id"] == "key"] == [Result.APPLIED]
    assert [row["result"] for row in told if row["request_id"] == "id"] == [Result.WAITING]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_for_a_message_that_is_known_by_its_key_waits_for_its_entry(kind: str, shards: int) -> None:
    rows = keyed(ENTRY, KEY, 900, 0)
    job = job_after_a_rebuild(shards, rows)
    ask(job, kind)
    told = job.step(rows)
    assert [(row["request_id"], row["batch_index"], row["result"]) for row in told] == [("id", -1, Result.APPLIED)]
    job.has_all_come = True
    job.step()
    job.step(pauses=[PauseChange("q", TOPIC, 3, False)])
    job.step(later=9_000)
    is_moved = kind in (RESCHEDULE, POSTPONE)
    assert job.delivered == {"a": [(ENTRY, 0)] * is_moved, "b": []}
    assert len(job.outcomes) == 3, "each command is answered once, but for the one that waited"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_for_an_entry_of_which_a_message_is_known_by_its_key_is_applied_to_all(
    kind: str, shards: int
) -> None:
    job = job_after_a_rebuild(shards, batch())
    ask(job, kind)
    told = job.step(batch())
    assert {(row["request_id"], row["result"]) for row in told} == {("id", Result.APPLIED)}
    assert {row["batch_index"] for row in told} in ({-1}, {0, 1, 2})
    job.has_all_come = True
    job.step()
    job.step(pauses=[PauseChange("q", TOPIC, 3, False)])
    job.step(later=9_000)
    is_moved = kind in (RESCHEDULE, POSTPONE)
    assert sorted(job.delivered["a"]) == [(ENTRY, i) for i in range(3)] * is_moved
    assert sorted(job.delivered["b"]) == [(ENTRY, 0), (ENTRY, 2)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_command_for_another_message_of_the_entry_waits_for_it(shards: int) -> None:
    job = job_after_a_rebuild(shards, batch())
    ask(job, SKIP, batch_index=0)
    told = job.step(batch())
    assert [(row["request_id"], row["batch_index"], row["result"]) for row in told] == [("id", 0, Result.APPLIED)]
