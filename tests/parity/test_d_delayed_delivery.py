"""Groups D, E, Q and X: what Pulsar checks end to end, at the level of a shard of the tracker, a tick at a time."""

from __future__ import annotations

import pyarrow as pa

from tests.messages import TOPIC, batches, messages, positions, times
from tracker.in_flight import Release
from tracker.messages import MESSAGES, concat, in_order, int64
from tracker.shard import Effects, Intake, Shard, Tick
from tracker.store import MemoryStore

NEAR, AHEAD = 1_000, 5_000


class Clock:
    """A shard, and ticks for it that follow the rules of the clock: horizons move at turns, everything rises."""

    def __init__(self, subscriptions: int = 1) -> None:
        self.store = MemoryStore()
        self.names = {TOPIC: [f"s{i}" for i in range(subscriptions)]}
        self.sealed: list[pa.Table] = []
        self.tick = self.turn = self.near = self.load = 0
        self.run = "first"

    def step(self, cutoff: int, *new: pa.Table, turns: bool = False, confirmed: int = 0) -> Effects:
        """One tick: nothing is handed out beyond the cutoff."""
        before = self.load
        self.tick += 1
        if turns or cutoff >= self.near:
            self.turn += 1
            self.near, self.load = cutoff + NEAR, cutoff + AHEAD
        stored = concat(self.sealed)
        due = int64(stored, "deliver_at")
        segment = stored.filter(pa.array((due >= before) & (due < self.load)))
        tick = Tick(self.tick, cutoff, self.turn, self.load, self.near, self.run, confirmed, self.turn - 2, now=cutoff)
        shard = Shard(self.store, self.names, 1_000_000)
        effects = shard.apply(tick, Intake(messages=concat(new), segment=segment))
        if effects.bucket.num_rows:
            self.sealed.append(effects.bucket)
        return effects

    def restart(self) -> None:
        self.run += "+"


def handed_out(effects: Effects) -> list[tuple[int, int]]:
    return [position for release in effects.releases for position in positions(release.rows)]


def test_delayed_messages_wait_and_others_go_at_once() -> None:
    """D1, D2: immediate messages come in the tick they came in, in order; delayed ones later, complete."""
    clock = Clock()
    mixed = messages([(1, i, 0 if i % 2 else 3_000) for i in range(10)])
    assert handed_out(clock.step(100, mixed)) == [(1, i) for i in range(1, 10, 2)]
    assert handed_out(clock.step(2_999)) == []
    assert handed_out(clock.step(3_000)) == [(1, i) for i in range(0, 10, 2)]


def test_two_waves_that_nothing_passes_through_come_complete() -> None:
    """D3: two waves of ten a second apart; nothing is early, all twenty come."""
    clock = Clock()
    clock.step(0, messages([(1, i, 5_000) for i in range(10)]))
    clock.step(1_000, messages([(1, 10 + i, 6_000) for i in range(10)]))
    assert [handed_out(clock.step(t)) for t in (2_000, 4_999)] == [[], []]
    assert handed_out(clock.step(5_000)) == [(1, i) for i in range(10)]
    assert handed_out(clock.step(6_000)) == [(1, 10 + i) for i in range(10)]


def test_a_thousand_messages_over_many_small_ticks_come_once_in_order() -> None:
    """D4, D5: a thousand with one delay, taken in a hundred at a time, come in the order of their ids, each once."""
    clock = Clock()
    for part in range(10):
        clock.step(part * 10, messages([(1, part * 100 + i, 20_000) for i in range(100)]))
    came = [position for t in range(1_000, 20_001, 500) for position in handed_out(clock.step(t))]
    assert came == [(1, i) for i in range(1_000)]


def test_a_restart_hands_out_again_only_what_was_not_confirmed() -> None:
    """D9, E1: what waits waits on over a restart; what was in flight comes again, unchanged, and nothing else does."""
    clock = Clock()
    clock.step(0, messages([(1, i, 1_000 + i) for i in range(20)]))
    first = clock.step(1_004)
    second = clock.step(1_009)
    clock.restart()
    again = clock.step(1_014, confirmed=clock.tick - 1)
    assert [r.tick for r in again.releases] == [second.releases[0].tick, clock.tick]
    assert again.releases[0].rows.equals(second.releases[0].rows)
    assert again.releases[0].rows.schema.metadata == second.releases[0].rows.schema.metadata
    assert handed_out(first) == [(1, i) for i in range(5)]
    assert positions(again.releases[1].rows) == [(1, i) for i in range(10, 15)]
    assert handed_out(clock.step(9_000)) == [(1, i) for i in range(15, 20)]


def test_keys_stay_with_their_messages() -> None:
    """D10: keyed messages, delayed and not, all come with their key."""
    clock = Clock()
    keyed = concat([messages([(1, i, (i % 3) * 2_000)], key=f"k{i}") for i in range(30)])
    came: list[Release] = [r for t in (0, 2_000, 4_000) for r in clock.step(t, *([keyed] if t == 0 else [])).releases]
    assert sorted(k for r in came for k in r.rows["key"].to_pylist()) == sorted(f"k{i}" for i in range(30))


def test_rejected_messages_are_told_and_not_tracked() -> None:
    """D12: what exceeds the longest delay is refused with the reason, and is not among the delayed."""
    clock = Clock(subscriptions=2)
    effects = clock.step(0, messages([(1, 1, 0)], reason="Exceeds"), messages([(1, 2, 9_000)]))
    assert positions(effects.rejects) == [(1, 1)]
    assert [r.rows["wants"].to_pylist() for r in effects.releases] == [[0]]
    assert effects.status["delayed"] == 1


def test_every_subscription_wants_every_message() -> None:
    """E4: a message is kept once, whatever the number of its subscriptions."""
    clock = Clock(subscriptions=3)
    clock.step(0, messages([(1, 1, 500), (1, 2, 500)]))
    release = clock.step(500).releases[0]
    assert release.rows.num_rows == 2
    assert release.rows["wants"].to_pylist() == [0b111, 0b111]


def test_an_entry_of_several_messages_is_booked_as_one() -> None:
    """E2: messages of a batch have one entry, with their number; it is booked when its turn is settled."""
    clock = Clock()
    clock.step(0, batches([(1, 7, i, 3, 2_000 * i) for i in range(3)]))
    booked = [clock.step(t, turns=True).entries for t in (10, 20, 30)]
    entries = concat(booked, booked[0].schema)
    assert positions(entries) == [(1, 7)]
    assert entries["batch_size"].to_pylist() == [3]


def test_rows_are_ordered_by_time_then_ledger_then_entry() -> None:
    """Q1-Q3: of any number of parts, empty ones too, the order is time, ledger, entry, batch index."""
    parts = [messages([(2, 1, 10), (1, 2, 10)]), MESSAGES.empty_table(), messages([(1, 1, 10), (9, 9, 5)])]
    rows = in_order(concat(parts))
    assert list(zip(times(rows), positions(rows), strict=True)) == [
        (5, (9, 9)),
        (10, (1, 1)),
        (10, (1, 2)),
        (10, (2, 1)),
    ]


def test_counts_are_of_the_moment() -> None:
    """X1: the counts that a tick tells are the state after it, not sums over ticks."""
    clock = Clock()
    assert clock.step(0, messages([(1, i, 50_000) for i in range(7)])).status["delayed"] == 7
    assert clock.step(10, messages([(1, 7 + i, 50_000) for i in range(2)])).status["delayed"] == 9
    status = clock.step(20, turns=True).status
    assert (status["delayed"], status["loaded"], status["taken"]) == (9, 0, 0)
