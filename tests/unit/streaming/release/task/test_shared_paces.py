"""A rate is kept to at the destination, whatever is late, overlaps or is sent again."""

from __future__ import annotations

import heapq
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.send_plan import PlannedSend
from streaming.release.task.planning.sending_order import by_time
from streaming.release.task.sender import _set_paces
from streaming.release.task.shared_paces import Pace, Paces, RateLimit
from tests.support.fuzzing.examples import examples
from tests.support.naive.rates import most_within
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tests.unit.streaming.release.task.test_send_on_time import Topic, lines_to, now, run
from tracker.packing import pack
from tracker.shaping.token_bucket import TokenBucket
from tracker.sharding import ShardId
from warehouse.routes.known_routes import known_routes

tasks = st.lists(
    st.tuples(
        st.floats(0, 20),  # when it begins to send, s
        st.lists(st.tuples(st.integers(1, 6), st.floats(0, 0.5), st.floats(0, 0.01)), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.one_of(st.integers(1, 60).map(float), st.floats(0.3, 60)),
    burst=st.integers(1, 60),
    tasks=tasks,
    first_due=st.floats(0, 5),
)
# What a bucket can hold beyond the burst is next to nothing: a whole burst must have places nevertheless.
@example(rate=0.9999999999, burst=2, tasks=[(0.0, [(2, 0.0, 0.0)])], first_due=0.0)
def test_in_any_second_no_more_than_rate_and_burst_whenever_tasks_begin(
    tmp_path_factory: pytest.TempPathFactory,
    rate: float,
    burst: int,
    tasks: list[tuple[float, list[tuple[int, float, float]]]],
    first_due: float,
) -> None:
    limit = RateLimit(rate, burst)
    path = tmp_path_factory.mktemp("pace") / "paces"
    all_paces = [Paces(path) for _ in tasks]  # each task has opened the file by itself
    zero = time.monotonic() + 1.1
    # By task its batches: how many messages, after how long the task is idle before it, how long it takes to send it.
    # A message goes at its place or later, and places are given as the tracker does, to all of them together.
    n = sum(min(size, burst) for _, batches in tasks for size, _, _ in batches)
    places = TokenBucket.share_of(rate, burst, ShardId(0, 1)).places(np.full(n, first_due * 1000), 0.0)[0] / 1000
    given = iter(places)
    waiting: list[tuple[float, int, int, list[Any]]] = []
    for number, (begin, batches) in enumerate(tasks):
        due = [(max(next(given) for _ in range(min(size, burst))), min(size, burst), *rest) for size, *rest in batches]
        heapq.heappush(waiting, (max(begin, due[0][0]), number, 0, due))
    sent: list[float] = []
    last = 0.0
    while waiting:
        at, number, i, due = heapq.heappop(waiting)
        _, size, idle, takes = due[i]
        wait, _ = all_paces[number].take(7, size, limit, zero + at)
        if wait > 0:
            later = at + max(wait, 1e-9)  # a clock goes on, however short the wait is
            heapq.heappush(waiting, (later, number, i, due))
            continue
        sent += [at + takes * float(part) for part in np.linspace(0, 1, size)]
        all_paces[number].note_taken(7, size, limit, zero + at + takes)
        last = max(last, at + takes)
        if i + 1 < len(due):
            heapq.heappush(waiting, (max(at + takes + idle, due[i + 1][0]), number, i + 1, due))
    for paces in all_paces:
        paces.close()
    assert len(sent) == n
    assert most_within(sent, 1) <= math.floor(rate + burst)
    # What is late waits for nothing but the rate.
    busy = sum(idle + takes for _, batches in tasks for _, idle, takes in batches)
    assert last <= max(first_due, *(begin for begin, _ in tasks)) + n / rate + busy + 1 / rate + 1


@pytest.mark.parametrize(("rate", "burst"), [(50, 50), (200, 400), (2_000, 2_000), (40, 1)])
def test_publishing_takes_now_longer_and_now_shorter_and_no_second_has_more_for_it(
    tmp_path: Path, rate: int, burst: int
) -> None:
    paces, limit = Paces(tmp_path / "paces"), RateLimit(float(rate), burst)
    at, handed = time.monotonic() + 2, list[float]()
    while len(handed) < 3 * rate + burst:
        wait, _ = paces.take(1, 1, limit, at)
        if wait > 0:
            at += max(wait, 1e-6)
        else:
            handed.append(at)
    paces.close()
    # What a second has at most: the first ones of it were handed over as long before as publishing may take longer.
    scatter = 0.019 if burst > 1 else 0.4 / rate  # without a burst there is little to keep for it
    assert most_within(handed, 1 + scatter) <= rate + burst
    assert handed[-1] - handed[0] <= 3 + 0.05  # and the rate is reached


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(90), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 3)), max_size=200))
def test_each_bucket_is_as_if_it_were_alone(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, float]]
) -> None:
    limit, folder = RateLimit(2.0, 1), tmp_path_factory.mktemp("pace")
    together = Paces(folder / "together")
    alone: dict[int, Paces] = {}
    zero = time.monotonic() + 5
    for bucket, at in sorted(asked, key=lambda one: one[1]):
        own = alone.setdefault(bucket, Paces(folder / f"{bucket}"))
        # They all begin to look for their slots at the same place.
        number = 5 + (bucket % 30) * ((1 << 18) - 1)
        if bucket <= 30:
            assert together.take(number, 1, limit, zero + at) == own.take(number, 1, limit, zero + at)
    for paces in (together, *alone.values()):
        paces.close()


def test_a_new_run_begins_a_second_after_the_one_before(tmp_path: Path) -> None:
    before, limit = time.monotonic(), RateLimit(100.0, 100)
    paces = Paces(tmp_path / "paces")
    wait, _ = paces.take(1, 1, limit, before)
    assert 1 <= wait <= 1 + time.monotonic() - before
    assert Paces(tmp_path / "paces").take(1, 1, limit, before)[0] == wait
    assert paces.take(1, 100, limit, before + wait)[0] == 0


def planned(rate: dict[str, Any], rows: pa.Table) -> list[PlannedSend]:
    """What a release with a rate for `a`, and none for `b`, sends in a task that takes places."""
    with_rate = Settings.model_validate(
        {"routes": [{"source": TOPIC, "subscriptions": [{"name": "a", "rate": rate}, {"name": "b"}]}]}
    )
    offset = Offset(routes=known_routes(with_rate).to_json(), batch_millis=1_000, now=1_000)
    body = pack(release_rows(rows, 0b11, offset.to_tick().sending))
    # As it was handed out, also where the settings have another rate since.
    without = Settings.model_validate({"routes": [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}]})
    pending = by_time([plan_release(without, Assignment("app", 0, 1, True, body), Attempt())])
    _set_paces(cast(Paces, None), pending)
    return [send for send, _ in pending]


def test_a_batch_takes_all_its_places_at_its_first_message_and_has_no_more_than_the_burst() -> None:
    sends = planned({"messages_per_second": 10, "burst": 3}, messages([(1, i, 1_500) for i in range(8)]))
    shaped = [(send.sequence_id - send.first_id, send.n_places) for send in sends if send.pace is not None]
    assert shaped == [(0, 3), (0, 3), (0, 2)]
    assert {send.subscription for send in sends if send.pace is not None} == {"a"}
    assert {send.n_places for send in sends if send.subscription == "b"} == {8}


def test_each_key_takes_places_of_its_own_where_the_rate_is_by_key() -> None:
    rows = pa.concat_tables(messages([(1, i, 1_500)], key=key) for i, key in enumerate(["x", "y", "x", None]))
    for per, n in (("key", 3), ("subscription", 1)):
        sends = [send for send in planned({"messages_per_second": 10, "per": per}, rows) if send.subscription == "a"]
        paces = {id(send.pace) for send in sends}
        assert None not in [send.pace for send in sends]
        assert len(paces) == n


@pytest.mark.slow
def test_tasks_that_are_late_at_once_send_no_more_than_rate_and_burst_in_any_second(tmp_path: Path) -> None:
    limit, path, published = RateLimit(40.0, 20), tmp_path / "paces", list[float]()

    class Timed(list[int]):
        def __iadd__(self, ids: object) -> Timed:  # type: ignore[misc, override]
            published.append(time.monotonic())
            return self

    lines, items = lines_to([Topic(entries=Timed()), Topic(entries=Timed()), other := Topic()], n=50)
    paces = [Pace(Paces(path), limit, "topic", "a"), Pace(Paces(path), limit, "topic", "a"), None]
    for i, item in enumerate(items):
        item.at, item.pace = now() - 2_000, paces[i % 3]
    began = time.monotonic()
    sent_at, _ = run(lines, items)
    assert not any(line.has_failed for line in lines)
    assert len(published) == 100
    assert most_within(published, 1) <= 60
    assert max(published) < began + 60  # two seconds for what is beyond the burst, and the first one
    # Whatever has no rate waits for none of it.
    assert other.entries == list(range(1, 51))
    assert max(sent_at[2::3]) < min(sent_at[0::3])
