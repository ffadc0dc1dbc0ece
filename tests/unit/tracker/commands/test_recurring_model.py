"""Any history of recurring messages in a shard: what is handed out, and answered, is as a naive reading has it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.naive.schedule import NaiveSchedule
from tests.support.tracker.messages import TOPIC, command
from tests.support.tracker.recurring import SECOND, Job, recurring
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP, SKIP_NEXT
from tracker.schemas import PauseChange
from tracker.wire.delaylake_pb2 import Result

# A move, an entry, a number of seconds or so, subscriptions as bits.
Move = tuple[str, int, int, int]

# By entry its period in seconds, its misfire, and how often it recurs.
SCHEDULES = ((7, "once", None), (7, "all", None), (50, "skip", None), (3, "skip", None), (7, "all", 5), (7, "once", 5))
COMMANDS = (CANCEL, CANCEL, RESTORE, RESTORE, SKIP, SKIP_NEXT, RESCHEDULE, PAUSE_SCHEDULE, RESUME_SCHEDULE)
OTHERS = ("run", "run", "run", "down", "pause", "resume")
NAMES = ("a", "b")


class Compared:
    """A shard, and the naive reading of each subscription's schedules, which take the same ticks."""

    def __init__(self, lookahead: int) -> None:
        self.job = Job(lookahead=lookahead, is_replayed=True)
        self.naive: dict[tuple[str, int], NaiveSchedule] = {}
        self.is_paused = dict.fromkeys(NAMES, False)
        self.cutoff = 0
        self.requests = 0

    def step(self, later: int = SECOND, **given: Any) -> Any:
        """A tick of both, which hands out the same."""
        before = {name: len(self.job.got[name]) for name in NAMES}
        effects = self.job.step(later=later, **given)
        self.cutoff = effects.status["cutoff"]
        for name in NAMES:
            got = [(entry, number or 0, due) for entry, number, due in self.job.got[name][before[name] :]]
            assert sorted(got) == sorted(
                (entry, number, due)
                for (of, entry), one in self.naive.items()
                if of == name
                for number, due in one.tick(self.job.now, self.cutoff, self.is_paused[name])
            ), (name, self.job.now)
        return effects

    def new(self, entry: int, seconds: int, seals: bool) -> None:
        """A message comes, and is due for the first time so many seconds later."""
        if (NAMES[0], entry) in self.naive:
            return
        every, misfire, times = SCHEDULES[entry]
        published = self.job.now
        start = published + seconds * SECOND
        for name in NAMES:
            self.naive[name, entry] = NaiveSchedule(every * SECOND, start, published, misfire, times)
        limit = {} if times is None else {"repeatTimes": str(times)}
        row = recurring(entry, start, f"@every {every}s", published, misfire=misfire, **limit)
        self.step(rows=row, seals=seals)

    def pause(self, bits: int, is_paused: bool) -> None:
        """Subscriptions are paused, or resumed."""
        self.requests += 1
        for bit, name in enumerate(NAMES):
            if bits >> bit & 1:
                self.is_paused[name] = is_paused
                for (of, _), one in self.naive.items():
                    one.is_held &= of != name or is_paused
        self.step(pause=PauseChange(f"r{self.requests}", TOPIC, bits, is_paused))

    def order(self, kind: str, entry: int, bits: int, seconds: int) -> None:
        """A command is answered as the naive reading has it."""
        if (NAMES[0], entry) not in self.naive:
            return
        self.requests += 1
        now, chosen = self.job.now + SECOND, [bit for bit in range(len(NAMES)) if bits >> bit & 1]
        at = now + seconds * SECOND if kind in (CANCEL, RESCHEDULE) else None
        expected, were_over = [], []
        for bit in chosen:
            one = self.naive[NAMES[bit], entry]
            were_over.append(one.is_over)
            expected.append(one.command(kind, now, self.cutoff, at or 0))
        order = command(f"r{self.requests}", 1, entry, chosen, -1, at, kind=kind)
        results = self.step(order=order).outcomes["result"].to_pylist()
        for result, wanted, was_over in zip(results, expected, were_over, strict=True):
            # How one that is over ended is not remembered for long.
            assert result != Result.APPLIED if was_over else result == wanted, (kind, result, wanted)


@pytest.mark.slow
@effort(max_examples=examples(150), deadline=None, phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink])
@given(
    entries=st.lists(st.integers(0, len(SCHEDULES) - 1), min_size=1, max_size=2, unique=True),
    moves=st.lists(
        st.tuples(st.sampled_from([*OTHERS, *COMMANDS]), st.integers(0, 1), st.integers(0, 24), st.integers(1, 3)),
        max_size=16,
    ),
    lookahead=st.sampled_from([0, 2_500]),
)
def test_any_history_is_as_a_naive_reading_has_it(entries: list[int], moves: list[Move], lookahead: int) -> None:
    both = Compared(lookahead)
    both.step()
    for entry in entries:
        both.new(entry, 3 + 4 * entry, entry % 2 == 0)
    for kind, which, seconds, bits in moves:
        entry = entries[which % len(entries)]
        if kind == "run":
            for _ in range(seconds):
                both.step(seals=seconds % 3 != 0)
        elif kind == "down":
            both.step(later=seconds * 8 * SECOND, seals=bits != 3)
        elif kind in ("pause", "resume"):
            both.pause(bits, kind == "pause")
        else:
            both.order(kind, entry, bits, seconds)
    for _ in range(4):
        both.step()
    both.step(later=100 * SECOND)
    both.pause(0b11, False)
    for entry in entries:
        both.order(RESUME_SCHEDULE, entry, 0b11, 0)
    for _ in range(25):
        both.step()
