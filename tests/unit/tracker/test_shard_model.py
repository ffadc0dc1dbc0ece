"""A shard against a naive model: any sequence of messages, commands, seals, restarts, replays and other settings.

The model knows subscriptions by their names, the shard by numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, Phase
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, batches, command, commands, resumed
from tracker.commands.kinds import CANCEL, POSTPONE, RESCHEDULE, RESTORE, RETRY, SKIP
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import MESSAGES, concat, int64, with_columns
from tracker.packing import unpack
from tracker.payload_refs import PayloadRef, files_of
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import Key, MemoryStore
from tracker.tick import Effects, Tick, TickInput
from tracker.wire.delaylake_pb2 import Result
from warehouse.routes.known_routes import KnownRoutes

NAMES = ["s0", "s1", "s2", "s3"]
TICK_MILLIS = 1_000
MOVES = (POSTPONE, RESCHEDULE)


@dataclass
class Entry:
    """An entry of the model: when each of its messages is due for whom, and from whom it was cancelled.

    Pairs are (message, subscription).
    """

    entry_id: int
    due: list[int]
    single: bool
    cancelled: set[tuple[int, str]] = field(default_factory=set)
    moved: dict[tuple[int, str], int] = field(default_factory=dict)  # to which time
    held: dict[tuple[int, str], int] = field(default_factory=dict)  # when it was due, of what is held back
    handed_out: set[tuple[int, str]] = field(default_factory=set)
    missed: set[tuple[int, str]] = field(default_factory=set)  # due while the settings did not have the subscription
    attempts: dict[tuple[int, str], int] = field(default_factory=dict)  # retries, also those that wait
    reasons: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    sent_back: dict[str, str] | None = None  # its properties, where it was sent back for a retry
    attempt: int | None = None  # of one that was sent back
    reason: list[str] = field(default_factory=list)  # the same

    def time(self, i: int, s: str) -> int:
        return self.moved.get((i, s), self.due[i])

    def pairs(self, names: Sequence[str]) -> list[tuple[int, str]]:
        return [(i, s) for i in range(len(self.due)) for s in names]

    def index(self, i: int) -> int:
        return -1 if self.single else i


NO_MESSAGES = MESSAGES.empty_table()


def keyed(incoming: list[tuple[int, int, int, int, int]]) -> pa.Table:
    rows = batches(incoming) if incoming else NO_MESSAGES
    keys = ["k" if entry_id % 2 else None for entry_id in rows["entry_id"].to_pylist()]
    return with_columns(rows, key=pa.array(keys, pa.string()))


def aside(rows: pa.Table, file: str) -> pa.Table:
    """The rows of every other entry with a payload in a file, as they come in."""
    refs = [None if n // 2 % 2 else str(PayloadRef(file, n, 100_000, 0)) for n in rows["entry_id"].to_pylist()]
    payloads = [None if ref else b"here" for ref in refs]
    return with_columns(rows, payload=pa.array(payloads, pa.binary()), payload_at=pa.array(refs, pa.string()))


def sent_back(entry: Entry) -> pa.Table:
    """The message of such an entry, as it comes in: its time is yet to be decided."""
    properties = list((entry.sent_back or {}).items())
    reasons = json.dumps(entry.reason)
    row = (1, entry.entry_id, -1, 1, 0)
    return batches([row], attempt=entry.attempt, retry_reasons=reasons, properties=properties)


def unpacked(store: MemoryStore) -> dict[tuple[str, Key], pa.Table]:
    """The values of a store that are rows."""
    found = {}
    for key, value in store.values.items():
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            found[key] = unpack(value)
    return found


class ShardModel(RuleBasedStateMachine):
    """Each rule is a tick. The model keeps what a shard should know in plain dictionaries."""

    NEAR_MILLIS, AHEAD_MILLIS = 2_000, 6_000

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.entries: dict[int, Entry] = {}
        self.sealed: list[pa.Table] = []
        self.now = self.cutoff = self.tick = self.seal_epoch = self.near = self.load = 0
        self.confirmed = self.settled = 0
        self.run = 0
        self.requests = 0
        self.paused: set[str] = set()
        self.routes = KnownRoutes({})
        self.set_routes(["s0", "s1"])
        self.unconfirmed: dict[tuple[int, int], pa.Table] = {}
        self.durable: set[int] = set()
        self.marks: list[tuple[int, int, int]] = []
        self.durable_through = 0
        self.released: set[tuple[int, int, str]] = set()  # messages that the last resume has let go

    def set_routes(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The settings' subscriptions, none: there is no route; returns those to which messages go out again."""
        backoff = {"first": 1_500, "max": "4s", "jitter": 0.5, "attempts": 2}
        only_s0 = {"backoff": backoff, "order": "key"}  # every other entry has a key
        subscriptions = [{"name": name} | (only_s0 if name == "s0" else {}) for name in names]
        made = Settings(routes=[{"source": TOPIC, "subscriptions": subscriptions}] if names else [])  # type: ignore[arg-type]
        before = self.routes
        # As an offset keeps them.
        self.routes = KnownRoutes.from_json(before.updated_to(made).to_json())
        return self.routes.reinstated_since(before)

    @property
    def numbers(self) -> dict[str, int]:
        return {s.name: i for i, s in enumerate(self.routes.routes[TOPIC].subscriptions)}

    @property
    def wanted(self) -> list[str]:
        return [s.name for s in self.routes.routes[TOPIC].left]

    def shard(self, store: MemoryStore) -> Shard:
        return Shard(store, self.routes.subscriptions, 1_000_000, TICK_MILLIS)

    @initialize()
    def begin(self) -> None:
        self.step([], [], seals=True)

    @rule(
        sizes=st.lists(st.integers(1, 4), max_size=4),
        delays=st.lists(st.integers(0, 12_000), min_size=16, max_size=16),
        later=st.integers(0, 1_500),
        seals=st.booleans(),
    )
    def messages_come(self, sizes: list[int], delays: list[int], later: int, seals: bool) -> None:
        self.now += later
        rest = iter(delays)
        new = []
        for size in sizes:
            entry = Entry(len(self.entries), [self.now + next(rest) for _ in range(size)], single=size == 1)
            self.entries[entry.entry_id] = entry
            new.append(entry)
        self.step(new, [], seals)

    @rule(data=st.data(), before=st.integers(0, 6), after=st.integers(1, 9_000), seals=st.booleans())
    def a_message_is_sent_back(self, data: st.DataObject, before: int, after: int, seals: bool) -> None:
        if not self.wanted or self.routes.missing:
            return
        self.now += 1  # at 0 a message would count as handed out long ago
        name = data.draw(st.sampled_from(self.wanted))
        is_dead = before + 1 > self.routes.subscriptions.backoff(TOPIC, self.numbers[name]).attempts
        entry = Entry(len(self.entries), [self.now + (0 if is_dead else after)], single=True)
        entry.attempt, entry.reason = before + 1, ["no"]
        entry.sent_back = {"retryOf": "1:0:-1:-1", "retrySubscription": name, "retryAfter": str(after)}
        entry.cancelled = {(0, s) for s in self.wanted if s != name}
        self.entries[entry.entry_id] = entry
        self.step([entry], [], seals)

    @rule(data=st.data(), later=st.integers(0, 500), whole=st.booleans(), seals=st.booleans())
    def a_command_comes(self, data: st.DataObject, later: int, whole: bool, seals: bool) -> None:
        self.now += later
        # What is past may be forgotten, two ticks later.
        kind = data.draw(st.sampled_from([SKIP, CANCEL, RESCHEDULE, POSTPONE, RESTORE, RETRY, RETRY]))
        known = [
            e for e in self.entries.values() if kind == RETRY or all(e.time(*pair) > self.now for pair in e.cancelled)
        ]
        if not known:
            return
        entry = data.draw(st.sampled_from(known))
        subscriptions = data.draw(st.lists(st.sampled_from(self.wanted), unique=True, min_size=1))
        subscriptions.sort(key=self.numbers.__getitem__)
        index = -1 if whole else data.draw(st.integers(0, len(entry.due)))
        self.requests += 1
        time = self.now + data.draw(st.integers(-2_000, 15_000)) if kind == RESCHEDULE else None
        time = data.draw(st.integers(-9_000, 9_000).filter(bool)) if kind == POSTPONE else time
        bits = [self.numbers[s] for s in subscriptions]
        row = command(f"r{self.requests}", 1, entry.entry_id, bits, index, time, kind=kind)
        if kind == RETRY:
            time = data.draw(st.sampled_from([0, 0, 500, 9_000]))
            row |= {"after_millis": time, "reason": f"r{self.requests}"}
        expected = {s: self.expect(kind, entry, s, index, time) for s in subscriptions}
        effects = self.step([], [row], seals)
        told: dict[str, list[int]] = {}
        for outcome in effects.outcomes.to_pylist():
            told.setdefault(outcome["subscription"], []).append(outcome["result"])
        assert told == expected

    @rule(data=st.data(), is_paused=st.booleans(), seals=st.booleans())
    def some_are_paused_or_resumed(self, data: st.DataObject, is_paused: bool, seals: bool) -> None:
        self.pause(data.draw(st.lists(st.sampled_from(self.wanted), unique=True, min_size=1)), is_paused, seals)

    def pause(self, subscriptions: list[str], is_paused: bool, seals: bool) -> None:
        self.requests += 1
        bits = sum(1 << self.numbers[s] for s in subscriptions)
        self.paused = self.paused | {*subscriptions} if is_paused else self.paused - {*subscriptions}
        self.release_held()
        self.step([], [], seals, [PauseChange(f"r{self.requests}", TOPIC, bits, is_paused)])

    def release_held(self) -> None:
        self.released = set()
        if self.routes.missing:
            return
        for entry in self.entries.values():
            for pair, time in entry.moved.items():
                if time == HELD_DELIVER_AT and pair[1] in self.wanted and pair[1] not in self.paused:
                    entry.moved[pair] = self.now
                    self.released.add((entry.entry_id, *pair))

    def comes_behind(self, entry_id: int, i: int, s: str) -> bool:
        """Whether a message with a key comes behind what has just been let go, and was not let go itself."""
        return any(name == s for *_, name in self.released) and (entry_id, i, s) not in self.released

    @rule(later=st.integers(0, 4_000), seals=st.booleans())
    def time_passes(self, later: int, seals: bool) -> None:
        self.now += later
        self.step([], [], seals)

    @rule()
    def releases_are_confirmed(self) -> None:
        self.confirmed, self.settled = self.tick, self.cutoff

    @rule()
    def the_job_starts_again(self) -> None:
        self.run += 1
        self.step([], [])

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True), later=st.integers(0, 4_000))
    def the_job_starts_again_with_other_settings(self, names: list[str], later: int) -> None:
        self.now += later
        self.run += 1
        known = self.numbers
        back = self.set_routes(names)
        for entry in self.entries.values():
            new = self.numbers.keys() - known
            entry.missed |= {(i, s) for i, s in entry.pairs(sorted(new)) if entry.due[i] <= self.cutoff}
        self.release_held()
        self.step([], [], back=back)

    def expect(self, kind: str, entry: Entry, subscription: str, index: int, time: int | None) -> list[int]:
        """The outcomes of a command for one subscription, and what it does to the model."""
        if index >= len(entry.due):
            return [Result.INVALID]
        results: list[int] = []
        for i in range(len(entry.due)) if index < 0 else [index]:
            pair = i, subscription
            is_late = entry.time(*pair) <= self.cutoff
            if kind == RETRY:
                results.append(self.expect_retry(entry, pair, is_late, time or 0))
            elif (pair in entry.cancelled) != (kind in (RESTORE, *MOVES)) and kind not in MOVES:
                results.append(Result.ALREADY_APPLIED)
            elif kind in MOVES and pair in entry.cancelled:
                results.append(Result.INVALID)
            elif is_late:
                results.append(Result.TOO_LATE)
            else:
                results.append(Result.APPLIED)
                if kind == RESCHEDULE:
                    entry.moved[pair] = max(time or 0, self.now)
                elif kind == POSTPONE:
                    due = entry.time(*pair)
                    due = entry.held[pair] if due == HELD_DELIVER_AT else due
                    entry.moved[pair] = max(due + (time or 0), self.now)
                elif kind == RESTORE:
                    entry.cancelled.remove(pair)
                else:
                    entry.cancelled.add(pair)
        if kind in (*MOVES, RESTORE, RETRY):
            return results
        late = results.count(Result.TOO_LATE)
        if index < 0 and late in (0, len(results)):
            return [Result.APPLIED if Result.APPLIED in results else results[0]]
        return results

    def expect_retry(self, entry: Entry, pair: tuple[int, str], is_late: bool, after: int) -> int:
        """The result of a retry of one message, which is due `after` ms from now; 0: by the backoff."""
        i, s = pair
        if not is_late:
            return Result.INVALID if pair in entry.cancelled else Result.ALREADY_APPLIED
        rows = [r for r in concat(self.sealed).to_pylist() if r["entry_id"] == entry.entry_id]
        is_sealed = any(max(r["batch_index"], 0) == i and r["subscription"] in (None, s) for r in rows)
        # The row that it came with may be in state still, for others, where it was moved forward for this one.
        if not is_sealed and entry.due[i] <= self.cutoff:
            return Result.NOT_FOUND
        attempt = entry.attempts[pair] = entry.attempts.get(pair, entry.attempt or 0) + 1
        entry.reasons.setdefault(pair, list(entry.reason)).append(f"r{self.requests}")
        backoff = self.routes.subscriptions.backoff(TOPIC, self.numbers[s])
        wait = after or backoff.wait_millis(attempt, f"1:{entry.entry_id}:{i} {s}")
        if attempt > backoff.attempts:
            wait = 0
        entry.moved[pair] = max(self.now + wait, entry.time(*pair) + 1)
        for done in (entry.handed_out, entry.missed, entry.cancelled):
            done.discard(pair)
        return Result.APPLIED

    def step(
        self,
        new: list[Entry],
        rows: list[dict[str, object]],
        seals: bool = False,
        pause_changes: Sequence[PauseChange] = (),
        back: Sequence[tuple[str, str]] = (),
    ) -> Effects:
        """One tick of the shard, replayed on a copy of its store, and checked."""
        before = self.load
        self.tick += 1
        cutoff = max(self.cutoff, self.now)
        if seals or cutoff >= self.near:
            self.seal_epoch += 1
            # As the clock does: a seal epoch is durable when all that was due before it went unsealed is confirmed.
            while self.marks and self.marks[0][1] <= self.confirmed and self.marks[0][2] <= self.settled + 1:
                self.durable_through = self.marks.pop(0)[0]
            self.marks.append((self.seal_epoch, self.tick, max(self.near, cutoff + 1)))
            self.near = max(self.near, cutoff + self.NEAR_MILLIS)
            self.load = max(self.load, cutoff + self.AHEAD_MILLIS)
        self.cutoff = cutoff
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((due >= before) & (due < self.load)))
        incoming = [(1, e.entry_id, e.index(i), len(e.due), t) for e in new for i, t in enumerate(e.due)]
        for entry in self.entries.values():
            for i, s in entry.pairs([*self.numbers]):
                if entry.time(i, s) > cutoff or (i, s) in entry.cancelled | entry.handed_out | entry.missed:
                    continue
                if s not in self.wanted:
                    entry.missed.add((i, s))
                elif s in self.paused or self.routes.missing:
                    entry.held[i, s] = entry.time(i, s)
                    entry.moved[i, s] = HELD_DELIVER_AT
                elif s == "s0" and back and entry.entry_id % 2 and self.comes_behind(entry.entry_id, i, s):
                    entry.moved[i, s] = cutoff + 1  # behind what was held back, as it has a key
        tick = Tick(
            tick=self.tick,
            cutoff=cutoff,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load,
            near_until=self.near,
            run_id=f"run{self.run}",
            confirmed=self.confirmed,
            durable_through=self.durable_through,
            now=self.now,
            ingested_through=self.tick,
            sending=json.dumps({"tick": self.tick}),
        )
        tick_input = TickInput(
            messages=aside(sent_back(new[0]) if new and new[0].sent_back else keyed(incoming), f"{self.tick}-new"),
            segment=aside(segment, f"{self.tick}-segment"),
            commands=commands(rows),
            request_ids={str(row["request_id"]): 1 for row in rows}
            | {change.request_id: 1 for change in pause_changes},
            known_messages=self.found(rows),
            payload_rows=aside(
                stored.filter(pc.is_in(stored["entry_id"], pa.array([row["entry_id"] for row in rows], pa.int64()))),
                f"{self.tick}-named",
            ),
            pause_changes=pause_changes,
            **self.rounds(pause_changes, aside(stored, f"{self.tick}-drained"), back),
            reinstated={topic for topic, _ in back},
        )
        state = dict(self.store.values)
        effects = self.shard(self.store).apply(tick, tick_input)
        self.replay(state, tick, tick_input, effects)
        if effects.bucket.num_rows:
            self.sealed.append(effects.bucket)
        for out in (effects.bucket, *(release.rows for release in effects.releases)):
            is_aside = int64(out, "entry_id") // 2 % 2 == 0
            assert pc.is_valid(out["payload_at"]).to_pylist() == is_aside.tolist()
            assert pc.is_valid(out["payload"]).to_pylist() == (~is_aside).tolist()
        self.check_releases(effects)
        for entry_id in effects.entries["entry_id"].to_pylist():
            assert entry_id not in self.durable
            self.durable.add(entry_id)
        return effects

    def rounds(
        self, pause_changes: Sequence[PauseChange], stored: pa.Table, back: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """One round of all that was held back, for subscriptions that are resumed or there again."""
        bits = sum(change.subscriptions for change in pause_changes if not change.is_paused)
        names = [name for name, number in self.numbers.items() if bits >> number & 1]
        return resumed(stored, *names, *(name for _, name in back)) if names or back else {}

    def found(self, rows: list[dict[str, object]]) -> pa.Table:
        """What a lookup in the tables gives: sealed messages; of durable entries that were never sealed, a past one."""
        wanted = {row["entry_id"] for row in rows}
        stored = concat(self.sealed)
        originals = stored.filter(pc.is_null(stored["sequence"])).select(KNOWN.names)
        index = [r for r in originals.to_pylist() if r["entry_id"] in wanted]
        sealed = {r["entry_id"] for r in index}
        for entry_id in (wanted & self.durable) - sealed:
            size = len(self.entries[entry_id].due)  # type: ignore[index]
            index.append(dict(zip(KNOWN.names, (TOPIC, -1, 1, entry_id, -1, size, 0, None), strict=True)))
        return pa.Table.from_pylist(index, schema=KNOWN)

    def replay(self, state: dict, tick: Tick, tick_input: TickInput, effects: Effects) -> None:  # type: ignore[type-arg]
        copy = MemoryStore()
        copy.values = state
        again = self.shard(copy).apply(tick, tick_input)
        assert again.bucket.equals(effects.bucket)
        assert again.outcomes.equals(effects.outcomes)
        assert [(r.tick, r.kind) for r in again.releases] == [(r.tick, r.kind) for r in effects.releases]
        assert all(a.rows.equals(b.rows) for a, b in zip(again.releases, effects.releases, strict=True))
        assert copy.values == self.store.values

    def check_releases(self, effects: Effects) -> None:
        self.unconfirmed = {k: v for k, v in self.unconfirmed.items() if k[0] > self.confirmed}
        for release in effects.releases:
            key = release.tick, release.kind
            if release.tick < self.tick:
                assert release.rows.equals(self.unconfirmed[key])
                continue
            self.unconfirmed[key] = release.rows
            for row in release.rows.to_pylist():
                entry = self.entries[row["entry_id"]]
                i = max(row["batch_index"], 0)
                assert row["subscription_mask"]
                assert not self.routes.missing
                for s in (s for s, number in self.numbers.items() if row["subscription_mask"] >> number & 1):
                    assert (i, s) not in entry.handed_out | entry.cancelled | entry.missed
                    assert s in self.wanted
                    assert s not in self.paused
                    assert entry.time(i, s) == row["deliver_at"] <= self.cutoff
                    assert row["attempt"] == entry.attempts.get((i, s), entry.attempt)
                    assert json.loads(row["retry_reasons"] or "[]") == entry.reasons.get((i, s), entry.reason)
                    entry.handed_out.add((i, s))

    @invariant()
    def each_file_to_which_a_value_refers_is_noted(self) -> None:
        referred = {key: set(files_of(rows)) for key, rows in unpacked(self.store).items()}
        noted = {key: set(files) for key, files in self.store.files.items() if files}
        assert noted == {key: files for key, files in referred.items() if files}

    @invariant()
    def nothing_is_lost_and_the_count_is_right(self) -> None:
        waiting = set()
        for entry in self.entries.values():
            for i, s in entry.pairs([*self.numbers]):
                if entry.time(i, s) > self.cutoff or (i, s) in entry.cancelled:
                    assert (i, s) not in entry.handed_out
                    # A row that waits: one of its own for each that was moved.
                    if (i, s) not in entry.cancelled:
                        waiting.add((entry.entry_id, i, s if (i, s) in entry.moved else None))
                else:
                    assert ((i, s) in entry.handed_out) != ((i, s) in entry.missed)
        status = self.shard(self.store)
        assert status._tracker.number_of_delayed_messages - status._state.unwanted == len(waiting)


ShardModel.TestCase.settings = effort(
    max_examples=examples(60),
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
test_shard_against_the_model = ShardModel.TestCase


def test_what_was_moved_forward_and_held_back_comes_once() -> None:
    """The row that it came with is still to come when the row that it was moved to is released."""
    model = ShardModel()
    model.begin()
    entry = Entry(0, [12_000], single=True)
    model.entries[0] = entry
    model.step([entry], [], seals=True)
    row = command("r", 1, 0, [0], 0, 1_000, kind=RESCHEDULE)
    assert model.expect(RESCHEDULE, entry, "s0", 0, 1_000) == [Result.APPLIED]
    model.step([], [row])
    model.pause(["s0"], True, False)
    model.time_passes(2_000, True)
    model.pause(["s0"], False, True)
    assert entry.handed_out == {(0, "s0")}
    for _ in range(6):
        model.time_passes(2_000, True)
        model.nothing_is_lost_and_the_count_is_right()
    assert entry.handed_out == {(0, "s0"), (0, "s1")}
