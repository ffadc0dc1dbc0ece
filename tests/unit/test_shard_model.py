"""A shard against a naive model: any sequence of messages, commands, turns, restarts and replays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pyarrow as pa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proto.delaylake_pb2 import Result
from tests.messages import TOPIC, batches, command, commands
from tracker.control import KNOWN
from tracker.messages import MESSAGES, concat, int64
from tracker.shard import Effects, Intake, Shard, Tick
from tracker.store import MemoryStore

SUBSCRIPTIONS = ["s0", "s1"]
TICK_MILLIS = 1_000
NEAR, AHEAD = 2_000, 6_000


@dataclass
class Entry:
    """An entry of the model: when each of its messages is due, and from whom it was taken back."""

    entry_id: int
    due: list[int]
    single: bool
    taken: set[tuple[int, int]] = field(default_factory=set)  # (message, subscription)
    handed_out: dict[int, int] = field(default_factory=dict)  # message -> tick
    tick: int = 0
    sealed: bool = False

    def index(self, i: int) -> int:
        return -1 if self.single else i


class ShardModel(RuleBasedStateMachine):
    """Each rule is a tick. The model keeps what a shard should know in plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.entries: dict[int, Entry] = {}
        self.sealed: list[pa.Table] = []
        self.now = self.cutoff = self.tick = self.turn = self.near = self.load = 0
        self.confirmed = self.settled = 0
        self.run = 0
        self.requests = 0
        self.unconfirmed: dict[tuple[int, bool], pa.Table] = {}
        self.booked: set[int] = set()
        self.marks: list[tuple[int, int, int]] = []
        self.booked_turn = 0

    @initialize()
    def begin(self) -> None:
        self.step([], [], turns=True)

    @rule(
        sizes=st.lists(st.integers(1, 4), max_size=4),
        delays=st.lists(st.integers(0, 12_000), min_size=16, max_size=16),
        later=st.integers(0, 1_500),
        turns=st.booleans(),
    )
    def messages_come(self, sizes: list[int], delays: list[int], later: int, turns: bool) -> None:
        self.now += later
        rest = iter(delays)
        new = []
        for size in sizes:
            entry = Entry(len(self.entries), [self.now + next(rest) for _ in range(size)], single=size == 1)
            self.entries[entry.entry_id] = entry
            new.append(entry)
        self.step(new, [], turns)

    @rule(data=st.data(), later=st.integers(0, 500), whole=st.booleans(), turns=st.booleans())
    def a_command_comes(self, data: st.DataObject, later: int, whole: bool, turns: bool) -> None:
        self.now += later
        # What is past may be forgotten, two ticks later.
        known = [e for e in self.entries.values() if all(e.due[i] > self.now for i, _ in e.taken)]
        if not known:
            return
        entry = data.draw(st.sampled_from(known))
        subscriptions = data.draw(st.sampled_from([[0], [1], [0, 1]]))
        index = -1 if whole else data.draw(st.integers(0, len(entry.due)))
        self.requests += 1
        cancel_at = entry.due[0] if whole and data.draw(st.booleans()) else None
        row = command(f"r{self.requests}", 1, entry.entry_id, subscriptions, index, cancel_at)
        expected = {f"s{s}": self.expect(entry, s, index) for s in subscriptions}
        effects = self.step([], [row], turns)
        told: dict[str, list[int]] = {}
        for outcome in effects.outcomes.to_pylist():
            told.setdefault(outcome["subscription"], []).append(outcome["result"])
        assert told == expected

    @rule(later=st.integers(0, 4_000), turns=st.booleans())
    def time_passes(self, later: int, turns: bool) -> None:
        self.now += later
        self.step([], [], turns)

    @rule()
    def releases_are_confirmed(self) -> None:
        self.confirmed, self.settled = self.tick, self.cutoff

    @rule()
    def the_job_starts_again(self) -> None:
        self.run += 1
        self.step([], [])

    def expect(self, entry: Entry, subscription: int, index: int) -> list[int]:
        """The outcomes of a command for one subscription, and what it does to the model."""
        if index >= len(entry.due):
            return [Result.INVALID]
        results = []
        for i in range(len(entry.due)) if index < 0 else [index]:
            if (i, subscription) in entry.taken:
                results.append(Result.ALREADY_APPLIED)
            elif entry.due[i] <= self.cutoff:
                results.append(Result.TOO_LATE)
            else:
                entry.taken.add((i, subscription))
                results.append(Result.APPLIED)
        late = results.count(Result.TOO_LATE)
        if index < 0 and late in (0, len(results)):
            return [Result.APPLIED if Result.APPLIED in results else results[0]]
        return results

    def step(self, new: list[Entry], rows: list[dict[str, object]], turns: bool = False) -> Effects:
        """One tick of the shard, replayed on a copy of its store, and checked."""
        before = self.load
        self.tick += 1
        released, cutoff = self.cutoff, max(self.cutoff, self.now)
        if turns or cutoff >= self.near:
            self.turn += 1
            # As the clock does: a turn is booked when all that was due before it went unsealed is confirmed.
            while self.marks and self.marks[0][1] <= self.confirmed and self.marks[0][2] <= self.settled + 1:
                self.booked_turn = self.marks.pop(0)[0]
            self.marks.append((self.turn, self.tick, self.near))
            self.near, self.load = max(self.near, cutoff + NEAR), max(self.load, cutoff + AHEAD)
        self.cutoff = cutoff
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((due >= before) & (due < self.load)))
        incoming = [(1, e.entry_id, e.index(i), len(e.due), t) for e in new for i, t in enumerate(e.due)]
        for entry in new:
            entry.tick = self.tick
        tick = Tick(
            self.tick,
            cutoff,
            self.turn,
            self.load,
            self.near,
            f"run{self.run}",
            self.confirmed,
            self.booked_turn,
            now=self.now,
            passed=self.tick,
            sending=json.dumps({"tick": self.tick}),
        )
        intake = Intake(
            messages=batches(incoming) if incoming else MESSAGES.empty_table(),
            segment=segment,
            commands=commands(rows),
            request_ids=[str(row["request_id"]) for row in rows],
            found=self.found(rows),
        )
        state = dict(self.store.values)
        effects = Shard(self.store, {TOPIC: SUBSCRIPTIONS}, 1_000_000, TICK_MILLIS).apply(tick, intake)
        self.replay(state, tick, intake, effects)
        if effects.bucket.num_rows:
            self.sealed.append(effects.bucket)
        self.check_releases(effects, released)
        for entry_id in effects.entries["entry_id"].to_pylist():
            assert entry_id not in self.booked
            self.booked.add(entry_id)
        return effects

    def found(self, rows: list[dict[str, object]]) -> pa.Table:
        """What a lookup in the tables gives: sealed messages; of booked entries that were never sealed, a past one."""
        wanted = {row["entry_id"] for row in rows}
        index = [r for r in concat(self.sealed).select(KNOWN.names).to_pylist() if r["entry_id"] in wanted]
        sealed = {r["entry_id"] for r in index}
        for entry_id in (wanted & self.booked) - sealed:
            size = len(self.entries[entry_id].due)  # type: ignore[index]
            index.append(dict(zip(KNOWN.names, (TOPIC, -1, 1, entry_id, -1, size, 0), strict=True)))
        return pa.Table.from_pylist(index, schema=KNOWN)

    def replay(self, state: dict, tick: Tick, intake: Intake, effects: Effects) -> None:  # type: ignore[type-arg]
        copy = MemoryStore()
        copy.values = state
        again = Shard(copy, {TOPIC: SUBSCRIPTIONS}, 1_000_000, TICK_MILLIS).apply(tick, intake)
        assert again.bucket.equals(effects.bucket)
        assert again.outcomes.equals(effects.outcomes)
        assert [(r.tick, r.is_planned) for r in again.releases] == [(r.tick, r.is_planned) for r in effects.releases]
        assert all(a.rows.equals(b.rows) for a, b in zip(again.releases, effects.releases, strict=True))
        assert copy.values == self.store.values

    def check_releases(self, effects: Effects, released: int) -> None:
        self.unconfirmed = {k: v for k, v in self.unconfirmed.items() if k[0] > self.confirmed}
        for release in effects.releases:
            key = release.tick, release.is_planned
            if release.tick < self.tick:
                assert release.rows.equals(self.unconfirmed[key])
                continue
            self.unconfirmed[key] = release.rows
            for row in release.rows.to_pylist():
                entry = self.entries[row["entry_id"]]
                i = max(row["batch_index"], 0)
                assert i not in entry.handed_out
                assert entry.due[i] <= self.cutoff
                entry.handed_out[i] = release.tick
                assert row["wants"] == sum(1 << s for s in (0, 1) if (i, s) not in entry.taken)

    @invariant()
    def nothing_is_lost_and_the_count_is_right(self) -> None:
        waiting = 0
        for entry in self.entries.values():
            for i, due in enumerate(entry.due):
                nobody = all((i, s) in entry.taken for s in (0, 1))
                if due <= self.cutoff:
                    assert (i in entry.handed_out) or nobody
                else:
                    assert i not in entry.handed_out
                    waiting += not nobody
        status = Shard(self.store, {TOPIC: SUBSCRIPTIONS}, 1_000_000, TICK_MILLIS)
        assert status._tracker.number_of_delayed_messages - status._control.unwanted == waiting


ShardModel.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
test_shard_against_the_model = ShardModel.TestCase
