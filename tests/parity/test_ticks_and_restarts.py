"""Ticks one after another, and over restarts: what Pulsar checks end to end, on a shard."""

from __future__ import annotations

from collections.abc import Collection

from tests.parity.clock import Clock, handed_out
from tests.support.tracker.messages import messages, positions
from tracker.in_flight import Release
from tracker.messages import concat
from tracker.store import Key, MemoryStore


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
    assert [r.rows["subscription_mask"].to_pylist() for r in effects.releases] == [[0]]
    assert effects.status["delayed"] == 1


class FailingStore(MemoryStore):
    """A copy of a store whose n-th write fails."""

    def __init__(self, store: MemoryStore, writes: int) -> None:
        super().__init__()
        self.values = dict(store.values)
        self._writes = writes

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        self._writes -= 1
        if self._writes < 0:
            raise OSError("injected")
        super().put(table, key, value, files)


def test_a_tick_that_fails_half_way_is_done_again_and_loses_nothing() -> None:
    """D11: wherever a tick fails, done again on the state before it, it hands out all ten, and nothing twice."""
    failures = 0
    for writes in range(100):
        clock = Clock()
        clock.step(0, messages([(1, i, 700 + i) for i in range(5)]))
        before = dict(vars(clock))
        clock.store = FailingStore(clock.store, writes)
        late = messages([(1, 5 + i, 705 + i) for i in range(5)])
        try:
            clock.step(702, late, seals=True)
            break
        except OSError:
            failures += 1
        vars(clock).update(before)
        assert handed_out(clock.step(702, late, seals=True)) == [(1, 0), (1, 1), (1, 2)]
        assert handed_out(clock.step(800)) == [(1, i) for i in range(3, 10)]
    assert 5 < failures < 99
