"""Recurring messages and lost checkpoints: what is in flight is neither lost nor doubled, and numbers go on."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from recovery.rebuild.done_occurrences import Done
from recovery.rebuild.rebuild import rebuild
from recovery.rebuild.recurring.schedules import next_number
from streaming.checkpoint.prepared import PreparedState
from tests.support.tracker.messages import TOPIC, batches, command, commands
from tests.support.warehouse.rebuilt import of_all_shards, of_one_shard
from tracker.commands.schema import (
    CANCEL,
    PAUSE_SCHEDULE,
    RESCHEDULE,
    RESUME_SCHEDULE,
    SKIP,
    SKIP_NEXT,
    PauseChange,
)
from tracker.messages import MESSAGES, concat, where
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, Tick, TickInput
from tracker.wire.delaylake_pb2 import Result
from warehouse.audit.accounts import Audit, run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.retention import LAST_OCCURRENCES_MILLIS
from warehouse.queries.index_rows import (
    cancels_to_index,
    find_held,
    find_keyed_messages,
    find_known_messages,
    find_rows,
    outcomes_to_rows,
    read_segment,
    to_index,
)
from warehouse.routes.tenure import write_changes
from warehouse.schemas import DELIVERIES
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

NOW = 1_790_000_000_000
SECOND = 1_000
NAMES = ["a", "b"]
LOOKAHEAD, NEAR, AHEAD = 2_500, 6_000, 12_000


class Service:
    """A job of one shard on tables, whose releases arrive, and are written down, when a test says so."""

    def __init__(self, folder: Path, key_idle_millis: int = 600_000) -> None:
        self.key_idle_millis = key_idle_millis
        self.folder = folder
        self.settings = of_one_shard(folder, TOPIC, NAMES)
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
            changes["payload_rows"] = find_rows(self.tables, versions, ordered, [])
        elif pause:
            changes["payload_rows"] = find_held(self.tables, version, [(TOPIC, name) for name in NAMES])
        tick_input = TickInput(
            messages=new,
            segment=MESSAGES.empty_table() if segment is None else segment,
            commands=ordered,
            request_ids={str(order["request_id"]): 1} if order else {pause.request_id: 1} if pause else {},
            pause_changes=[pause] if pause else [],
            find_keyed=partial(find_keyed_messages, self.tables, version),
            **changes,
        )
        subscriptions = Subscriptions({TOPIC: NAMES}, {TOPIC: self.removed})
        shard = Shard(self.store, subscriptions, 1_000_000, key_idle_millis=self.key_idle_millis)
        effects = shard.apply(tick, tick_input)
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

        def found_at_destinations(_: Any, tables: Tables, delivered: Any, *rest: Any) -> int:
            overdue = rest[1]
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
                    tables.append("deliveries", own, {})
            return rows.num_rows

        self.now += SECOND
        folder = self.folder / f"checkpoint {self.tick}"
        with mock.patch("recovery.rebuild.rebuild.write_missing_deliveries", found_at_destinations):
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
        held = find_held(self.tables, self.tables.version("delayed_index"), [(TOPIC, name) for name in NAMES])
        rebuilt = of_all_shards(prepared)
        self.step(concat(again) if again else None, seals=True, segment=segment, rebuilt=rebuilt, payload_rows=held)

    def numbers(self, name: str, entry: int) -> list[int]:
        return [number for of, number in self.arrived[name] if of == entry]


def recurring(entry: int, start: int, repeat: str, **properties: str) -> pa.Table:
    of_message = {"repeat": repeat, "deliverAt": str(start), **properties}
    return batches([(1, entry, -1, 1, start)], publish_time=NOW, properties=list(of_message.items()), occurrence=1)


@pytest.mark.parametrize(
    ("done", "first_due", "number"),
    [
        ({}, 0, 1),
        ({1: 5}, 0, 2),
        ({1: 5, 3: 7}, 0, 2),
        ({2: 5}, 0, 1),
        ({1: 0, 5: 1, 6: LAST_OCCURRENCES_MILLIS + 1, 7: LAST_OCCURRENCES_MILLIS + 2}, 0, 8),
        ({6: LAST_OCCURRENCES_MILLIS + 10, 8: LAST_OCCURRENCES_MILLIS + 20}, 0, 7),
    ],
)
def test_the_first_number_that_is_missing_counts_and_not_what_retention_has_removed(
    done: dict[int, int], first_due: int, number: int
) -> None:
    assert next_number({n: Done(at, at) for n, at in done.items()}, first_due) == number


def test_what_was_skipped_rescheduled_and_has_ended_stays_so_after_a_lost_checkpoint(tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(0, start, "@every 60s"), recurring(1, start, "@every 60s", repeatTimes="1")]))
    service.step(recurring(2, start, "@every 60s"))
    for _ in range(4):
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(SKIP_NEXT, 0, (0, 1)) == [Result.APPLIED] * 2
    assert service.order(RESCHEDULE, 2, (0,), NOW + 20 * SECOND) == [Result.APPLIED]
    assert service.order(CANCEL, 2, (1,), start) == [Result.APPLIED]
    for _ in range(3):
        service.lose_checkpoint()
    for n in range(140):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1, 3]
    assert service.numbers("a", 1) == service.numbers("b", 1) == [1]
    assert service.numbers("b", 2) == [1]
    assert service.numbers("a", 2) == [1, 2, 3]


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("is_sealed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_is_paused_stays_so_after_a_lost_checkpoint_until_it_is_resumed(
    tmp_path: Path, is_durable: bool, is_sealed: bool
) -> None:
    """Paused before the first occurrence, after it, and skipped or cancelled while paused; durable or not."""
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(n, start, "@every 20s", misfire="all") for n in range(3)]))
    service.step(concat([recurring(n, NOW + 40 * SECOND, "@every 20s", misfire="all") for n in (3, 4)]))
    for _ in range(6):
        service.step(seals=is_durable)
        service.arrive([True], True)
    for entry in range(4):
        assert service.order(PAUSE_SCHEDULE, entry, (0,)) == [Result.APPLIED]
    assert service.order(SKIP_NEXT, 1, (0,)) == [Result.APPLIED]
    assert service.order(CANCEL, 2, (0,), start) == [Result.APPLIED]
    service.step(seals=is_sealed)
    assert bool(service.source) is not is_durable
    for _ in range(2):
        service.lose_checkpoint()
    for n in range(60):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    service.lose_checkpoint()
    assert [service.numbers("a", entry) for entry in range(4)] == [[1], [1], [1], []]
    assert service.numbers("a", 4) == service.numbers("b", 4) == service.numbers("b", 3) == [1, 2]
    results = [service.order(RESUME_SCHEDULE, entry, (0,)) for entry in range(4)]
    assert results == [[Result.APPLIED], [Result.APPLIED], [Result.INVALID], [Result.APPLIED]]
    service.lose_checkpoint()
    for n in range(30):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    for entry in range(5):
        b = service.numbers("b", entry)
        assert service.numbers("a", entry) == {1: [b[0], *b[2:]], 2: [1]}.get(entry, b)
    findings = run_audit_of_tables(service)
    assert findings == {}, findings


@pytest.mark.parametrize("misfire", ["once", *(pytest.param(one, marks=pytest.mark.long) for one in ("all", "skip"))])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_resume_and_a_lost_checkpoint_are_as_a_resume(tmp_path: Path, misfire: str, is_lost: bool) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, NOW + 3 * SECOND, "@every 100s", misfire=misfire))
    for _ in range(8):
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    while service.now < NOW + 380 * SECOND:
        service.step(seals=True)
        service.arrive([True], True)
    assert service.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    if is_lost:
        service.in_flight = [one for one in service.in_flight if one[1] == "b"]
        service.lose_checkpoint()
    for n in range(10):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
    assert service.numbers("a", 0) == {"once": [1, 2], "all": [1, 2, 3, 4], "skip": [1]}[misfire]
    while service.now < NOW + 410 * SECOND:
        service.step(seals=True)
        service.arrive([True], True)
    assert service.numbers("a", 0) == {"once": [1, 2, 3], "all": [1, 2, 3, 4, 5], "skip": [1, 2]}[misfire]


@pytest.mark.parametrize("misfire", ["all", "once"])
def test_nothing_was_missed_before_a_message_was_published_also_for_a_rebuild(tmp_path: Path, misfire: str) -> None:
    service = Service(tmp_path)
    service.step(recurring(0, NOW // SECOND, "@every 20s", misfire=misfire))  # seconds for ms: in 1970
    for n in range(30):
        service.step(seals=n % 4 == 0)
        service.arrive([True], True)
        if n in (2, 8, 15):
            service.lose_checkpoint()
    assert service.numbers("a", 0) == service.numbers("b", 0) == [1, 2]


def test_a_later_occurrence_stays_rescheduled_or_skipped_although_its_message_comes_in_again(tmp_path: Path) -> None:
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(n, start, "@every 20s") for n in range(4)]))
    for _ in range(5):
        service.step()
        service.arrive([True], True)
    assert service.order(RESCHEDULE, 0, (0,), NOW + 35 * SECOND) == [Result.APPLIED]  # due at 23
    assert service.order(RESCHEDULE, 1, (0,), NOW + 15 * SECOND) == [Result.APPLIED]
    assert service.order(SKIP_NEXT, 2, (0,)) == [Result.APPLIED]
    assert service.order(RESCHEDULE, 3, (0,), NOW + 16 * SECOND) == [Result.APPLIED]
    assert service.order(RESCHEDULE, 3, (0,), NOW + 90 * SECOND) == [Result.APPLIED]
    assert service.source
    for _ in range(2):
        service.lose_checkpoint()
    due: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for n in range(80):
        service.step(seals=n % 4 == 0)
        for _, name, row in service.in_flight:
            of = due.setdefault((name, row["entry_id"]), [])
            if (one := (row["occurrence"], (row["deliver_at"] - NOW) // SECOND)) not in of:
                of.append(one)
        service.arrive([True], True)
    assert due["a", 0][:3] == [(2, 35), (3, 43), (4, 63)]
    assert due["a", 1][:3] == [(2, 15), (3, 43), (4, 63)]
    assert due["a", 2][:2] == [(3, 43), (4, 63)]
    assert due["a", 3] == [(2, 90)]
    for entry in range(4):
        assert due["b", entry][:2] == [(2, 23), (3, 43)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_due_while_a_subscription_was_not_there_ends_its_schedule(tmp_path: Path, is_lost: bool) -> None:
    """With the job's own state as after a lost checkpoint."""
    service = Service(tmp_path)
    start = NOW + 3 * SECOND
    service.step(concat([recurring(0, start, "@every 20s"), recurring(1, start, "@every 90s")]))

    def go_on(steps: int) -> None:
        for n in range(steps):
            service.step(seals=n % 4 == 0)
            service.arrive([True], True)

    go_on(8)
    service.remove(1)
    go_on(30)
    service.remove(0)
    go_on(4)
    if is_lost:
        service.lose_checkpoint()
    go_on(60)
    assert service.numbers("a", 0) == [1]
    assert service.numbers("b", 0)[:5] == [1, 2, 3, 4, 5]
    assert service.numbers("a", 1) == service.numbers("b", 1) == [1, 2]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_moved_and_came_due_while_a_subscription_was_not_there_does_not_come(
    tmp_path: Path, is_lost: bool
) -> None:
    """Of messages that do not recur, and of first occurrences."""
    service = Service(tmp_path)
    once = [(1, entry, -1, 1, NOW + 3_600 * SECOND) for entry in (0, 1)]
    service.step(concat([batches(once, publish_time=NOW), recurring(2, NOW + 30 * SECOND, "@every 300s")]))

    def go_on(steps: int) -> None:
        for n in range(steps):
            service.step(seals=n % 4 == 0)
            service.arrive([True], True)

    go_on(8)
    for entry, seconds in ((0, 25), (1, 60), (2, 26)):
        assert service.order(RESCHEDULE, entry, (0, 1), NOW + seconds * SECOND) == [Result.APPLIED] * 2
    go_on(2)
    service.remove(1)
    go_on(20)
    service.remove(0)
    if is_lost:
        service.lose_checkpoint()
    go_on(50)
    assert [entry for entry, _ in service.arrived["a"]] == [1]
    assert [entry for entry, _ in service.arrived["b"]] == [0, 2, 1]
    waiting = Warehouse(service.settings).sql("SELECT subscription, entry_id FROM pending")
    assert waiting.to_pylist() == [{"subscription": "b", "entry_id": 2}]
    findings = run_audit_of_tables(service)
    assert findings == {}, findings


def test_what_was_skipped_and_is_read_again_after_a_lost_checkpoint_is_counted_when_it_is_durable(
    tmp_path: Path,
) -> None:
    """A rebuild removes its rows, and what is past gets none; so until it is durable no table has it."""
    service = Service(tmp_path)
    service.step(batches([(1, 0, -1, 1, NOW + 36 * SECOND)], publish_time=NOW))
    assert service.order(SKIP, 0, (0, 1)) == [Result.APPLIED] * 2
    service.now += 60 * SECOND
    service.lose_checkpoint()
    assert service.source
    counts: list[list[int]] = []
    while service.source and len(counts) < 20:
        audit = audit_of_tables(service)
        assert audit.findings == {}
        counts.append([row["taken_back"] for row in audit.counts])
        service.step(seals=len(counts) % 4 == 0)
        service.arrive([True], True)
    assert counts == [[]] * len(counts)
    assert [row["taken_back"] for row in audit_of_tables(service).counts] == [1, 1]
    assert service.arrived == {"a": [], "b": []}


def run_audit_of_tables(service: Service) -> dict[str, Any]:
    return audit_of_tables(service).findings


def audit_of_tables(service: Service) -> Audit:
    with (
        mock.patch("warehouse.audit.broker_comparison.read_broker"),
        mock.patch("warehouse.audit.broker_comparison.compare") as compare,
    ):
        compare.return_value.not_seen = []
        return run_audit(service.settings, now=service.now)
