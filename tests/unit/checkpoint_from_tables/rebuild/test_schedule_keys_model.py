"""Messages with schedule keys and lost checkpoints against a naive model: which are delivered, and for when."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.service.one_shard import NAMES, SECOND, Service
from tests.unit.checkpoint_from_tables.rebuild.test_schedule_keys import keyed
from tracker.commands.kinds import RESCHEDULE, SKIP
from tracker.keys import cold_keys
from tracker.messages import concat
from tracker.wire.delaylake_pb2 import Result

pytestmark = [pytest.mark.slow, pytest.mark.long]

DEBOUNCE_MAX = 15 * SECOND

Message = tuple[str, str, int]  # key, mode, delay in seconds
Step = tuple[list[Message], str, int, int]  # messages, what else happens, to which message, a time in seconds

STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from(["k1", "k2"]),
                st.sampled_from(["replace", "keep", "debounce", "debounce"]),
                st.integers(-2, 20),
            ),
            max_size=2,
        ),
        st.sampled_from(["", "", "arrives", "arrives", "is written", "is written", "lost", "lost", SKIP, RESCHEDULE]),
        st.integers(0, 9),
        st.integers(0, 30),
    ),
    min_size=3,
    max_size=24,
)


@dataclass
class One:
    """A message of the model. Times are ms since the epoch."""

    entry: int
    key: str
    mode: str
    came_with: int
    published: int
    due: int
    since: int
    state: str = "comes"  # then `waits`, `is out`, and `arrived`, or else `is gone`
    took_over: bool = False  # it was told that another message of the key yields to this one
    is_moved: bool = False


class Model:
    """What a naive reading of the docs says: of each key one message waits; see docs/schedules.md."""

    def __init__(self) -> None:
        self.all: list[One] = []
        self.last: dict[str, One] = {}

    def take(self, batch: Sequence[One], now: int) -> None:
        """A batch comes in: each message finds the one of its key that waits, if any."""
        in_batch: set[int] = set()
        for one in batch:
            before = self.last.get(one.key)
            # What came in with it had its time already when it was published, or it was still waiting.
            if before is not None and before.entry in in_batch and before.due <= min(now, one.published):
                before = None
            if before is not None and before.state != "waits":
                before = None
            if before is not None:
                one.since = before.since
            elif not one.took_over:
                one.since = one.published
            one.due = one.came_with
            if one.mode == "debounce":
                one.due = min(one.due, one.since + DEBOUNCE_MAX)
            if before is not None and one.mode == "keep":
                one.state, before.took_over = "is gone", True
                continue
            if before is not None:
                before.state, one.took_over = "is gone", True
            one.state = "waits"
            self.last[one.key] = one
            in_batch.add(one.entry)

    def hand_out(self, cutoff: int) -> None:
        for one in self.all:
            if one.state == "waits" and one.due <= cutoff:
                one.state = "is out"

    def arrive(self, now: int) -> None:
        for one in self.all:
            if one.state == "is out" and one.due <= now:
                one.state = "arrived"

    def lose(self, comes_again: set[int], now: int) -> None:
        """What was on its way waits again; what is not durable comes again, unless a command has moved it."""
        again: list[One] = []
        self.last = {}
        for one in self.all:
            if one.state not in ("waits", "is out"):
                continue
            one.state = "waits"
            if one.entry in comes_again and not one.is_moved:
                one.state = "comes"
                again.append(one)
            else:
                self.last[one.key] = one
        self.take(again, now)


class Story:
    """A job and the model, to which the same happens.

    Args:
        folder: of the job.
        idle_millis: as `tracker.schedule_key_idle_millis`.
    """

    def __init__(self, folder: Path, idle_millis: int) -> None:
        self.service = Service(folder, idle_millis)
        self.model = Model()
        self.steps = 0
        self.service.step()

    def happen(self, step: Step) -> None:
        messages, what, target, seconds = step
        if what == "lost":
            again = {entry for table in self.service.source for entry in table["entry_id"].to_pylist()}
            self.service.lose_checkpoint()
            self.model.lose(again, self.service.now)
            self._hand_out()
        waiting = [one for one in self.model.all if one.state == "waits"]
        if what in (SKIP, RESCHEDULE) and waiting:
            one = waiting[target % len(waiting)]
            at = self.service.now + seconds * SECOND if what == RESCHEDULE else None
            assert self.service.order(what, one.entry, (0, 1), at) == [Result.APPLIED] * 2
            if at is None:
                one.state = "is gone"
            else:
                one.due, one.is_moved = max(at, self.service.now), True
            self._hand_out()
        self._take(messages)
        if what in ("arrives", "is written"):
            self.service.arrive([True], what == "is written")
            self.model.arrive(self.service.now)

    def _take(self, messages: Sequence[Message]) -> None:
        new, now, n = [], self.service.now + SECOND, len(self.model.all)
        for entry, (key, mode, delay) in enumerate(messages, n):
            due = now + delay * SECOND
            new.append(One(entry, key, mode, due, now, due, now))
        rows = [
            keyed(one.entry, one.came_with, one.published, one.key, scheduleMode=one.mode, debounceMax="15s")
            for one in new
        ]
        self.steps += 1
        self.service.step(concat(rows) if rows else None, seals=self.steps % 3 == 0)
        self.model.all += new
        self.model.take(new, self.service.now)
        self._hand_out()

    def _hand_out(self) -> None:
        """The model's and the job's messages that are on their way are the same, and due at the same times."""
        self.model.hand_out(self.service.cutoff)
        is_out = {one.entry: one.due for one in self.model.all if one.state == "is out"}
        for name in NAMES:
            rows = [row for _, of, row in self.service.in_flight if of == name]
            assert {row["entry_id"]: row["deliver_at"] for row in rows} == is_out
            assert len(rows) == len(is_out)

    def end(self) -> None:
        for _ in range(45):
            self.happen(([], "is written", 0, 0))

    def arrived(self, name: str) -> list[int]:
        return sorted(entry for entry, _ in self.service.arrived[name])


# The key has ended with the second message, which was delivered; the third begins it anew.
ENDED: list[Step] = [
    ([("k1", "replace", 17)], "", 0, 0),
    ([("k1", "debounce", 0)], "", 0, 0),
    ([], "arrives", 0, 0),
    ([("k1", "debounce", 20)], "", 0, 0),
    ([], "lost", 0, 0),
]

# An older message of a key comes again before the one that had taken the key over, for which it goes on as before.
OLDER_FIRST: list[Step] = [
    ([], "", 0, 12),
    ([("k2", "replace", 0), ("k1", "replace", 17)], "", 0, 0),
    ([("k2", "replace", 18)], "", 0, 25),
    ([("k2", "replace", 3)], "", 0, 0),
    ([("k2", "replace", 16)], "", 0, 25),
    ([], "", 0, 23),
    ([("k2", "keep", 0), ("k1", "replace", -1)], "lost", 0, 16),
    ([], "", 0, 0),
    ([("k1", "replace", 10), ("k1", "replace", 9)], "lost", 5, 12),
    ([("k2", "debounce", 3)], "lost", 2, 14),
]


@effort(max_examples=examples(120), deadline=None)
@given(STEPS, st.sampled_from([600_000, 0]))
@example(ENDED, 600_000)
@example(OLDER_FIRST, 600_000)
def test_what_is_delivered_is_what_a_naive_reading_says_whenever_the_checkpoint_is_lost(
    steps: list[Step], idle_millis: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_keys, "GROUP_MILLIS", 700)
        story = Story(Path(folder), idle_millis)
        for step in steps:
            story.happen(step)
        story.end()
        expected = [one.entry for one in story.model.all if one.state == "arrived"]
        assert all(one.state in ("arrived", "is gone") for one in story.model.all)
        for name in NAMES:
            assert story.arrived(name) == expected
