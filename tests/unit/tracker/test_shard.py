"""A shard with the service's clock: when entries are durable, and what a seal leaves in state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import Clock, ClockSettings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.fake_index import FakeIndex
from tests.support.tracker.messages import TOPIC, batches, command, commands, messages, positions, tick_at
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.commands.kinds import RESCHEDULE, RESTORE
from tracker.messages import concat, int64
from tracker.rebuilt import NOT_TO_DELIVER, Rebuilt
from tracker.schemas import COMMAND_ROWS, KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result

START = 1_000_000
HOUR = 3_600_000
SETTINGS = ClockSettings("run0", lookahead_millis=400, seal_interval_millis=1_500, load_ahead_millis=6_000)

Entry = tuple[bool, list[int]]  # rejected; the delay of each message


class Service:
    """A shard and its clock. `fate` has the bucket or the release that each message went into."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = Clock(SETTINGS)
        self.offset = Offset()
        self.now, self.monotonic = START, 0.0
        self.runs = 0
        self.cutoffs = {0: 0}
        self.confirmed = 0
        self.due: dict[tuple[int, int], int] = {}
        self.sealed: list[pa.Table] = []
        self.in_bucket: set[tuple[int, int]] = set()
        self.released: dict[tuple[int, int], int] = {}
        self.durable: list[int] = []

    def restart(self) -> None:
        self.runs += 1
        self.clock = Clock(replace(SETTINGS, run_id=f"run{self.runs}"))

    def step(self, later: int, entries: list[Entry], lag: int, moves: dict[int, int] | None = None) -> Effects:
        """A tick; `moves` has by entry after which delay its messages are to come, if they wait."""
        self.now += later
        self.monotonic += later / 1000
        last = self.offset
        self.confirmed = max(self.confirmed, last.tick - lag)
        feedback = Feedback(self.confirmed, self.cutoffs[self.confirmed])
        self.offset = self.clock.next(last, Moment(self.now, self.monotonic), feedback, FakeIndex(self.rows_due))
        self.cutoffs[self.offset.tick] = self.offset.cutoff
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((due >= last.load_horizon) & (due < self.offset.load_horizon)))
        tick_input = TickInput(messages=concat([self.come(entry) for entry in entries]), segment=segment)
        for entry_id, delay in (moves or {}).items():
            rows = stored.filter(pc.equal(stored["entry_id"], entry_id))
            row = command("", 1, entry_id, cancel_at=self.now + delay, kind=RESCHEDULE)
            row["request_id"] = f"{last.tick} {entry_id}"
            tick_input = replace(
                tick_input,
                commands=concat([tick_input.commands, commands([row])], COMMAND_ROWS),
                request_ids={**tick_input.request_ids, str(row["request_id"]): 1},
                payload_rows=concat([tick_input.payload_rows, rows]),
            )
        effects = Shard(self.store, {TOPIC: ["s"]}, 8).apply(self.offset.to_tick(), tick_input)
        self.sealed.append(effects.bucket)
        self.in_bucket.update(numbers(effects.bucket))
        for release in effects.releases:
            if release.tick == self.offset.tick:
                self.released.update(dict.fromkeys(numbers(release.rows), release.tick))
        self.durable += effects.entries["entry_id"].to_pylist()
        return effects

    def come(self, entry: Entry) -> pa.Table:
        is_rejected, delays = entry
        number = 1 + max((entry_id for entry_id, _ in self.due), default=-1)
        size = len(delays)
        rows = []
        for i, delay in enumerate(delays):
            self.due[number, i] = self.now + delay
            rows.append((1, number, -1 if size == 1 else i, size, self.now + delay))
        return batches(rows, reason="bad" if is_rejected else None)

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        due = int64(concat(self.sealed), "deliver_at")
        return sorted(Counter((due[(due >= start) & (due < end)] // SLOT_MILLIS).tolist()).items())

    def is_settled(self, message: tuple[int, int]) -> bool:
        return message in self.in_bucket or self.released.get(message, self.offset.tick) <= self.offset.confirmed


def numbers(rows: pa.Table) -> list[tuple[int, int]]:
    return [
        (entry, max(i, 0)) for entry, i in zip(*(rows[c].to_pylist() for c in ("entry_id", "batch_index")), strict=True)
    ]


ENTRY = st.tuples(
    st.sampled_from([False, False, False, True]), st.lists(st.integers(-1_000, 12_000), min_size=1, max_size=3)
)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2_500),
            st.lists(ENTRY, max_size=4),
            st.integers(0, 4),
            st.booleans(),
            st.dictionaries(st.integers(0, 40), st.integers(0, 5_000), max_size=2),
        ),
        min_size=5,
        max_size=25,
    )
)
@example(  # moved from a time that is near to another
    [
        (0, [], 0, False, {}),
        (100, [(False, [1_900])], 0, False, {}),
        (1_450, [], 0, False, {}),
        (50, [], 0, False, {0: 2_000}),
        *[(700, [], 0, False, {})] * 3,
    ]
)
def test_entries_are_durable_once_when_all_of_their_messages_are_settled(
    steps: list[tuple[int, list[Entry], int, bool, dict[int, int]]],
) -> None:
    """Settled: in a bucket that is sealed, or in a release that is confirmed. In the end all are durable."""
    service = Service()
    for later, entries, lag, restarts, moves in steps:
        if restarts:
            service.restart()
        before = len(service.durable)
        service.step(later, entries, lag, {entry: delay for entry, delay in moves.items() if entry < len(service.due)})
        for entry in service.durable[before:]:
            assert all(service.is_settled(message) for message in service.due if message[0] == entry)
    for _ in range(12):
        service.step(1_500, [], 0)
    assert Counter(service.durable) == Counter({entry for entry, _ in service.due})
    assert service.released.keys() == service.due.keys()
    assert not {"slots", "mutable", "index_bits", "in_flight", "entries"} & {table for table, _ in service.store.values}


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2_500), st.lists(ENTRY, max_size=4)), min_size=5, max_size=20))
def test_after_a_seal_only_what_is_within_the_horizon_is_in_state(steps: list[tuple[int, list[Entry]]]) -> None:
    service = Service()
    for later, entries in steps:
        seal_epoch = service.offset.seal_epoch
        status = service.step(later, entries, 0).status
        waiting = [due for message, due in service.due.items() if message not in service.released]
        assert status["delayed"] == len(waiting)
        if service.offset.seal_epoch > seal_epoch:
            assert status["loaded"] == sum(due < service.offset.load_horizon for due in waiting)


def test_a_full_mutable_bucket_is_sealed_before_the_seal_epoch_ends() -> None:
    service = Service()
    service.step(0, [], 0)
    assert service.step(1, [(False, [20_000])] * 7, 0).bucket.num_rows == 0
    assert service.step(1, [(False, [20_000])], 0).bucket.num_rows == 8
    assert service.offset.seal_epoch == 1


def test_known_positions_are_forgotten_when_their_ledger_is_past() -> None:
    service = Service()
    service.step(0, [(False, [3_000]), (False, [5_000])], 0)
    service.step(4_000, [], 0)
    assert ("index_bits", (1, 0)) in service.store.values
    service.step(2_000, [], 0)
    assert ("index_bits", (1, 0)) not in service.store.values


def test_a_shard_names_the_order_of_its_releases() -> None:
    """What came in too late to be planned goes out apart from what was."""
    service = Service()
    service.step(0, [(False, [1_000])], 0)
    releases = service.step(1_000, [(True, [9_000]), (False, [-5]), (False, [0])], 0).releases
    assert [(r.kind, positions(r.rows)) for r in releases] == [
        (False, [(1, 2), (1, 3), (1, 1)]),
        (True, [(1, 0)]),
    ]
    assert messages([]).schema.names == releases[0].rows.schema.names[:-1]


def test_after_a_rebuild_nothing_that_is_past_is_moved_or_restored() -> None:
    """Of what was delivered before the first message that waits, a shard knows no more than that it is past."""
    names = {TOPIC: ["s"]}
    past = messages([(1, 0, START - 1), (1, 1, START)])
    given = pa.Table.from_pylist(
        [
            {
                **{"request_id": f"r{entry}", "kind": RESCHEDULE, "operation": "RESCHEDULE", "topic": TOPIC},
                **{"partition": -1, "subscriptions": 1, "ledger_id": 1, "entry_id": entry, "batch_index": -1},
                "deliver_at": START + 60_000,
            }
            for entry in (0, 1)
        ],
        COMMAND_ROWS,
    )
    tick_input = TickInput(
        commands=given,
        request_ids={"r0": 1, "r1": 1},
        known_messages=past.select(KNOWN.names),
        payload_rows=past,
        rebuilt=Rebuilt(sealed=1, released=START - 1),
    )
    tick = Offset(tick=1, now=START, cutoff=START - 1, seal_epoch=1, load_horizon=START + 1, run_id="r").to_tick()
    outcomes = Shard(MemoryStore(), names, 8).apply(tick, tick_input).outcomes
    assert [Result.Name(result) for result in outcomes["result"].to_pylist()] == ["TOO_LATE", "APPLIED"]


@pytest.mark.parametrize("restored", ["never", "before", "with", "after"])
def test_what_was_cancelled_before_a_rebuild_and_comes_again_can_be_restored(restored: str) -> None:
    """By a command that came before it, in its batch, or later."""
    cancelled = pa.Table.from_pylist(
        [{"subscription": 0, "ledger_id": 1, "entry_id": 0, "batch_index": -1, "until": START + HOUR}], NOT_TO_DELIVER
    )
    restore = {
        "commands": commands([command("r", 1, 0, kind=RESTORE)]),
        "request_ids": {"r": 1},
    }
    store = MemoryStore()
    ticks = {"before": 1, "with": 2, "after": 3}
    told: list[str] = []
    delayed: list[int] = []

    def step(tick: int, now: int, **given: Any) -> list[int]:
        at = Offset(
            tick=tick, now=now, cutoff=now, seal_epoch=tick, load_horizon=now + HOUR, run_id="r", ingested_through=0
        ).to_tick()
        given = {"messages": messages([])} | (restore if ticks.get(restored) == tick else {}) | given
        effects = Shard(store, {TOPIC: ["s"]}, 8).apply(at, TickInput(**given))
        told.extend(Result.Name(result) for result in effects.outcomes["result"].to_pylist())
        delayed.append(effects.status["delayed"])
        return [entry for release in effects.releases if release.tick == tick for _, entry in positions(release.rows)]

    assert step(1, START, rebuilt=Rebuilt(cancelled=cancelled, released=START - 1)) == []
    assert step(2, START + 1, messages=messages([(1, 0, START + 1_000)])) == []
    assert step(3, START + 2) == []
    assert step(4, START + 1_000) == ([] if restored == "never" else [0])
    assert told == {"never": [], "before": ["WAITING", "APPLIED"]}.get(restored, ["APPLIED"])
    waits = [False, restored in ("before", "with"), restored != "never"]
    assert delayed[:3] == [int(is_waiting) for is_waiting in waits]


def test_a_tick_tells_which_subscriptions_are_paused() -> None:
    store = MemoryStore()

    def paused(tick: int, removed: int, *changes: PauseChange) -> dict[str, list[str]]:
        subscriptions = Subscriptions({TOPIC: ["a", "b", "c"]}, {TOPIC: removed})
        tick_input = TickInput(pause_changes=changes, request_ids={change.request_id: 1 for change in changes})
        return Shard(store, subscriptions, 8).apply(tick_at(tick, START), tick_input).paused

    assert paused(1, 0) == {}
    assert paused(2, 0, PauseChange("r", TOPIC, 0b101, is_paused=True)) == {TOPIC: ["a", "c"]}
    assert paused(3, 0b1) == {TOPIC: ["c"]}  # "a" is not in the settings any more
    assert paused(4, 0, PauseChange("s", TOPIC, 0b101, is_paused=False)) == {}
