"""A shard with recurring messages, as the source drives it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, batches, command, commands, resumed
from tracker.messages import MESSAGES, concat, int64, where
from tracker.rebuilt import Rebuilt
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, Tick, TickInput

NAMES = {TOPIC: ["a", "b"]}
SECOND = 1_000
NEAR_MILLIS, AHEAD_MILLIS = 4_000, 12_000

# What a subscription got: (entry, occurrence, when it was due).
Got = tuple[int, int | None, int]


def recurring(entry: int, start: int, repeat: str = "@every 10s", published: int = 0, **properties: str) -> pa.Table:
    """A message that recurs from a time on."""
    of_message = {"repeat": repeat, "deliverAt": str(start), **properties}
    return batches(
        [(1, entry, -1, 1, start)], publish_time=published, properties=list(of_message.items()), occurrence=1
    )


@dataclass
class Job:
    """A shard, and what the source gives it: what it seals is loaded again, and what it knows is looked up."""

    store: MemoryStore = field(default_factory=MemoryStore)
    tick: int = 0
    now: int = 0
    seal_epoch: int = 0
    load: int = 0
    near: int = 0
    durable: int = 0
    sealed: pa.Table = field(default_factory=MESSAGES.empty_table)
    came: pa.Table = field(default_factory=MESSAGES.empty_table)
    got: dict[str, list[Got]] = field(default_factory=lambda: {"a": [], "b": []})
    requests: int = 0
    lookahead: int = 0
    behind: int = 0  # ticks by which the source topics' messages come after the commands
    is_replayed: bool = False  # each tick is applied a second time, to the same state: what comes of it is the same

    def step(
        self,
        rows: pa.Table | None = None,
        order: dict[str, object] | None = None,
        later: int = SECOND,
        pause: PauseChange | None = None,
        seals: bool = True,
        rebuilt: Rebuilt | None = None,
    ) -> Effects:
        self.now += later
        self.tick += 1
        self.seal_epoch += seals
        rows = MESSAGES.empty_table() if rows is None else rows
        before = self.load
        if seals:
            self.load, self.near = max(self.load, self.now + AHEAD_MILLIS), self.now + NEAR_MILLIS
        cutoff = min(self.now + self.lookahead, self.near - 1)
        tick = Tick(
            tick=self.tick,
            now=self.now,
            cutoff=cutoff,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id="r",
            confirmed=self.tick - 1,
            durable_through=max(0, self.seal_epoch - 1),
            ingested_through=self.tick - self.behind,
        )
        due = int64(self.sealed, "deliver_at")
        ordered = commands([order] if order else [])
        known = (
            where(self.came, int64(self.came, "entry_id") >= 0).select(KNOWN.names) if order else KNOWN.empty_table()
        )
        tick_input = TickInput(
            messages=rows,
            segment=where(self.sealed, (due >= before) & (due < self.load)),
            commands=ordered,
            request_ids={str(order["request_id"]): 1} if order else {pause.request_id: 1} if pause else {},
            known_messages=known,
            payload_rows=self.sealed if order else MESSAGES.empty_table(),
            pause_changes=[pause] if pause else [],
            rebuilt=rebuilt,
            **(resumed(self.sealed, "a", "b") if pause else {}),
        )
        copy = MemoryStore()
        copy.values = dict(self.store.values)
        effects = Shard(self.store, NAMES, 1_000_000, 1_000).apply(tick, tick_input)
        if self.is_replayed:
            again = Shard(copy, NAMES, 1_000_000, 1_000).apply(tick, tick_input)
            assert copy.values == self.store.values
            assert again.bucket.equals(effects.bucket)
        self.came = concat([self.came, rows])
        self.sealed = concat([self.sealed, effects.bucket])
        for release in effects.releases:
            due = int64(release.rows, "deliver_at")
            assert (due[1:] >= due[:-1]).all()
            for row in release.rows.to_pylist():
                for bit, name in enumerate(("a", "b")):
                    if row["subscription_mask"] >> bit & 1:
                        self.got[name].append((row["entry_id"], row["occurrence"], row["deliver_at"]))
        return effects

    def order(self, kind: str, entry: int, bits: tuple[int, ...] = (0, 1), at: int | None = None) -> list[int]:
        """Gives a command, and returns its results."""
        self.requests += 1
        named = command(f"r{self.requests}", 1, entry, bits, -1, at, kind=kind)
        results: list[int] = self.step(order=named).outcomes["result"].to_pylist()
        return results

    def pause(self, bits: int, is_paused: bool, later: int = SECOND) -> None:
        self.requests += 1
        self.step(pause=PauseChange(f"r{self.requests}", TOPIC, bits, is_paused), later=later)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.step()

    def numbers(self, name: str = "a", entry: int = 0) -> list[int | None]:
        return [number for of, number, _ in self.got[name] if of == entry]

    def times(self, name: str = "a", entry: int = 0) -> list[int]:
        return [due // SECOND for of, _, due in self.got[name] if of == entry]
