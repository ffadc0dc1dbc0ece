"""What was held back is divided into steps, of all shards alike, and a shard's part goes out in them in order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tracker.messages import TOPIC, messages
from tracker.message_state import parking as module
from tracker.message_state.parking import PACE_ROWS, pace, step_of
from tracker.messages import with_columns


@pytest.mark.slow
@given(st.lists(st.integers(0, 6_000), min_size=1, max_size=40), st.integers(1, 4))
def test_each_shard_finds_the_steps_of_its_rows(groups: list[int], shards: int) -> None:
    """A group is of messages due at one time."""
    due = np.sort(np.repeat(np.arange(len(groups)) % 7, groups))
    steps = due[PACE_ROWS::PACE_ROWS].tolist()
    found = []
    for shard in range(shards):
        own = due[shard::shards]
        step = step_of(own, steps)
        assert (np.diff(step) >= 0).all()
        found += list(zip(step.tolist(), own.tolist(), strict=True))
    found.sort()
    assert [time for _, time in found] == due.tolist(), "by step, then by time: all in order"
    sizes = np.bincount([step for step, _ in found], minlength=1)
    assert len(sizes) <= len(steps) + 1
    # Of one time a shard spreads its rows over steps as well as it can.
    assert sizes.max() <= 3 * PACE_ROWS


def test_each_subscription_has_its_own_steps_and_few_messages_have_none() -> None:
    rows = messages([(1, entry, 5) for entry in range(2_500)])
    names = ["a"] * 2_100 + ["b"] * 400
    times = [None, *range(2_499)]
    rows = with_columns(rows, subscription=pa.array(names), was_due=pa.array(times, pa.int64()))
    assert pace(rows) == {TOPIC: {"a": [999, 1999]}}
    assert pace(rows.slice(0, 0)) == {}
    assert module.step_of(np.array([0, 998, 1_000, 5_000]), [999, 1999]).tolist() == [0, 0, 1, 2]
