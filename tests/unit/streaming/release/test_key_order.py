"""Order per key, from the shards to the destination, whatever is sent side by side, fails or is sent again."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from tests.support.fuzzing.examples import examples
from tests.support.naive.key_order_history import Came, violations
from tests.support.service.key_order_service import Service, settings_of
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import TOPIC, messages, tick_at
from tracker.messages import concat
from tracker.packing import pack
from tracker.properties import position_of
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput
from warehouse.routes.known_routes import known_routes

SETTINGS = settings_of()
ROUTES = known_routes(SETTINGS)

TICK = st.tuples(
    st.integers(1, 7).map(lambda n: n * 100),  # so that many are due at the same time
    st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 25).map(lambda n: n * 100)), max_size=8),
    st.integers(0, 25),
    st.integers(0, 12).map(lambda n: n == 0),
)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(TICK, min_size=2, max_size=15), st.integers(0, 1 << 30))
def test_messages_of_a_key_come_in_order_however_jobs_and_lines_go_and_whatever_ends(
    ticks: list[tuple[int, list[tuple[int, int]], int, bool]], seed: int
) -> None:
    service = Service(seed)
    for later, entries, steps, is_crash in [*ticks, (5_000, [], 0, True), (1, [], 0, False)]:
        if is_crash:
            service.start()
        service.batch(later, entries)
        for _ in range(steps):
            service.step()
    service.finish()
    for name in ("one", "other"):
        came = service.came(name)
        counts = Counter(one.position for one in came)
        assert len(counts) == service.entries
        assert set(counts.values()) <= {1}
    assert violations([one for one in service.came("one") if one.key]) == []


@pytest.mark.slow
def test_without_it_the_same_service_has_messages_of_a_key_overtake_each_other() -> None:
    service = Service(7)
    for _ in range(12):
        service.batch(300, [(1 + i % 3, 200 * i) for i in range(8)])
    service.batch(5_000, [])
    service.finish()
    assert violations(service.came("other"))
    assert not violations(service.came("one"))


def test_the_history_checker_knows_what_could_have_come_before() -> None:
    def came(key: str, due: int, position: int, tick: int) -> Came:
        return Came(key.encode(), due, (position,), tick)

    first, then = came("a", 20, 1, tick=5), came("a", 10, 2, tick=5)
    assert violations([then, first]) == []
    assert violations([first, then]) == [(first, then)]
    assert violations([first, came("a", 10, 2, tick=6)]) == []  # it came in too late
    assert violations([first, came("b", 10, 2, tick=5)]) == []
    assert violations([came("a", 20, 2, tick=5), came("a", 20, 1, tick=4)]) != []


def test_those_of_a_key_stay_in_order_where_ticks_are_sent_together() -> None:
    """As what was handed out for a destination that could not be written."""
    service = Service(1)
    service.batch(1, [(1, 900), (3, 1_000), (2, 800), (2, 100)])
    service.batch(500, [(1, -100), (3, 400), (2, 0), (1, 1_000), (3, 600)])
    service.batch(500, [(1, 0), (3, 10), (2, 900)])
    plans = [
        plan_release(SETTINGS, a, Attempt()) for jobs in service.lanes.values() for j in jobs for a in j.assignments
    ]
    ordered = [(send, plan) for send, plan in by_time(plans) if send.key is not None]
    by_line: dict[str, list[int]] = defaultdict(list)
    for send, _ in ordered:
        by_line[send.producer].append(send.sequence_id)
    assert all(ids == sorted(ids) for ids in by_line.values())
    assert [send.at for send, _ in ordered] == sorted(send.at for send, _ in ordered)
    assert len(ordered) == 12
    came = [
        Came(send.key[2], send.due, position_of(plan.columns, send.row), plan.tick)
        for send, plan in ordered
        if send.key is not None
    ]
    assert violations(came) == []


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_message_with_an_ordering_key_alone_stays_with_the_others_of_its_key(partitions: int) -> None:
    rows = messages([(1, i, 10) for i in range(20)], ordering_key="k")
    offset = Offset(lanes=1, routes=ROUTES.to_json(), destinations={f"{TOPIC}-one": partitions})
    tick = tick_at(1, 100, sending=offset.to_tick().sending)
    [release] = [
        one
        for one in Shard(MemoryStore(), offset.known_routes.subscriptions, 100)
        .apply(tick, TickInput(messages=rows))
        .releases
        if one.kind & 2
    ]
    plan = plan_release(SETTINGS, Assignment("app", 0, 1, release.kind, pack(release.rows)), Attempt())
    assert len({send.topic for send in sends_of(plan)}) == 1
    assert len(sends_of(plan)) == 20


def test_bytes_are_keys_too_and_messages_without_a_key_have_no_order() -> None:
    of_bytes: dict[str, object] = {"ordering_key_bytes": b"\xff\x00", "key": "a"}
    of_java: dict[str, object] = {"key": "/wA=", "key_encoding": "base64"}  # as the client gives a key of bytes
    kinds: list[dict[str, object]] = [of_bytes, of_java, {"key": None}, of_bytes | {"key": None}, of_java]
    rows = concat(messages([(1, 65 * i, 100 - 10 * i)], **kind) for i, kind in enumerate(kinds))
    tick = tick_at(1, 100, sending=Offset(lanes=1, routes=ROUTES.to_json()).to_tick().sending)
    effects = Shard(MemoryStore(), ROUTES.subscriptions, 100).apply(tick, TickInput(messages=rows))
    by_key: dict[object, list[int]] = defaultdict(list)
    for one in effects.releases:
        plan = plan_release(SETTINGS, Assignment("app", 0, 1, one.kind, pack(one.rows)), Attempt())
        for send, _ in by_time([plan]):
            if send.subscription == "one":
                by_key[send.key and send.key[2]].append(plan.columns["entry_id"][send.row] // 65)
    assert by_key == {b"\xff\x00": [3, 0], b"/wA=": [4, 1], None: [2]}
