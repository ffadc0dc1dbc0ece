"""Batches, ticks and releases in one thread, with time, answers and failures as a seed says: no Spark, no broker."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest

from conf.settings import IngestSettings
from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, SendReport
from streaming.release.driver.lane_release import LaneRelease, SentRelease, lane_release_of
from streaming.release.driver.release_attempts import ReleaseAttempts
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.feedback import Feedback
from streaming.source.batch_end import Acknowledgements, Backlog, BatchEnds, why_not_taking
from streaming.source.clock import Clock, ClockSettings
from tests.support.tracker.fake_index import FakeIndex
from tests.support.tracker.messages import TOPIC, messages
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.messages import concat, int64
from tracker.packing import pack
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput
from warehouse.schemas import DELIVERIES

START = 1_800_000_000_000
LOOKAHEAD = 800
STEP_MILLIS = 20
LIMITS = IngestSettings(max_messages_per_batch=1_000, max_bytes_per_batch=1 << 20)
CLOCK = ClockSettings("run", LOOKAHEAD, seal_interval_millis=1_500, load_ahead_millis=6_000)


class World:
    """A job with one shard. What a crash leaves are tables, state, the last offset, and what the broker has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.store = MemoryStore()
        self.offset = Offset()
        self.due: dict[int, int] = {}  # by entry
        self.waiting: list[int] = []  # entries that are in no batch
        self.acknowledged = -1  # the last entry
        self.sealed: list[pa.Table] = []
        self.arrived: dict[tuple[int, int, int], int] = {}  # by (tick, kind, row): the broker drops repeated ids
        self.recorded: Counter[int] = Counter()  # entries in `deliveries`
        self.written: dict[str, int] = {}  # the last tick of each lane in it
        self.crashes = 0
        self.begin_run()

    def begin_run(self) -> None:
        self.clock = Clock(replace(CLOCK, run_id=f"run{self.crashes}"))
        self.ends = BatchEnds(LIMITS, self.clock)
        self.acknowledgements = Acknowledgements()
        self.releases = Releases()
        self.sending: dict[str, tuple[LaneRelease, ReleaseAttempts | None]] = {}
        self.feedback = Feedback()
        # The receiver drops what batches have, though Pulsar sends all again that is not acknowledged.
        begin = int(self.offset.positions.get(TOPIC, "1:-1").split(":")[1])
        assert begin >= self.acknowledged
        self.waiting = [entry for entry in self.due if entry > begin]

    @property
    def at(self) -> Moment:
        return Moment(self.now, (self.now - START) / 1_000)

    def step(self) -> None:
        self.now += STEP_MILLIS
        if self.random.random() < 0.3 and self.now < START + 20_000:
            entry = len(self.due)
            self.due[entry] = self.now + self.random.choice([-50, 0, 300, 1_000, 5_000, 9_000])
            self.waiting.append(entry)
        backlog = Backlog(
            len(self.waiting),
            0,
            lambda soon: any(self.due[entry] <= soon for entry in self.waiting),
            why_not_taking(self.feedback, most_in_flight=50, short_disk=None) is None,
        )
        if self.ends.is_due(backlog, self.offset, self.at, self.feedback, lambda: False):
            self.end_batch(backlog.is_taken)
        for lane in list(self.releases._lanes):
            self.send(lane)
        self.write()
        if self.random.random() < 0.01 and self.crashes < 5:
            self.crashes += 1
            self.begin_run()

    def end_batch(self, takes: bool) -> None:
        self.ends.note_end(self.at.seconds)
        taken, self.waiting = (self.waiting, []) if takes else ([], self.waiting)
        last = self.offset
        new = self.clock.next(last, self.at, self.feedback, FakeIndex(self.rows_due))
        positions = {TOPIC: f"1:{max(taken)}"} if taken else last.positions
        self.offset = new = replace(new, positions=positions)
        stored = concat(self.sealed)
        at = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((at >= last.load_horizon) & (at < new.load_horizon)))
        rows = messages([(1, entry, self.due[entry]) for entry in taken])
        effects = Shard(self.store, {TOPIC: ["s"]}, 8).apply(new.to_tick(), TickInput(messages=rows, segment=segment))
        self.sealed.append(effects.bucket)
        self.releases.begin_batch(new.tick, new.unwritable)
        for one in effects.releases:
            body = Assignment("app", 0, one.tick, one.kind, pack(one.rows))
            if one.rows.num_rows and not self.releases.is_accepted((one.tick, one.kind)):
                self.releases.add(lane_release_of(one.tick, one.kind, [body], new.tick))
        self.releases.end_batch(new.tick, new.cutoff)
        if new.seal_epoch != last.seal_epoch:
            self.acknowledgements.note_seal_epoch(new.seal_epoch, positions)
        for position in (self.acknowledgements.note_commit(new.durable_through) or {}).values():
            self.acknowledge(int(position.split(":")[1]))
        self.ends.note_ready(self.at.seconds)

    def acknowledge(self, last: int) -> None:
        kept = {*self.recorded, *concat(self.sealed)["entry_id"].to_pylist()}
        assert set(range(last + 1)) <= kept, "what Pulsar may delete is in a table"
        self.acknowledged = max(self.acknowledged, last)

    def send(self, lane: str) -> None:
        release, attempts = self.sending.get(lane) or (self.releases.begin_next(lane), None)
        if release is None:
            return
        self.sending[lane] = release, attempts
        if attempts is None:
            if release.tick <= self.written.get(lane, -1):
                self.end(lane, SentRelease(release), ReleaseEvent.WRITTEN_BEFORE)
                return
            if self.now < release.first_due - 100 or self.releases.must_wait(release.id):
                return
            for event in (ReleaseEvent.TIME, ReleaseEvent.UNBLOCKED):
                self.releases.note(release, event)
            attempts = ReleaseAttempts(release, frozenset(), 0.0, {})
            self.sending[lane] = release, attempts
        attempts.next(frozenset(), {}, "")
        rows = release.assignments[0].rows()
        entries, due = rows["entry_id"].to_pylist(), rows["deliver_at"].to_pylist()
        if self.now < max(due):
            return  # its task waits
        is_lost = self.random.random() < 0.2
        n = self.random.randrange(len(entries) + 1) if is_lost else len(entries)  # so many arrive before it fails
        for row in range(n):
            assert self.now >= due[row], "early"
            self.arrived.setdefault((release.tick, release.kind, row), entries[row])
        if is_lost:
            for event in (ReleaseEvent.LOST, ReleaseEvent.UNBLOCKED):
                self.releases.note(release, event)
            return
        reports = [SendReport(pack(DELIVERIES.empty_table()), self.now)]
        failed = attempts.take(reports)
        decision = attempts.decide(reports, failed, failed, is_broker_there=True)
        assert decision.event == ReleaseEvent.COMPLETE
        self.end(lane, attempts.finished, decision.event)

    def end(self, lane: str, sent: SentRelease, event: ReleaseEvent) -> None:
        del self.sending[lane]
        self.releases.end(sent, event)

    def write(self) -> None:
        if self.random.random() < 0.3:
            for sent in self.releases.take_named(set()):
                release = sent.release
                if release.tick > self.written.get(release.lane, -1):
                    self.recorded.update(release.assignments[0].rows()["entry_id"].to_pylist())
                    self.written[release.lane] = release.tick
                self.releases.note_written([release])
        if self.releases.has_batch:
            progress = self.releases.progress(self.now + LOOKAHEAD)
            self.feedback = Feedback(progress.confirmed, progress.settled, in_flight=progress.in_flight, unwritable={})

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        due = int64(concat(self.sealed), "deliver_at")
        return sorted(Counter((due[(due >= start) & (due < end)] // SLOT_MILLIS).tolist()).items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_each_message_arrives_once_and_never_early_whatever_is_lost(seed: int) -> None:
    world = World(seed)
    for _ in range(40_000 // STEP_MILLIS):
        world.step()
    assert len(world.due) > 200
    assert world.crashes
    assert Counter(world.arrived.values()) == Counter(list(world.due)), "each has arrived once"
    assert world.recorded == Counter(list(world.due)), "and is recorded once"
    assert world.acknowledged == len(world.due) - 1, "and its source is acknowledged"
