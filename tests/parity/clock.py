"""A shard, a tick at a time, by the rules of the service's clock."""

from __future__ import annotations

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, positions, tick_at
from tracker.messages import concat, int64
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput

NEAR, AHEAD = 1_000, 5_000


class Clock:
    """A shard, and ticks for it that follow the rules of the clock: horizons move when a seal epoch ends."""

    def __init__(self, subscriptions: int = 1) -> None:
        self.store = MemoryStore()
        self.names = {TOPIC: [f"s{i}" for i in range(subscriptions)]}
        self.sealed: list[pa.Table] = []
        self.tick = self.seal_epoch = self.near = self.load = 0
        self.run = "first"

    def step(self, cutoff: int, *new: pa.Table, seals: bool = False, confirmed: int = 0) -> Effects:
        """One tick: nothing is handed out beyond the cutoff."""
        before = self.load
        self.tick += 1
        if seals or cutoff >= self.near:
            self.seal_epoch += 1
            self.near, self.load = cutoff + NEAR, cutoff + AHEAD
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((due >= before) & (due < self.load)))
        tick = tick_at(
            self.tick,
            cutoff,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id=self.run,
            confirmed=confirmed,
            durable_through=self.seal_epoch - 2,
        )
        shard = Shard(self.store, self.names, 1_000_000)
        effects = shard.apply(tick, TickInput(messages=concat(new), segment=segment))
        if effects.bucket.num_rows:
            self.sealed.append(effects.bucket)
        return effects

    def restart(self) -> None:
        self.run += "+"


def handed_out(effects: Effects) -> list[tuple[int, int]]:
    return [position for release in effects.releases for position in positions(release.rows)]
