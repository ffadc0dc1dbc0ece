"""Messages with an end, pauses and lost checkpoints: each is delivered or expires, once, and never before its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.service.one_shard import NAMES, SECOND, Service
from tests.support.tracker.messages import messages
from tracker.messages import concat
from tracker.tick import Effects
from tracker.wire.delaylake_pb2 import Result

pytestmark = [pytest.mark.slow, pytest.mark.long]

Ended = tuple[int, int | None]  # delay, and how long after its time the message expires, seconds
Step = tuple[list[Ended], str, int]  # messages, what else happens, of which subscription

STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(-2, 20), st.sampled_from([None, 1, 3, 10, 30])), max_size=2),
        st.sampled_from(["", "", "arrives", "is written", "lost", "pause", "resume", "stand still"]),
        st.integers(0, 1),
    ),
    min_size=3,
    max_size=24,
)


class Story:
    """A job, when each of its messages ends, and what it said of those that expired."""

    def __init__(self, folder: Path, expire_after: int | None) -> None:
        self.service = Service(folder, expire_after=expire_after)
        self.expire_after = expire_after
        self.ends: dict[tuple[str, int], int | None] = {}
        self.expired: list[tuple[str, int]] = []
        self.paused: set[int] = set()
        self.steps = 0
        apply = self.service.step

        def step(*arguments: object, **options: object) -> Effects:
            effects = apply(*arguments, **options)  # type: ignore[arg-type]
            self._note(effects)
            return effects

        self.service.step = step  # type: ignore[method-assign]
        self.service.step()

    def happen(self, step: Step) -> None:
        new, what, number = step
        service = self.service
        if what == "lost":
            service.lose_checkpoint()
        elif what in ("pause", "resume") and (number in self.paused) == (what == "resume"):
            service.pause(1 << number, what == "pause")
            self.paused ^= {number}
        elif what == "stand still":
            service.now += 20 * SECOND
        self._take(new)
        if what in ("arrives", "is written"):
            service.arrive([True], what == "is written")

    def end(self) -> None:
        for _ in range(10):
            self._take([])
        dispatched = {(name, row["entry_id"]) for _, name, row in self.service.in_flight}
        arrived = {(name, entry) for name in NAMES for entry, _ in self.service.arrived[name]}
        for one, end in self.ends.items():
            if end is not None and end < self.service.now - 5 * SECOND and one not in dispatched | arrived:
                assert one in self.expired, "it expires where it is parked, and not when the pause ends"
        for number in sorted(self.paused):
            self.service.pause(1 << number, False)
        for _ in range(60):
            self._take([])
            self.service.arrive([True], True)

    def _take(self, new: list[Ended]) -> None:
        rows = []
        for entry, (delay, after) in enumerate(new, len(self.ends) // 2):
            due = self.service.now + (1 + delay) * SECOND
            end = None if after is None else due + after * SECOND
            ends = [one for one in (end, self.expire_after and due + self.expire_after) if one is not None]
            self.ends |= {("a", entry): min(ends, default=None), ("b", entry): end}
            rows.append((entry, due, end))
        self.steps += 1
        table = [messages([(1, entry, due)], expires_at=end) for entry, due, end in rows]
        self.service.step(concat(table) if table else None, seals=self.steps % 3 == 0)

    def _note(self, effects: Effects) -> None:
        for row in effects.outcomes.to_pylist():
            if row["result"] == Result.EXPIRED:
                one = (row["subscription"], row["entry_id"])
                end = self.ends[one]
                assert end is not None
                assert self.service.now >= end, one
                self.expired.append(one)


# It is parked when the checkpoint is lost, and its end comes afterwards.
PARKED: list[Step] = [([(1, 30)], "pause", 0), *[([], "", 0)] * 8, ([], "lost", 0), *[([], "", 0)] * 25]

# Its answer is known from the tables when it comes again from the source.
COMES_AGAIN: list[Step] = [([], "", 0), ([(-2, 1)], "", 0), ([], "lost", 0)]


@effort(max_examples=examples(120), deadline=None)
@example(PARKED, None)
@example(PARKED, 8 * SECOND)
@example(COMES_AGAIN, None)
@given(STEPS, st.sampled_from([None, 2 * SECOND, 8 * SECOND]))
def test_each_message_is_delivered_or_expires_whenever_the_checkpoint_is_lost(
    steps: list[Step], expire_after: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder), expire_after)
        for step in steps:
            story.happen(step)
        story.end()
        arrived = [(name, entry) for name in NAMES for entry, _ in story.service.arrived[name]]
        assert sorted([*arrived, *story.expired]) == sorted(story.ends)
