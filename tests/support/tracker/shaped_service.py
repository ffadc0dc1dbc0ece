"""Shards that shape what comes due for one of two subscriptions, with the clock and the buckets that they have."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from conf.shaping import Rate, Window
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.sinks.batch_sink import _waiting
from streaming.source.clock import _places
from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import concat, int64, where
from tracker.shaping.token_bucket import SHAPED, recorded, rule_of
from tracker.shard import Shard
from tracker.sharding import ShardId
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput
from tracker.wire.delaylake_pb2 import Result

START = 1_770_000_000_000
LOOKAHEAD, NEAR, LOAD = 1_000, 3_000, 6_000

NOTED = ["entry_id", "subscription_mask", "deliver_at", "shaped_from"]
Row = tuple[int, int, str, int, int | None]  # tick, entry, subscription, time, shaped from


class Service:
    """Shards with two subscriptions, `s` with the rule and `t` without, their clock and their buckets."""

    def __init__(
        self, rule: str | None, shards: int = 2, places_at_most: int = 1_000_000, expire_after: int | None = None
    ) -> None:
        self.places_at_most = places_at_most
        self.subscriptions = Subscriptions(
            {TOPIC: ["s", "t"]},
            shaping={TOPIC: {0: rule}} if rule else {},
            expire_after={TOPIC: {0: expire_after}} if expire_after else {},
        )
        self.stores = [MemoryStore() for _ in range(shards)]
        self.shard_ids = [ShardId(i, shards) for i in range(shards)]
        self.now, self.tick, self.seal_epoch, self.load, self.near = START, 0, 0, START, START
        self.run = self.cutoff = 0
        self.confirmed: int | None = None  # the last confirmed tick; None: the one before the last
        self.feedback = Feedback()
        self.sealed: list[pa.Table] = []
        self.moves: list[pa.Table] = []
        self.out: list[Row] = []
        self.again: list[Row] = []
        self.expired: list[tuple[int, str, int]] = []  # entry, subscription, when the outcome was made

    def step(self, millis: int, rows: pa.Table | None = None, **changes: Any) -> list[Effects]:
        self.now += millis
        self.tick += 1
        last = Offset(tick=self.tick - 1, cutoff=self.cutoff)
        ends = self.tick % 3 == 0 or self.now + LOOKAHEAD >= self.near
        load = max(self.load, self.now + LOAD) if ends else self.load
        self.near = max(self.near, self.now + NEAR) if ends else self.near
        self.seal_epoch += ends
        tick = Tick(
            tick=self.tick,
            cutoff=self.now + LOOKAHEAD,
            seal_epoch=self.seal_epoch,
            load_horizon=load,
            near_until=self.near,
            run_id=f"run{self.run}",
            confirmed=self.tick - 2 if self.confirmed is None else self.confirmed,
            durable_through=0,
            now=self.now,
            ingested_through=self.tick,
            places=_places(last, self.now, self.feedback, {}, self.places_at_most),
            sending=json.dumps({SHAPED: recorded(self.now, self.subscriptions.shaping)}),
        )
        self.cutoff = tick.cutoff
        rows = messages([]) if rows is None else rows
        sealed = self.sealed if load > self.load else []
        due = [int64(part, "deliver_at") for part in sealed]
        segment = concat(where(r, (d >= self.load) & (d < load)) for r, d in zip(sealed, due, strict=True))
        self.load = load
        rows_for_all = {name: changes[name] for name in ("payload_rows", "drained") if name in changes}
        found = []
        for shard_id, store in zip(self.shard_ids, self.stores, strict=True):

            def own(table: pa.Table, shard_id: ShardId = shard_id) -> pa.Table:
                return where(table, shard_id.has(table)) if table.num_rows else table

            changes |= {name: own(table) for name, table in rows_for_all.items()}
            tick_input = TickInput(messages=own(rows), segment=own(segment), **changes)
            effects = Shard(store, self.subscriptions, 1_000_000, shard_id=shard_id).apply(tick, tick_input)
            self._note(effects)
            found.append(effects)
        self.feedback = Feedback(waiting=(self.tick, _waiting([effects.waiting for effects in found])))
        self.sealed += [effects.bucket for effects in found if effects.bucket.num_rows]
        self.moves += [effects.cancels for effects in found if effects.cancels.num_rows]
        return found

    def _note(self, effects: Effects) -> None:
        for row in effects.outcomes.to_pylist():
            if row["result"] == Result.EXPIRED:
                self.expired.append((row["entry_id"], row["subscription"], row["issued_at"]))
        for release in effects.releases:
            for row in release.rows.select(NOTED).to_pylist():
                for number, name in enumerate("st"):
                    if row["subscription_mask"] >> number & 1:
                        at = max(row["deliver_at"], self.now)
                        one = (release.tick, row["entry_id"], name, at, row["shaped_from"])
                        (self.out if release.tick == self.tick else self.again).append(one)

    def run_until(self, time: int, step: int = 400) -> None:
        while self.now < time:
            self.step(step)

    def run_until_some_wait(self, step: int) -> None:
        """Runs until more is due than there are places for."""
        while not any(effects.waiting for effects in self.step(step)):
            pass

    def run_out(self, n: int) -> None:
        """Runs until n messages have gone to `s`, and some time more."""
        end = self.now + 600_000
        while len(self.of("s")) < n and self.now < end:
            self.step(900)
        self.run_until(self.now + 3_000, step=900)

    def of(self, name: str) -> list[Row]:
        return [row for row in self.out if row[2] == name]


def rate(messages_per_second: float, burst: int | None = None, per: str = "subscription") -> str:
    rule = rule_of(Rate.model_validate({"messages_per_second": messages_per_second, "burst": burst, "per": per}), ())
    assert rule is not None
    return rule


# START is a Monday, 02:40 UTC.
CLOSED = rule_of(None, [Window.model_validate({"from": "02:41"})])


def many(n: int, due: int, first: int = 0, **columns: object) -> pa.Table:
    return messages([(7, first + i, due) for i in range(n)], **columns)
