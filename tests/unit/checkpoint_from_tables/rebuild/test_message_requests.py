"""Messages that come again under their request id are delivered once, whenever the checkpoint is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.fuzzing.examples import examples
from tests.support.service.one_shard import NAMES, NOW, SECOND, Service, run_audit_of_tables
from tests.support.tracker.messages import batches
from tracker.messages import concat
from tracker.wire.delaylake_pb2 import Result
from warehouse.queries.index_rows import to_rejects

pytestmark = pytest.mark.slow


def asked(entry: int, request_id: str, due: int, payload: bytes = b"") -> pa.Table:
    return batches(
        [(1, entry, -1, 1, due)],
        publish_time=NOW,
        properties=[("requestId", request_id)],
        request_id=request_id,
        payload=payload,
    )


class Job(Service):
    """Writes what is rejected, and notes which message the outcomes name as the first of each id."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.firsts: defaultdict[str, set[str]] = defaultdict(set)

    def step(self, *arguments: pa.Table | None, **more: object) -> object:  # type: ignore[override]
        effects = super().step(*arguments, **more)  # type: ignore[arg-type]
        if effects.rejects.num_rows:
            self.tables.append("rejects", to_rejects(effects.rejects, self.tick), {})
        self.in_flight = [one for one in self.in_flight if one[2]["reason"] is None]
        for row in effects.outcomes.to_pylist():
            own = f"{row['ledger_id']}:{row['entry_id']}:{row['partition']}:{row['batch_index']}"
            assert row["result"] in (Result.APPLIED, Result.ALREADY_APPLIED)
            self.firsts[row["request_id"]].add(row["superseded_by"] or own)
        return effects


def test_what_is_remembered_outlives_a_lost_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path)
    due = NOW + 60 * SECOND
    job.step(asked(1, "r", due), seals=True)
    job.lose_checkpoint()
    # It came in again, and waits; a repetition does not.
    job.step(concat([asked(2, "r", due), asked(3, "s", due)]))
    job.lose_checkpoint()
    job.step(asked(4, "s", due))
    for _ in range(70):
        job.step(seals=True)
        job.arrive([True], is_written=True)
    for name in NAMES:
        assert sorted(number for number, _ in job.arrived[name]) == [1, 3]
    job.lose_checkpoint()
    job.step(concat([asked(5, "r", due), asked(6, "s", due)]))
    assert {key: len(named) for key, named in job.firsts.items()} == dict.fromkeys(job.firsts, 1)
    assert sum(map(len, job.arrived.values())) == 4


@pytest.mark.parametrize("seed", range(max(3, examples(3))))
def test_each_id_comes_once_whatever_happens_in_between(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    job = Job(tmp_path)
    dues: dict[str, int] = {}
    entry = 0
    for _ in range(60):
        rows = []
        for _ in range(chance.randrange(4)):
            request_id = f"r{chance.randrange(12)}"
            due = dues.setdefault(request_id, job.now + chance.choice([1, 8, 20, 40]) * SECOND)
            entry += 1
            rows.append(asked(entry, request_id, due))
        job.step(concat(rows) if rows else None, seals=chance.random() < 0.3)
        if chance.random() < 0.5:
            job.arrive([chance.random() < 0.8 for _ in range(3)], is_written=chance.random() < 0.7)
        if chance.random() < 0.12:
            job.lose_checkpoint()
    for _ in range(70):
        job.step(seals=True)
        job.arrive([True], is_written=True)
    assert {len(named) for named in job.firsts.values()} == {1}
    firsts = sorted(int(one.split(":")[1]) for named in job.firsts.values() for one in named)
    assert len(firsts) == len(dues)
    for name in NAMES:
        assert sorted(number for number, _ in job.arrived[name]) == firsts
    assert not any(run_audit_of_tables(job).values())
