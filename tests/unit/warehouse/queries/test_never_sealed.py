"""Commands by id for a message with a schedule key that was parked, or superseded, before it was sealed as it came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.keyed import Job, keyed
from tests.support.tracker.messages import TOPIC, command, commands
from tracker.commands.kinds import RESCHEDULE, RESTORE, SKIP
from tracker.entry_log import entries_of
from tracker.messages import concat
from tracker.properties import key_hash
from tracker.schemas import OUTCOME_ROWS, PauseChange
from tracker.sharding import shard_of
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import LOOKED_UP, find_known_messages, outcomes_to_rows, to_index

pytestmark = pytest.mark.slow

KEY = "k"
# Its home is not the shard of the key.
ENTRY = next(n for n in range(99) if shard_of(np.array([1]), np.array([n * 64]), 3)[0] != key_hash(TOPIC, KEY)[1] % 3)


def ask(job: Job, folder: Path, rows: pa.Table, one: dict[str, object]) -> list[dict[str, object]]:
    """Asks for a command by id when all that has come is durable."""
    tables = Tables(str(folder))
    tables.create()
    tables.append("delayed_index", to_index(job.sealed, 1), {"test": 1})
    tables.append("entries", entries_of(rows), {"test": 1})
    outcomes = pa.Table.from_pylist(job.outcomes, schema=OUTCOME_ROWS)
    tables.append("outcomes", outcomes_to_rows(outcomes, job.tick, job.now), {"test": 1})
    assert (1, ENTRY * 64) in job.all_entries()
    versions = [tables.version(name) for name in LOOKED_UP]
    return job.step(orders=[one], known=find_known_messages(tables, versions, commands([one]), [TOPIC]))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", [SKIP, RESCHEDULE])
@pytest.mark.parametrize("size", [1, 2])
def test_what_was_parked_is_found(tmp_path: Path, size: int, kind: str, shards: int) -> None:
    job = Job(shards)
    job.step(pauses=[PauseChange("p", TOPIC, 3, True)])
    rows = concat(keyed(ENTRY, KEY if i == 0 else None, 100, 0, i if size > 1 else -1, size) for i in range(size))
    job.step(rows)
    job.step(later=1_000)
    job.step()
    told = ask(job, tmp_path, rows, command("id", 1, ENTRY * 64, (0,), -1, 5_000 if kind != SKIP else 0, kind=kind))
    assert {row["result"] for row in told} == {Result.APPLIED}
    assert {row["batch_index"] for row in told} in ({-1}, {*range(size)})
    job.step(pauses=[PauseChange("q", TOPIC, 3, False)])
    job.step(later=6_000)
    assert sorted(job.delivered["a"]) == [(ENTRY, i) for i in range(size)] * (kind != SKIP)
    assert sorted(job.delivered["b"]) == [(ENTRY, i) for i in range(size)]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("kind", "result"),
    [(SKIP, Result.ALREADY_APPLIED), (RESCHEDULE, Result.INVALID), (RESTORE, Result.TOO_LATE)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_was_superseded_as_it_came_is_cancelled(
    tmp_path: Path, size: int, kind: str, result: int, shards: int
) -> None:
    job = Job(shards)
    job.step()
    index = 0 if size > 1 else -1
    rows = concat([keyed(ENTRY, KEY, 900_000, 0, index, size), keyed(ENTRY + 1, KEY, 800_000, 1)])
    if size > 1:
        rows = concat([rows, keyed(ENTRY, None, 900_000, 0, 1, size)])
    job.step(rows)
    job.step()
    told = ask(job, tmp_path, rows, command("id", 1, ENTRY * 64, (0,), index, 5_000, kind=kind))
    assert [(row["batch_index"], row["result"]) for row in told] == [(index, result)]
