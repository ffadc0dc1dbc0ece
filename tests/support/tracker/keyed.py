"""Messages with schedule keys, and several shards with a source that gives each of them its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming.batch_schema import by_message_and_home
from tests.support.tracker.messages import TOPIC, batches, command, commands, resumed
from tracker.commands.kinds import CANCEL, KINDS_WITH_PAYLOAD
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.keys import cold_keys
from tracker.keys.live_keys import KEYED
from tracker.messages import MESSAGES, concat, int64, typed, where
from tracker.rebuilt import Rebuilt
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard, StateOptions
from tracker.sharding import ShardId, shard_of, shards_of
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Tick, TickInput
from tracker.wire.delaylake_pb2 import Result

NAMES = {TOPIC: ["a", "b"]}
NEAR_MILLIS, AHEAD_MILLIS = 500, 2_000


def keyed(
    entry: int, key: str | None, due: int, published: int, index: int = -1, size: int = 1, **rule: str
) -> pa.Table:
    properties = [("scheduleKey", key), *rule.items()] if key is not None else []
    return batches([(1, entry * 64, index, size, due)], publish_time=published, properties=properties, schedule_key=key)


class Job:
    """Shards of which each gets what the source gives it; what they seal is loaded again.

    With `is_replayed` each tick is applied a second time, to the same state: what comes of it is the same.
    """

    def __init__(
        self,
        shards: int = 3,
        ahead_millis: int = AHEAD_MILLIS,
        idle_millis: int = 600_000,
        is_replayed: bool = False,
    ) -> None:
        self.is_replayed = is_replayed
        self.ahead_millis = ahead_millis
        self.idle_millis = idle_millis
        self.subscriptions = Subscriptions(NAMES)
        self.stores = [MemoryStore() for _ in range(shards)]
        self.n = shards
        self.tick = self.now = self.seal_epoch = self.load = self.near = self.durable = 0
        self.sealed = MESSAGES.empty_table()
        self.entries: list[tuple[int, int]] = []
        self.delivered: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
        self.outcomes: list[dict[str, object]] = []
        self.n_looked_up = 0
        self.has_all_come = True  # what was published before the commands
        self.rebuilt: Rebuilt | None = None  # each shard's, for the next tick

    def lose_checkpoint(self, rebuilt: Rebuilt) -> None:
        """A new state begins, in which all messages come again: only the rows of moves stay in the tables."""
        self.stores, self.rebuilt, self.has_all_come = [MemoryStore() for _ in self.stores], rebuilt, False
        self.sealed = self.sealed.filter(pc.is_valid(self.sealed["sequence"]))

    def step(
        self,
        rows: pa.Table | None = None,
        orders: list[dict[str, object]] = (),  # type: ignore[assignment]
        later: int = 0,
        pauses: list[PauseChange] = (),  # type: ignore[assignment]
        known: pa.Table = KNOWN.empty_table(),  # noqa: B008
    ) -> list[dict[str, object]]:
        """A tick of all shards, which ends a seal epoch; returns its outcomes.

        Args:
            known: as KNOWN: what the tables have of the entries that the orders name.
        """
        self.now += later
        self.tick += 1
        self.seal_epoch += 1
        rows = MESSAGES.empty_table() if rows is None else rows
        before, self.load = self.load, max(self.load, self.now + self.ahead_millis)
        self.near = self.now + NEAR_MILLIS
        tick = Tick(
            tick=self.tick,
            now=self.now,
            cutoff=self.now,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id="r",
            confirmed=self.tick - 1,
            durable_through=self.durable,
            ingested_through=self.tick if self.has_all_come else -1,
        )
        due = int64(self.sealed, "deliver_at")
        sealed = self.sealed

        def find_keyed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
            self.n_looked_up += 1
            keys = pa.array({key for _, key in names}, pa.string())
            is_there = pc.and_(pc.is_in(sealed["schedule_key"], keys), pc.is_null(sealed["sequence"]))
            of_group = np.isin(cold_keys.group_of(due), groups)
            return typed(sealed.filter(pc.and_(is_there, pa.array(of_group))), KEYED)

        segment = where(self.sealed, (due >= before) & (due < self.load))
        ordered = commands(orders)
        told = []
        new = []
        for number, store in enumerate(self.stores):
            copy = MemoryStore()
            copy.values = dict(store.values)

            def of(table: pa.Table, number: int = number) -> pa.Table:
                return where(table, shards_of(table, self.n) == number) if table.num_rows else table

            homes = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), self.n)
            elsewhere = where(rows, (homes == number) & (shards_of(rows, self.n) != number)).select(
                ENTRY_LOG_ROWS.names
            )
            copied = where(ordered, (shards_of(ordered, self.n) != number) & (int64(ordered, "ledger_id") >= 0))
            has_payload = any(o["kind"] in KINDS_WITH_PAYLOAD for o in orders)
            payload = self.sealed if has_payload else MESSAGES.empty_table()
            going_out = resumed(of(self.sealed), *NAMES[TOPIC]) if pauses else {}
            tick_input = TickInput(
                messages=of(rows),
                elsewhere=elsewhere,
                segment=of(segment),
                commands=pa.concat_tables([of(ordered), copied]),
                request_ids={str(o["request_id"]): 1 for o in orders} | {p.request_id: 1 for p in pauses},
                known_messages=dict(by_message_and_home(known, self.n)).get(number, known.slice(0, 0)),
                payload_rows=of(payload),
                pause_changes=pauses,
                find_keyed=find_keyed,
                rebuilt=self.rebuilt,
                **going_out,
            )
            effects = self._shard(store, number).apply(tick, tick_input)
            if self.is_replayed:
                again = self._shard(copy, number).apply(tick, tick_input)
                assert again.outcomes.equals(effects.outcomes)
                assert again.bucket.equals(effects.bucket)
                assert copy.values == store.values
            new.append(effects.bucket)
            told += effects.outcomes.to_pylist()
            self.entries += zip(*(effects.entries[n].to_pylist() for n in ("ledger_id", "entry_id")), strict=True)
            for release in effects.releases:
                for row in release.rows.to_pylist():
                    for bit, name in enumerate(("a", "b")):
                        if row["subscription_mask"] >> bit & 1:
                            self.delivered[name].append((row["entry_id"] // 64, max(row["batch_index"], 0)))
        self.rebuilt = None
        self.sealed = concat([self.sealed, *new])
        self.outcomes += told
        return told

    def _shard(self, store: MemoryStore, number: int) -> Shard:
        options = StateOptions(key_idle_millis=self.idle_millis)
        return Shard(store, self.subscriptions, 1_000_000, 1_000, options, ShardId(number, self.n))

    def all_entries(self) -> list[tuple[int, int]]:
        """The entries that are written down once everything is durable."""
        self.durable = self.seal_epoch
        self.step()
        return sorted(self.entries)

    def superseded(self) -> set[tuple[int, str]]:
        """(entry, the entry that it yields to) of what was superseded for both subscriptions."""
        found: dict[tuple[int, str], set[str]] = {}
        for row in self.outcomes:
            if row["result"] == Result.SUPERSEDED and row["subscription"] != "*":
                other = str(int(str(row["superseded_by"]).split(":")[1]) // 64)
                names = found.setdefault((row["entry_id"] // 64, other), set())  # type: ignore[operator]
                assert row["subscription"] not in names
                names.add(str(row["subscription"]))
        assert all(names == {"a", "b"} for names in found.values())
        return set(found)


def by_key(
    request: str, key: str, kind: str = CANCEL, at: int = 0, subscriptions: tuple[int, ...] = (0, 1)
) -> dict[str, object]:
    return command(request, -1, -1, subscriptions, kind=kind, cancel_at=at) | {"schedule_key": key}


def entries(job: Job, name: str) -> list[int]:
    return sorted(entry for entry, _ in job.delivered[name])


def recurring(entry: int, due: int, published: int) -> pa.Table:
    properties = [("scheduleKey", "k"), ("repeat", "@every 10s"), ("deliverAt", str(due))]
    return batches(
        [(1, entry * 64, -1, 1, due)],
        publish_time=published,
        properties=properties,
        schedule_key="k",
        occurrence=1,
    )
