"""Messages with schedule keys: several shards against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.keyed import AHEAD_MILLIS, NEAR_MILLIS, Job, by_key, keyed
from tests.support.tracker.messages import command
from tracker.commands.kinds import CANCEL, RESCHEDULE, SKIP
from tracker.keys import cold_keys, live_keys
from tracker.messages import concat
from tracker.wire.delaylake_pb2 import Result


@dataclass
class One:
    entry: int
    due: int
    since: int
    came: int
    cancelled: set[str] = field(default_factory=set)


Message = tuple[str | None, str, int, int]
MOST_AGO = 6_000

MODES = st.sampled_from(["replace", "keep", "debounce"])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1_500),  # later
        st.lists(
            st.tuples(
                st.sampled_from(["k1", "k2", "k3", None]),
                MODES,
                st.integers(-200, 4_000),  # delay
                st.sampled_from([0, 0, 1, 300, 2_000, MOST_AGO]),  # read so long after it was published
            ),
            max_size=5,
        ),
        st.sampled_from([None, None, CANCEL, RESCHEDULE, "by id"]),
        st.sampled_from(["k1", "k2"]),
        st.integers(-100, 3_000),
    ),
    max_size=12,
)


@pytest.mark.slow
@effort(max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(steps=STEPS, shards=st.integers(1, 3), fingerprints=st.sampled_from([None, None, 0, 1, (1 << 38) - 1]))
def test_shards_against_the_model(
    steps: list[tuple[int, list[Message], str | None, str, int]], shards: int, fingerprints: int | None
) -> None:
    """Of each key one message waits: the newest, the first, or the newest within its limit; commands change it.

    With `fingerprints` keys become cold as soon as they can, and these are all bits of their hashes that differ.
    """
    with pytest.MonkeyPatch.context() as patch:
        if fingerprints is not None:
            patch.setattr(cold_keys, "GROUP_MILLIS", 700)
            patch.setattr(live_keys, "_FINGERPRINT_MASK", fingerprints)
        ahead_millis, idle_millis = (AHEAD_MILLIS, 600_000) if fingerprints is None else (NEAR_MILLIS, 0)
        check_shards(steps, Job(shards, ahead_millis, idle_millis, is_replayed=True))


def check_shards(steps: list[tuple[int, list[Message], str | None, str, int]], job: Job) -> None:
    now, n = MOST_AGO, 0  # as in Pulsar, nothing was published before the epoch
    job.step(later=now)
    live: dict[str, One] = {}
    waiting: list[One] = []
    superseded: set[tuple[int, str]] = set()
    delivered: list[int] = []
    for later, new, kind, key, at in steps:
        released, now = now, now + later
        live = {k: one for k, one in live.items() if one.due > released}
        rows = []
        for of_key, mode, delay, ago in sorted(new, key=lambda message: -message[3]):
            published = now - ago
            due = published + delay
            one = One(n, due, published, job.tick)
            rule = {"scheduleMode": mode, "debounceMax": "3s"} if of_key is not None else {}
            rows.append(keyed(n, of_key, due, published, -1, 1, **rule))
            n += 1
            if of_key is None:
                waiting.append(one)
                continue
            before = live.get(of_key)
            if before is not None and before.cancelled:
                before = None
            # What came in with it was still waiting when it was published, or not.
            if before is not None and before.came == job.tick and before.due <= min(now, published):
                before = None
            if before is not None:
                one.since = before.since
            if mode == "debounce":
                one.due = min(due, one.since + 3_000)
            if before is not None and mode == "keep":
                superseded.add((one.entry, str(before.entry)))
                continue
            if before is not None:
                superseded.add((before.entry, str(one.entry)))
                waiting.remove(before)
            waiting.append(one)
            live[of_key] = one
        live = {k: one for k, one in live.items() if one.due > now or one.came < job.tick}
        orders = []
        expected: set[int] | None = None
        target = live.get(key)
        if kind in (CANCEL, RESCHEDULE):
            orders.append(by_key(f"r{job.tick}", key, kind, now + at if kind == RESCHEDULE else 0))
        elif kind == "by id" and target is not None:
            orders.append(command(f"r{job.tick}", 1, target.entry * 64, (0, 1), kind=SKIP))
        if orders:
            if target is None:
                expected = {Result.NOT_FOUND}
            elif target.cancelled:
                expected = {Result.INVALID if kind == RESCHEDULE else Result.ALREADY_APPLIED}
            else:
                expected = {Result.APPLIED}
                if kind == RESCHEDULE:
                    target.due = max(now + at, now)
                else:
                    target.cancelled = {"a", "b"}
                    waiting.remove(target)
        told = job.step(concat(rows) if rows else None, orders, later)
        answers = [row["result"] for row in told if row["result"] != Result.SUPERSEDED]
        if expected is not None:
            assert set(answers) == expected
            assert len(answers) == 2
        else:
            assert answers == []
        delivered += [one.entry for one in waiting if one.due <= now]
        waiting = [one for one in waiting if one.due > now]
    assert job.superseded() == superseded
    job.step(later=20_000)
    job.step()
    delivered += [one.entry for one in waiting]
    for name in ("a", "b"):
        assert sorted(entry for entry, _ in job.delivered[name]) == sorted(delivered)
    assert job.all_entries() == [(1, i * 64) for i in range(n)]
