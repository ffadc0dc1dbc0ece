"""Queues that are longer than a tick gives places to: what waits keeps its order, and costs a tick nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pyarrow as pa
import pytest

from conf.shaping import Window
from tests.support.naive.rates import most_within
from tests.support.tracker.messages import TOPIC, command, commands, messages, resumed
from tests.support.tracker.shaped_service import CLOSED, START, Service, many, rate
from tracker.messages import concat
from tracker.schemas import KNOWN, PauseChange
from tracker.shaping.token_bucket import rule_of
from tracker.sharding import shards_of
from tracker.store import Key, MemoryStore
from tracker.subscriptions import Subscriptions


def test_a_queue_that_is_longer_than_the_calendar_waits() -> None:
    service = Service(rate(1e-5, burst=1), shards=1)
    service.step(100, many(3_000, START))
    service.step(100)
    times = [time for moves in service.moves for time in moves["deliver_at"].to_pylist()]
    assert len(service.of("s")) == 1
    assert len(times) == 2_999


@pytest.mark.slow
def test_a_tick_moves_no_more_than_there_are_places_and_the_rest_waits() -> None:
    service = Service(rate(50, burst=10), places_at_most=100)
    service.step(100, many(640, START + 5_000))
    moved = []
    while service.now < START + 15_000:
        effects = service.step(400)
        moved.append(sum(one.cancels.num_rows for one in effects))
    assert sum(moved) > 500
    # Rounding up is for each shard; what is within the rate moves within a tick, too.
    assert max(moved) <= 100 + len(service.shard_ids) + 10 + 50 * 0.4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rate(50, 10), rate(25, 5, "key"), CLOSED])
def test_a_shard_that_gives_places_alone_moves_no_more_than_so_many_in_a_tick(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = []
    for most in (1_000_000, 100):
        monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", most)
        service = Service(rule, shards=1)
        keys = [{"key": f"k{i % 2}"} for i in range(640)]
        service.step(100, concat(many(1, START + 5_000, i, **keys[i]) for i in range(640)))
        moved = []
        while service.now < START + 90_000:
            moved.append(sum(one.cancels.num_rows for one in service.step(400)))
        assert sum(moved) >= 600
        assert (max(moved) <= 100) == (most == 100)
        outs.append(sorted(row[1:] for row in service.of("s")))
    assert len(outs[0]) == 640
    assert outs[0] == outs[1]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_what_comes_at_short_notice_goes_behind_what_has_waited_for_a_place(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 100)
    service = Service(rate(50, burst=2), shards, places_at_most=100)
    service.step(100, many(640, START + 5_000))
    service.run_until(START + 5_000)
    service.step(400, many(200, service.now, first=640))
    service.run_until(START + 30_000)
    at = {row[1]: row[3] for row in service.of("s")}
    assert len(at) == 840
    ids = pa.table({"ledger_id": [7] * 840, "entry_id": list(at)})
    for of_shard in (shards_of(ids, shards) == i for i in range(shards)):
        own = [entry for entry, is_own in zip(at, of_shard, strict=True) if is_own]
        assert min(at[entry] for entry in own if entry >= 640) > max(at[entry] for entry in own if entry < 640)


@pytest.mark.slow
def test_a_long_queue_keeps_no_other_from_its_places() -> None:
    service = Service(rate(50, burst=10), places_at_most=100)
    shaping = {TOPIC: {0: rate(50, burst=10), 1: rate(1_000, burst=100)}}
    service.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping=shaping)
    service.step(100, many(2_000, START + 5_000))
    service.run_until(START + 20_000)
    assert len(service.of("t")) == 2_000
    assert most_within([row[3] for row in service.of("t")], 1_000) <= 1_100
    service.run_until(START + 60_000, step=900)
    assert sorted(row[1] for row in service.of("s")) == list(range(2_000))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_what_waits_goes_out_when_it_is_shaped_no_more(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 100)
    service = Service(rate(50, burst=10), shards, places_at_most=100)
    service.step(100, many(640, START + 5_000))
    service.run_until(START + 5_000)
    assert sum(n for effects in service.step(100) for n, _ in effects.waiting.get(TOPIC, {}).values())
    service.subscriptions = Subscriptions({TOPIC: ["s", "t"]})
    service.run += 1
    service.step(100)
    service.run_until(START + 20_000)
    assert sorted(row[1] for row in service.of("s")) == list(range(640))


@pytest.mark.slow
def test_a_tick_touches_only_as_much_of_a_queue_as_gets_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.buckets.time_slots.PIECE_ROWS", 50)
    service = Service(rate(500, burst=10), places_at_most=100)
    service.step(100, many(4_000, START + 3_000))
    service.run_until_some_wait(100)
    kept: list[str] = []
    real = MemoryStore.put

    def put(store: MemoryStore, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        kept.append(table)
        real(store, table, key, value, files)

    monkeypatch.setattr(MemoryStore, "put", put)
    of_ticks = []
    while any(effects.waiting for effects in service.step(100)):
        of_ticks.append(kept.count("waiting"))
        kept.clear()
    assert len(of_ticks) > 20
    assert max(of_ticks) <= len(service.stores)  # the piece that was cut, in each


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_pause_of_a_long_queue_puts_nothing_of_it_behind_the_rest(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 20)
    service = Service(rate(50, burst=10), shards, places_at_most=20)
    service.subscriptions = replace(service.subscriptions, in_order={TOPIC: 1})
    service.step(100, concat(messages([(7, i, START + 5_000 + i)], key="k") for i in range(300)))
    service.run_until_some_wait(400)
    for is_paused, request in ((True, "p"), (False, "r")):
        change = PauseChange(request, TOPIC, 1, is_paused=is_paused)
        rounds = {} if is_paused else resumed(concat(service.sealed), "s")
        service.step(400, pause_changes=[change], request_ids={request: 1}, **rounds)
        service.step(400)
    service.run_until(START + 40_000)
    out = sorted(service.of("s"), key=lambda row: (row[0], row[3]))
    assert sorted(row[1] for row in out) == list(range(300))
    ids = pa.table({"ledger_id": [7] * 300, "entry_id": list(range(300))})
    for number in range(shards):
        of_shard = [row[1] for row in out if shards_of(ids, shards)[row[1]] == number]
        assert of_shard == sorted(of_shard)


def test_what_waits_is_not_handed_out_before_its_time_where_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 50)
    rule = rule_of(None, [Window.model_validate({"from": "01:00"})])  # open now
    service = Service(rule, shards=1)
    service.step(100, many(300, START + 5_000))
    service.run_until_some_wait(400)
    n_before = len(service.of("s"))
    service.now -= 60_000
    service.near = 0
    service.step(400)
    service.run_until(START - 10_000)
    assert len(service.of("s")) == n_before < 300
    service.run_until(START + 10_000)
    assert sorted(row[1] for row in service.of("s")) == list(range(300))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_cancelled_of_a_queue_after_the_clock_was_set_back_lets_nothing_overtake_the_rest(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 50)
    service = Service(rate(50, burst=10), shards, places_at_most=50 * shards)
    due = START + 5_000
    service.step(100, concat([many(300, due), many(100, due + 200, first=300)]))
    service.run_until_some_wait(400)
    service.now -= 800
    service.near = 0
    service.step(400)
    waiting = [i for i in range(300) if i not in {row[1] for row in service.of("s")}]
    cancelled = waiting[:-80]
    rows = commands([command(f"c{i}", 7, i, (0,)) for i in cancelled])
    known = many(300, due).select(KNOWN.names).cast(KNOWN)
    service.step(200, commands=rows, request_ids={f"c{i}": 1 for i in cancelled}, known_messages=known)
    service.run_until(START + 30_000)
    at = {row[1]: row[3] for row in service.of("s")}
    assert sorted(at) == [i for i in range(400) if i not in set(cancelled)]
    of_shard = shards_of(pa.table({"ledger_id": [7] * 400, "entry_id": list(range(400))}), shards)
    for number in range(shards):
        own = [i for i in sorted(at) if of_shard[i] == number]
        assert max(at[i] for i in own if i < 300) <= min(at[i] for i in own if i >= 300)
