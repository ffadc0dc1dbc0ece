"""A shard and the clock against a naive model: commands before their message, rejects, partial seals, long pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pyarrow as pa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import Clock, ClockSettings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.fake_index import FakeIndex
from tests.support.tracker.messages import TOPIC, Answers, batches, command, commands
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.commands.kinds import REPEAT
from tracker.messages import concat, int64
from tracker.schemas import KNOWN
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result

SUBSCRIPTIONS = ["s0", "s1"]
BITS = range(len(SUBSCRIPTIONS))
TICK_MILLIS = 1_000
MARGIN = 2 * TICK_MILLIS
LEDGERS = 5
START = 1_000_000
SETTINGS = ClockSettings(
    "run0", lookahead_millis=400, seal_interval_millis=1_500, load_ahead_millis=6_000, max_segment_rows=1
)

# (request, subscription, entry, batch index, result)
Published = tuple[str, str, int, int, int]


@dataclass
class Entry:
    """An entry that has come: when its messages are due, which are rejected, who cancelled which, what went out."""

    due: list[int]
    rejected: list[bool]
    tick: int
    cancelled: set[tuple[int, int]] = field(default_factory=set)  # (message, subscription)
    remembered: set[tuple[int, int]] = field(default_factory=set)
    handed_out: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # what was due by a cutoff: a later one may be lower

    @property
    def size(self) -> int:
        return len(self.due)

    def batch_index(self, i: int) -> int:
        return -1 if self.size == 1 else i


@dataclass
class Command:
    """A command for one entry. `index` -1: the whole; `cancel_at` None: a skip."""

    request: str
    entry: int
    subscriptions: list[int]
    index: int
    cancel_at: int | None
    tick: int = 0
    body: int = 0  # of the request

    def row(self) -> dict[str, object]:
        at = self.entry % LEDGERS, self.entry
        return command(self.request, *at, self.subscriptions, self.index, self.cancel_at, body=self.body)

    def answer(self, result: int) -> list[Published]:
        return [(self.request, SUBSCRIPTIONS[s], self.entry, self.index, result) for s in self.subscriptions]


class TrackerModel(RuleBasedStateMachine):
    """Each rule is a tick, with the clock that the service has."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.shard = self.new_shard(self.store)
        self.clock = Clock(SETTINGS)
        self.offset = Offset()
        self.runs = 0
        self.now = START
        self.monotonic = 0.0
        self.cutoffs = {0: 0}
        self.confirmed = 0
        self.entries: dict[int, Entry] = {}
        self.until = [0] * LEDGERS
        self.waiting: list[Command] = []
        self.requests: dict[str, list[Command]] = {}  # as they came first
        self.applied_requests: set[str] = set()
        self.published: list[tuple[int, Published]] = []  # in which tick; not what was told again
        self.answers = Answers()
        self.sealed: list[pa.Table] = []
        self.durable: set[int] = set()
        self.unconfirmed: list[tuple[int, int, pa.Table]] = []

    @staticmethod
    def new_shard(store: MemoryStore) -> Shard:
        return Shard(store, {TOPIC: SUBSCRIPTIONS}, min_index_count_per_bucket=6, tick_time_millis=TICK_MILLIS)

    @initialize()
    def begin(self) -> None:
        self.step()

    @rule(data=st.data(), later=st.integers(0, 1_500), catches_up=st.booleans(), seals=st.booleans())
    def something_comes(self, data: st.DataObject, later: int, catches_up: bool, seals: bool) -> None:
        """Messages of any entries that have not come, and commands for any entries whatever."""
        self.pass_time(later)
        if seals:
            # The wall clock may be slow.
            self.monotonic += SETTINGS.seal_interval_millis / 1000
        future = [i for i in range(24) if i not in self.entries]
        ids = data.draw(st.lists(st.sampled_from(future), unique=True, max_size=4)) if future else []
        new = {}
        for i in ids:
            size = data.draw(st.integers(1, 3))
            delays = data.draw(st.lists(st.integers(-3_000, 12_000), min_size=size, max_size=size))
            is_rejected = data.draw(st.sampled_from([False] * 5 + [True]))
            rejected = [is_rejected and data.draw(st.booleans()) for _ in range(size)]
            new[i] = Entry([self.now + d for d in delays], rejected, self.offset.tick + 1)
        came = [self.draw_command(data) for _ in range(data.draw(st.integers(0, 3)))]
        self.step(new, came, catches_up)

    def draw_command(self, data: st.DataObject) -> list[Command]:
        """A request: commands for one entry or two; sometimes it has come before, or another one with its id."""
        if not self.requests or data.draw(st.integers(0, 3)):
            request = f"r{len(self.requests)}"
            self.requests[request] = self.draw_rows(data, request)
            return self.requests[request]
        request = data.draw(st.sampled_from(list(self.requests)))
        if data.draw(st.booleans()):
            return [replace(c) for c in self.requests[request]]
        return [replace(c, body=c.body + 1) for c in self.draw_rows(data, request)]

    def draw_rows(self, data: st.DataObject, request: str) -> list[Command]:
        subscriptions = data.draw(st.sampled_from([[0], [1], [0, 1]]))
        if data.draw(st.booleans()):
            entry, at = data.draw(st.integers(0, 25)), self.now + data.draw(st.integers(-4_000, 9_000))
            return [Command(request, entry, subscriptions, -1, at, body=1)]
        entries = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=2, unique=True))
        return [Command(request, e, subscriptions, data.draw(st.integers(-1, 3)), None, body=1) for e in entries]

    @rule(later=st.one_of(st.integers(0, 3_000), st.integers(20_000, 100_000)), catches_up=st.booleans())
    def time_passes(self, later: int, catches_up: bool) -> None:
        self.pass_time(later)
        self.step(catches_up=catches_up)

    @rule(back=st.integers(1, 5_000))
    def the_clock_is_set_back(self, back: int) -> None:
        self.now -= back
        self.step()

    @precondition(lambda self: self.confirmed < self.offset.tick)
    @rule(behind=st.integers(0, 2))
    def releases_are_confirmed(self, behind: int) -> None:
        self.confirmed = max(self.confirmed, self.offset.tick - behind)

    @rule()
    def the_job_starts_again(self) -> None:
        self.runs += 1
        copy = MemoryStore()
        copy.values = dict(self.store.values)
        self.store, self.shard = copy, self.new_shard(copy)
        self.clock = Clock(replace(SETTINGS, run_id=f"run{self.runs}"))
        self.step()

    def pass_time(self, millis: int) -> None:
        self.now += millis
        self.monotonic += millis / 1000

    def step(
        self, new: dict[int, Entry] | None = None, came: list[list[Command]] | None = None, catches_up: bool = False
    ) -> None:
        """A tick, applied once, replayed by another shard on the state before it, and checked."""
        new, came = new or {}, came or []
        last = self.offset
        feedback = Feedback(self.confirmed, self.cutoffs[self.confirmed])
        offset = self.clock.next(last, Moment(self.now, self.monotonic), feedback, FakeIndex(self.rows_due))
        offset = replace(offset, ingested_through=offset.tick if catches_up else last.ingested_through)
        self.offset, self.cutoffs[offset.tick] = offset, offset.cutoff
        assert offset.cutoff < offset.near_until <= offset.load_horizon

        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        distinct: dict[str, int] = {}
        rows = []
        for request in came:
            is_first = request[0].request not in distinct
            distinct.setdefault(request[0].request, request[0].body)
            rows += [c.row() | ({} if is_first else {"kind": REPEAT}) for c in request]
        tick_input = TickInput(
            messages=concat([self.rows_of(i, entry) for i, entry in new.items()]),
            segment=stored.filter(pa.array((due >= last.load_horizon) & (due < offset.load_horizon))),
            commands=commands(rows),
            request_ids=distinct,
            known_messages=self.found({c.entry for request in came for c in request}),
            first_answers=self.answers,
        )
        before = MemoryStore()
        before.values = dict(self.store.values)
        effects = self.shard.apply(offset.to_tick(), tick_input)
        self.check_replay(before, offset, tick_input, effects)

        self.answers.keep(effects.outcomes, offset.tick)
        expected = self.apply(last, new, came)
        published = [
            (o["request_id"], o["subscription"], o["entry_id"], o["batch_index"], o["result"])
            for o in effects.outcomes.to_pylist()
        ]
        assert Counter(published) == Counter(expected)
        self.check_releases(last, effects)
        if effects.bucket.num_rows:
            self.sealed.append(effects.bucket)
        entries = effects.entries["entry_id"].to_pylist()
        assert len(set(entries)) == len(entries)
        assert self.durable.isdisjoint(entries)
        self.durable.update(entries)
        self.forget(last)
        self.check_counts(effects)

    def rows_of(self, i: int, entry: Entry) -> pa.Table:
        return concat(
            batches([(i % LEDGERS, i, entry.batch_index(m), entry.size, due)], reason="bad" if rejected else None)
            for m, (due, rejected) in enumerate(zip(entry.due, entry.rejected, strict=True))
        )

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        due = int64(concat(self.sealed), "deliver_at")
        slots = Counter((due[(due >= start) & (due < end)] // SLOT_MILLIS).tolist())
        return sorted(slots.items())

    def found(self, wanted: set[int]) -> pa.Table:
        """What a lookup gives: sealed messages; a row with no index for durable entries that are in no bucket."""
        rows = [r for r in concat(self.sealed).select(KNOWN.names).to_pylist() if r["entry_id"] in wanted]
        sealed = {r["entry_id"] for r in rows}
        rows += [
            dict(zip(KNOWN.names, (TOPIC, -1, i % LEDGERS, i, -1, self.entries[i].size, 0, None), strict=True))
            for i in sorted((wanted & self.durable) - sealed)
        ]
        return pa.Table.from_pylist(rows, schema=KNOWN)

    # The model.

    def apply(self, last: Offset, new: dict[int, Entry], requests: list[list[Command]]) -> list[Published]:
        """What commands come to in this tick, and what they do to the model."""
        published = []
        self.entries.update(new)
        for waiting in [c for c in self.waiting if c.entry in new]:
            self.waiting.remove(waiting)
            published += self.cancel(waiting, last)
        has_all_come = self.offset.ingested_through >= self.offset.tick
        repeats = []
        first = [r for i, r in enumerate(requests) if r[0].request not in {b[0].request for b in requests[:i]}]
        for c in (c for request in requests for c in request):
            c.tick = self.offset.tick
            if c.request in self.applied_requests or not any(c is one for request in first for one in request):
                repeats.append(c)
            elif c.entry in self.entries:
                published += self.cancel(c, last)
            elif has_all_come and c.cancel_at is None:
                published += c.answer(Result.NOT_FOUND)
            elif has_all_come and c.cancel_at is not None and c.cancel_at <= last.cutoff:
                published += c.answer(Result.TOO_LATE)
            else:
                self.waiting.append(c)
                published += c.answer(Result.WAITING)
        self.applied_requests.update(request[0].request for request in requests)
        self.published += [(self.offset.tick, row) for row in published]
        again, others = self.answer_again(repeats)
        n = len(published)
        if self.offset.seal_epoch > last.seal_epoch:
            for c in list(self.waiting):
                if c.tick <= self.offset.ingested_through and (
                    c.cancel_at is None or c.cancel_at + MARGIN <= last.cutoff
                ):
                    self.waiting.remove(c)
                    published += c.answer(Result.NOT_FOUND)
        self.published += [(self.offset.tick, row) for row in published[n:]]
        return published + again + others

    def answer_again(self, repeats: list[Command]) -> tuple[list[Published], list[Published]]:
        """What was answered to requests before, each answer once; and what is answered to others with their ids."""
        again: set[int] = set()
        others: list[Published] = []
        for c in repeats:
            for s in c.subscriptions:
                at = (c.request, SUBSCRIPTIONS[s], c.entry)
                answered = [(tick, i) for i, (tick, row) in enumerate(self.published) if row[:3] == at]
                last = max((tick for tick, _ in answered), default=0)
                found = {
                    i
                    for tick, i in answered
                    if tick == last and (c.index < 0 or self.published[i][1][3] in (-1, c.index))
                }
                if found and c.body == self.requests[c.request][0].body:
                    again |= found
                else:
                    others.append((*at, c.index, Result.INVALID))
        return [self.published[i][1] for i in again], others

    def cancel(self, c: Command, last: Offset) -> list[Published]:
        entry = self.entries[c.entry]
        if c.index >= entry.size:
            return c.answer(Result.INVALID)
        published = []
        named = list(range(entry.size)) if c.index < 0 else [c.index]
        for s in c.subscriptions:
            results = [self.cancel_one(c.entry, i, s, last) for i in named]
            late = results.count(Result.TOO_LATE)
            if c.index < 0 and late in (0, len(results)):
                result = Result.APPLIED if Result.APPLIED in results else results[0]
                published.append((c.request, SUBSCRIPTIONS[s], c.entry, -1, result))
            else:
                published += [
                    (c.request, SUBSCRIPTIONS[s], c.entry, entry.batch_index(i), r)
                    for i, r in zip(named, results, strict=True)
                ]
        return published

    def cancel_one(self, i: int, message: int, subscription: int, last: Offset) -> int:
        entry = self.entries[i]
        is_new = entry.tick == self.offset.tick
        if (message, subscription) in entry.remembered:
            return Result.ALREADY_APPLIED
        if entry.rejected[message] or (message in entry.gone and not is_new):
            return Result.TOO_LATE
        entry.cancelled.add((message, subscription))
        entry.remembered.add((message, subscription))
        self.until[i % LEDGERS] = max(self.until[i % LEDGERS], entry.due[message] + MARGIN)
        return Result.APPLIED

    def forget(self, last: Offset) -> None:
        """What of a ledger was cancelled is forgotten two ticks after the last of it was due."""
        if self.offset.seal_epoch > last.seal_epoch:
            for ledger in range(LEDGERS):
                if self.until[ledger] <= self.offset.cutoff:
                    self.until[ledger] = 0
                    for i, entry in self.entries.items():
                        if i % LEDGERS == ledger:
                            entry.remembered.clear()

    # The checks.

    def check_replay(self, before: MemoryStore, offset: Offset, tick_input: TickInput, effects: Effects) -> None:
        again = self.new_shard(before).apply(Offset.from_json(offset.to_json()).to_tick(), tick_input)
        for name in ("bucket", "cancels", "entries", "rejects", "outcomes"):
            assert getattr(again, name).equals(getattr(effects, name)), name
        assert again.status == effects.status
        assert [(r.tick, r.kind) for r in again.releases] == [(r.tick, r.kind) for r in effects.releases]
        for one, other in zip(again.releases, effects.releases, strict=True):
            assert one.rows.equals(other.rows, check_metadata=True)
        assert before.values == self.store.values

    def check_releases(self, last: Offset, effects: Effects) -> None:
        self.unconfirmed = [r for r in self.unconfirmed if r[0] > self.offset.confirmed]
        old = [r for r in effects.releases if r.tick < self.offset.tick]
        assert [r.tick for r in old] == ([r[0] for r in self.unconfirmed] if last.run_id != self.offset.run_id else [])
        for release, (_, is_planned, rows) in zip(old, self.unconfirmed, strict=False):
            assert release.kind == is_planned
            assert release.rows.equals(rows)
        for release in effects.releases[len(old) :]:
            assert release.tick == self.offset.tick
            self.unconfirmed.append((release.tick, release.kind, release.rows))
            order = []
            for row in release.rows.to_pylist():
                entry, message = self.entries[row["entry_id"]], max(row["batch_index"], 0)
                order.append((row["deliver_at"], row["ledger_id"], row["entry_id"], row["batch_index"]))
                assert message not in entry.handed_out
                entry.handed_out.add(message)
                if entry.rejected[message]:
                    assert row["subscription_mask"] == 0
                    assert entry.tick == self.offset.tick
                else:
                    assert (
                        row["subscription_mask"] == sum(1 << s for s in BITS if (message, s) not in entry.cancelled) > 0
                    )
                    assert row["deliver_at"] == entry.due[message] <= self.offset.cutoff
            assert order == sorted(order)
        assert effects.rejects.num_rows == sum(
            sum(e.rejected) for e in self.entries.values() if e.tick == self.offset.tick
        )

    def check_counts(self, effects: Effects) -> None:
        delayed = 0
        for entry in self.entries.values():
            for message, due in enumerate(entry.due):
                is_wanted = any((message, s) not in entry.cancelled for s in BITS)
                if due <= self.offset.cutoff:
                    entry.gone.add(message)
                if entry.rejected[message] or message in entry.gone:
                    assert message in entry.handed_out or not is_wanted
                else:
                    assert message not in entry.handed_out
                    delayed += is_wanted
        assert effects.status["delayed"] == delayed
        assert effects.status["waiting_commands"] == len(self.waiting)
        assert effects.status["in_flight"] == sum(rows.num_rows for _, _, rows in self.unconfirmed)


TrackerModel.TestCase.settings = settings(
    max_examples=examples(40),
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
test_tracker_against_the_model = TrackerModel.TestCase
