"""A shard after its machine's clock jumped ahead and was set back: nothing early, and commands told the truth."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, command, commands, messages, tick_at
from tracker.schemas import KNOWN
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result

HOUR = 3_600_000


class Service:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.tick = 0

    def step(self, cutoff: int, rows: pa.Table | None = None, horizon: int = HOUR + 1_000, **changes: Any) -> Effects:
        self.tick += 1
        tick_input = TickInput(messages=messages([]) if rows is None else rows, **changes)
        tick = tick_at(self.tick, cutoff, load_horizon=horizon, near_until=cutoff + 100)
        return Shard(self.store, {TOPIC: ["a"]}, 1_000_000).apply(tick, tick_input)


def handed_out(effects: Effects) -> list[int]:
    return [entry for release in effects.releases for entry in release.rows["entry_id"].to_pylist()]


def test_what_comes_after_the_step_waits_for_its_time_and_what_went_out_before_is_too_late() -> None:
    service = Service()
    first = messages([(1, 0, HOUR // 2)])
    assert handed_out(service.step(0, first)) == []
    assert handed_out(service.step(HOUR)) == [0]
    later = messages([(1, 1, HOUR // 2), (1, 2, HOUR // 2 + 50), (1, 3, 500)])
    assert handed_out(service.step(0, later)) == []

    known = pa.concat_tables([first, later]).select(KNOWN.names)
    requests = commands([command(f"r{entry}", 1, entry) for entry in range(3)])
    effects = service.step(100, commands=requests, request_ids={f"r{i}": 0 for i in range(3)}, known_messages=known)
    results = dict(zip(effects.outcomes["entry_id"].to_pylist(), effects.outcomes["result"].to_pylist(), strict=True))
    assert results == {0: Result.TOO_LATE, 1: Result.APPLIED, 2: Result.APPLIED}
    assert handed_out(service.step(500)) == [3]
    # What is due by then and was cancelled does not come; what was not goes out once.
    assert handed_out(service.step(HOUR)) == []


def test_a_message_is_sealed_as_before_although_it_is_due_before_the_old_cutoff() -> None:
    service = Service()
    service.step(HOUR)
    service.step(0)
    assert service.step(100, messages([(1, 0, HOUR // 2)])).bucket["entry_id"].to_pylist() == [0]
    assert service.step(200).bucket["entry_id"].to_pylist() == []
    assert handed_out(service.step(HOUR // 2)) == [0]
