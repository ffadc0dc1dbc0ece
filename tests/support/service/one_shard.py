"""A job of one shard on tables, without Spark and broker, that may lose its checkpoint at any moment."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from checkpoint_from_tables.rebuild.context import RebuildContext
from checkpoint_from_tables.rebuild.delivered import Delivered, Times
from checkpoint_from_tables.rebuild.rebuild import rebuild
from streaming.checkpoint.prepared import PreparedState
from tests.support.tracker.messages import TOPIC, batches, command, commands
from tests.support.warehouse.rebuilt import of_all_shards, of_one_shard
from tracker.messages import MESSAGES, concat, where
from tracker.requests import first_of_tick
from tracker.schemas import PauseChange
from tracker.shard import Shard, StateOptions
from tracker.store import MemoryStore, Store
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput
from tracker.tick_failures import apply_without_failing_rows
from warehouse.audit.accounts import Audit, run_audit
from warehouse.delta.tables import Tables
from warehouse.queries.drained_rows import first_rounds
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.index_rows import (
    cancels_to_index,
    find_keyed_messages,
    find_known_messages,
    find_places,
    outcomes_to_rows,
    read_places,
    read_segment,
    to_index,
)
from warehouse.routes.membership import write_changes
from warehouse.schemas import DELIVERIES

NOW = 1_790_000_000_000
SECOND = 1_000
NAMES = ["a", "b"]
LOOKAHEAD, NEAR, AHEAD = 2_500, 6_000, 12_000


class Service:
    """A job of one shard on tables, whose releases arrive, and are written down, when a test says so."""

    def __init__(self, folder: Path, key_idle_millis: int = 600_000, expire_after: int | None = None) -> None:
        """Makes the job's tables.

        Args:
            expire_after: as the setting of the subscription `a`, ms.
        """
        self.key_idle_millis = key_idle_millis
        self.folder = folder
        self.expire_after = {} if expire_after is None else {0: expire_after}
        self.settings = of_one_shard(folder, TOPIC, [{"name": "a", "expire_after": expire_after}, "b"])
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()
        self.store = MemoryStore()
        self.now = NOW
        self.tick = self.seal_epoch = self.load = self.near = self.confirmed = self.durable = self.cutoff = 0
        self.marks: list[tuple[int, int, int]] = []
        self.cutoffs: dict[int, int] = {}  # by tick
        self.source: list[pa.Table] = []  # what is not acknowledged: it comes again
        self.in_flight: list[tuple[int, str, dict[str, Any]]] = []  # (tick, subscription, row)
        self.unwritten: list[dict[str, Any]] = []  # at the destinations, and not in `deliveries`
        self.arrived: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}  # (entry, occurrence)
        self.requests = 0
        self.is_contained = False  # as in the job: what a tick fails for is rejected, and not an error of the test
        self.removed = 0  # subscriptions that are not in the settings, as bits

    def step(
        self,
        rows: pa.Table | None = None,
        order: dict[str, Any] | None = None,
        pause: PauseChange | None = None,
        seals: bool = False,
        segment: pa.Table | None = None,
        **changes: Any,
    ) -> Effects:
        self.now += SECOND
        self.tick += 1
        before = self.load
        if seals or not self.seal_epoch:
            self.seal_epoch += 1
            self.marks.append((self.seal_epoch, self.tick, self.near))
            self.load, self.near = max(self.load, self.now + AHEAD), self.now + NEAR
            segment = self.segment(before) if segment is None else segment
        # As the clock does: what was due before the last epoch's `near` went unsealed.
        settled = self.cutoffs.get(self.confirmed, 0)
        while self.marks and self.marks[0][1] <= self.confirmed and self.marks[0][2] <= settled + 1:
            self.durable = self.marks.pop(0)[0]
        tick = Tick(
            tick=self.tick,
            now=self.now,
            cutoff=min(self.now + LOOKAHEAD, self.near - 1),
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id="r",
            confirmed=self.confirmed,
            durable_through=self.durable,
            ingested_through=self.tick,
        )
        self.cutoff = self.cutoffs[self.tick] = tick.cutoff
        new = MESSAGES.empty_table() if rows is None else rows
        if rows is not None:
            self.source.append(rows)
        ordered = commands([order] if order else [])
        version = self.tables.version("delayed_index")
        versions = [version, self.tables.version("entries"), self.tables.version("outcomes")]
        if order:
            changes["known_messages"] = find_known_messages(self.tables, versions, ordered, [])
            changes["payload_rows"] = concat(
                read_places(self.tables, version, find_places(self.tables, versions, ordered, []))
            )
        elif pause:
            changes |= self.first_rounds()
        tick_input = TickInput(
            messages=new,
            segment=MESSAGES.empty_table() if segment is None else segment,
            commands=ordered,
            request_ids={str(order["request_id"]): 1} if order else {pause.request_id: 1} if pause else {},
            pause_changes=[pause] if pause else [],
            message_requests=first_of_tick(new),
            first_answers=lambda ids: find_first_answers(self.tables, None, ids, self.now),
            find_keyed=partial(find_keyed_messages, self.tables, version),
            **changes,
        )
        subscriptions = Subscriptions(
            {TOPIC: NAMES}, {TOPIC: self.removed}, expire_after={TOPIC: self.expire_after} if self.expire_after else {}
        )

        def shard_on(store: Store) -> Shard:
            return Shard(store, subscriptions, 1_000_000, options=StateOptions(key_idle_millis=self.key_idle_millis))

        if self.is_contained:
            effects = apply_without_failing_rows(self.store, shard_on, tick, tick_input)
        else:
            effects = shard_on(self.store).apply(tick, tick_input)
        for index in (to_index(effects.bucket, self.tick), cancels_to_index(effects.cancels, self.tick)):
            if index.num_rows:
                self.tables.append("delayed_index", index, {})
        if effects.outcomes.num_rows:
            self.tables.append("outcomes", outcomes_to_rows(effects.outcomes, self.tick, self.now), {})
        if effects.entries.num_rows:
            self.tables.append("entries", effects.entries, {})
            durable = set(effects.entries["entry_id"].to_pylist())
            self.source = [table for table in self.source if not durable.issuperset(table["entry_id"].to_pylist())]
        for release in effects.releases:
            for row in release.rows.to_pylist():
                for bit, name in enumerate(NAMES):
                    if row["subscription_mask"] >> bit & 1:
                        self.in_flight.append((release.tick, name, row))
        return effects

    def first_rounds(self) -> dict[str, Any]:
        version = self.tables.version("delayed_index")
        rows, rounds = first_rounds(self.tables, version, [(TOPIC, name) for name in NAMES])
        return {"drained": rows, "rounds": rounds}

    def segment(self, start: int) -> pa.Table:
        return read_segment(self.tables, self.tables.version("delayed_index"), start, self.load)

    def arrive(self, chosen: list[bool], is_written: bool) -> None:
        """Some of what is in flight and due arrives: those chosen, in turn; what has arrived may be written down."""
        due = [one for one in self.in_flight if one[2]["deliver_at"] <= self.now]
        gone = [one for one, arrives in zip(due, itertools.cycle(chosen or [True])) if arrives]
        self.in_flight = [one for one in self.in_flight if not any(one is other for other in gone)]
        for _, name, row in gone:
            self.arrived[name].append((row["entry_id"], row["occurrence"]))
            self.unwritten.append({**row, "subscription": name, "sent_at": self.now, "batch_id": self.tick})
        if is_written:
            self.write()

    def write(self) -> None:
        if self.unwritten:
            rows = pa.Table.from_pylist([self._delivery(row) for row in self.unwritten], schema=DELIVERIES)
            self.tables.append("deliveries", rows, {})
        self.unwritten = []
        self.confirmed = min([self.tick, *(tick - 1 for tick, *_ in self.in_flight)])

    def _delivery(self, row: dict[str, Any]) -> dict[str, Any]:
        position = f"{row['ledger_id']}:{row['entry_id']}:-1:-1"
        at = max(row["deliver_at"], row["occurrence_at"] or 0)
        return {n: row.get(n) for n in DELIVERIES.names} | {"occurrence_at": at, "position": position}

    def order(self, kind: str, entry: int, bits: tuple[int, ...], at: int | None = None) -> list[int]:
        self.requests += 1
        row = command(f"r{self.requests}", 1, entry, bits, -1, at, kind=kind)
        results: list[int] = self.step(order=row).outcomes["result"].to_pylist()
        return results

    def pause(self, bits: int, is_paused: bool) -> None:
        """With its outcomes, by which a rebuild knows of it."""
        self.requests += 1
        self.step(pause=PauseChange(f"r{self.requests}", TOPIC, bits, is_paused))
        operation = "PAUSE" if is_paused else "RESUME"
        rows = [
            {
                **{"request_id": f"r{self.requests}", "topic": TOPIC, "subscription": name, "result": "APPLIED"},
                **{"operation": operation, "sequence": self.tick << 20, "ledger_id": -1, "applied_at": self.now},
            }
            for bit, name in enumerate(NAMES)
            if bits >> bit & 1
        ]
        schema = self.tables.sql("SELECT * FROM outcomes LIMIT 0").schema
        self.tables.append("outcomes", pa.Table.from_pylist(rows, schema=schema), {})

    def remove(self, bits: int) -> None:
        """From now on these subscriptions are not in the settings, and the others are."""
        of_topic = {
            name: "REMOVED" if bits >> n & 1 else "ADDED" if self.removed >> n & 1 else "KEPT"
            for n, name in enumerate(NAMES)
        }
        self.removed = bits
        changed = {"handed_out": self.now + LOOKAHEAD, "positions": {"-1": "1:99"}, "subscriptions": of_topic}
        write_changes(self.tables, {TOPIC: changed}, self.tick, self.now, f"w{self.tick}")

    def lose_checkpoint(self) -> None:
        """The job goes on with what a rebuild finds in the tables and at the destinations."""

        def found_at_destinations(context: RebuildContext, delivered: Delivered, overdue: Times, _: Any) -> int:
            rows = pa.Table.from_pylist([self._delivery(row) for row in self.unwritten], schema=DELIVERIES)
            for number, name in enumerate(NAMES):
                own = rows.filter(pa.compute.equal(rows["subscription"], name))
                # Of what is durable only what is overdue is looked for.
                since = overdue.get((TOPIC, number), self.now + 3_600_000)
                not_durable = {e for table in self.source for e in table["entry_id"].to_pylist()}
                for row in own.to_pylist():
                    assert row["sent_at"] >= since or row["entry_id"] in not_durable
                own = where(own, ~delivered.contains(number, own))
                delivered.add(own)
                if own.num_rows:
                    context.tables.append("deliveries", own, {})
            return int(rows.num_rows)

        self.now += SECOND
        folder = self.folder / f"checkpoint {self.tick}"
        with (
            mock.patch("checkpoint_from_tables.rebuild.rebuild.write_missing_deliveries", found_at_destinations),
            mock.patch("checkpoint_from_tables.rebuild.rejected._sent", return_value=()),
        ):
            rebuild(self.settings, self.tables, folder, now=self.now)
        prepared = PreparedState(folder)
        assert prepared.offset is not None
        self.store, self.tick, self.load = MemoryStore(), prepared.offset.tick, prepared.offset.load_horizon
        self.unwritten, self.in_flight, self.marks = [], [], []
        self.seal_epoch, self.durable, self.confirmed = 0, 0, self.tick
        again, self.source = self.source, []
        start = self.load
        self.load = self.now + AHEAD + SECOND
        segment, self.load = self.segment(start), start
        rounds = self.first_rounds()
        rebuilt = of_all_shards(prepared)
        self.step(concat(again) if again else None, seals=True, segment=segment, rebuilt=rebuilt, **rounds)

    def numbers(self, name: str, entry: int) -> list[int]:
        return [number for of, number in self.arrived[name] if of == entry]


def recurring(entry: int, start: int, repeat: str, **properties: str) -> pa.Table:
    of_message = {"repeat": repeat, "deliverAt": str(start), **properties}
    return batches([(1, entry, -1, 1, start)], publish_time=NOW, properties=list(of_message.items()), occurrence=1)


def run_audit_of_tables(service: Service) -> dict[str, Any]:
    return audit_of_tables(service).findings


def audit_of_tables(service: Service) -> Audit:
    with (
        mock.patch("warehouse.audit.broker_comparison.read_broker"),
        mock.patch("warehouse.audit.broker_comparison.compare") as compare,
    ):
        compare.return_value.not_seen = []
        return run_audit(service.settings, now=service.now)
