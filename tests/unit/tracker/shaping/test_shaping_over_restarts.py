"""Shaping goes on where a job is stopped, replayed, rebuilt, or has another rate when it is back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streaming.release.feedback import Feedback
from tests.support.naive.rates import most_within
from tests.support.tracker.messages import TOPIC
from tests.support.tracker.shaped_service import START, Service, many, rate
from tracker.rebuilt import Rebuilt
from tracker.sharding import shards_of
from tracker.subscriptions import Subscriptions


@pytest.mark.slow
def test_a_shard_that_is_replayed_or_taken_up_again_gives_the_same_places() -> None:
    runs = []
    for _ in range(2):
        service = Service(rate(20))
        service.step(100, many(300, START + 4_000))
        service.run_until(START + 30_000)
        runs.append(service.out)
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_after_a_stop_everything_is_put_off_and_what_is_in_flight_comes_first() -> None:
    service = Service(rate(50, burst=5))
    service.step(100, many(500, START + 2_000))
    service.run_until(START + 5_000)
    known = {row[1] for row in service.of("s")}
    last = max(row[3] for row in service.of("s"))
    service.run += 1
    service.feedback = Feedback()
    service.step(20_000)
    assert service.again
    assert {row[1] for row in service.again} <= known
    service.run_until(START + 40_000, step=950)
    later = [row for row in service.of("s") if row[1] not in known]
    assert sorted(known | {row[1] for row in later}) == list(range(500))
    assert len(later) == 500 - len(known)
    assert min(row[3] for row in later) - last > 19_000
    assert most_within([row[3] for row in later], 1_000) <= 55
    for shard_id in service.shard_ids:
        ids = pa.table({"ledger_id": [7] * 500, "entry_id": list(range(500))})
        own = shards_of(ids, 2) == shard_id.number
        in_order = [row[1] for row in sorted(later, key=lambda row: row[3]) if own[row[1]]]
        assert in_order == sorted(in_order)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_second_start_puts_off_by_the_time_since_the_first_one_though_nothing_has_arrived_since(shards: int) -> None:
    hours = 7 * 3_600_000
    service = Service(rate(10, burst=5), shards)
    service.step(100, many(60, START + 500))
    service.confirmed = service.tick - 1
    service.run_until(START + 3_000)
    for millis in (hours, 5_000):
        service.run += 1
        service.feedback = Feedback()
        service.step(millis, many(150, START + 4_000, first=service.tick * 200))
        service.run_until(service.now + 5_000)
    assert service.again
    service.run_out(360)
    assert len(service.of("s")) == 360
    assert max(row[3] for row in service.of("s")) < START + hours + 90_000


def test_after_a_rebuild_what_comes_due_goes_behind_what_has_its_place() -> None:
    service = Service(rate(10, burst=1))
    last = START + 30_000
    rebuilt = Rebuilt(released=START, shaped_until={TOPIC: {"s": last}})
    service.step(100, many(5, START + 2_000), rebuilt=rebuilt)
    service.run_until(START + 40_000, step=900)
    assert min(row[3] for row in service.of("s")) > last
    assert len(service.of("s")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_lower_rate_holds_for_what_has_a_place_too_and_a_higher_one_does_not(shards: int) -> None:
    service = Service(rate(50, burst=50), shards)
    service.step(100, many(600, START + 2_000))
    service.run_until(START + 4_000)
    n_before = len(service.of("s"))
    assert 100 < n_before < 300
    for rule in (rate(20, burst=5), rate(100, burst=5)):
        service.subscriptions = Subscriptions({TOPIC: ["s", "t"]}, shaping={TOPIC: {0: rule}})
        service.run += 1
        service.feedback = Feedback()
        service.step(3_000)
        since = service.now
        if rule == rate(20, burst=5):
            service.run_until(START + 15_000)
            # What was handed out before keeps its time.
            lower = [float(row[3]) for row in service.of("s") if since + 3_000 < row[3]]
            assert most_within(lower, 1_000) <= 25
            assert len(lower) > 50
    service.run_out(600)
    assert sorted(row[1] for row in service.of("s")) == list(range(600))
    after = [float(row[3]) for row in service.of("s") if since + 3_000 < row[3]]
    assert most_within(after, 1_000) <= 25
    assert {row[4] for row in service.of("s")} <= {None, START + 2_000}
