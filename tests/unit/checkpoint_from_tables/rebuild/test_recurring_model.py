"""Any history of recurring messages on tables, with lost checkpoints, against what holds for each of their rules."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.service.one_shard import (
    NAMES,
    SECOND,
    Service,
    recurring,
    run_audit_of_tables,
)
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP_NEXT
from tracker.commands.occurrences import MISFIRE_GRACE_MILLIS
from tracker.message_state.changes import HELD_DELIVER_AT, Moved
from tracker.messages import MessageIds
from tracker.wire.delaylake_pb2 import Result

pytestmark = [pytest.mark.slow, pytest.mark.long]

# A move; of which message, which subscriptions, how long; what arrives.
Move = tuple[str, int, int, list[bool]]

PERIODS = (3, 7, 45)
MISFIRES = ("all", "once", "skip")
OTHERS = ("run", "run", "run", "new", "arrive", "crash", "crash", "pause", "down")
COMMANDS = (CANCEL, RESTORE, SKIP_NEXT, RESCHEDULE, PAUSE_SCHEDULE, PAUSE_SCHEDULE, RESUME_SCHEDULE)


class History:
    """A job and its history, of which each step is checked.

    Attributes:
        started: of each entry its period, ms, its misfire and when it is due first, ms since the epoch.
        cancelled: by subscription and entry when the cancelled occurrence is due, ms since the epoch.
        were_cancelled: also those that were restored.
        asleep: the schedules that are paused, by subscription and entry.
        due: by subscription and entry the time by the rule of each occurrence that was handed out, by number.
        arrived_at: the same, when each has arrived.
        lost: by subscription and entry the first number that had been handed out and has not arrived when a checkpoint
            was lost.
    """

    def __init__(self, folder: Path) -> None:
        self.service = Service(folder)
        self.messages: list[int] = []  # which message each entry is of: a broker's ids ascend
        self.started: list[tuple[int, str, int]] = []
        self.cancelled: dict[tuple[int, int], int] = {}
        self.were_cancelled: set[tuple[int, int]] = set()
        self.asleep: set[tuple[int, int]] = set()
        self.moved: set[tuple[int, int]] = set()
        self.due: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self.arrived_at: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self.lost: dict[tuple[int, int], int] = {}
        self.is_paused = False

    def do(self, move: Move) -> None:
        kind, one, n, chosen = move
        service = self.service
        if kind == "new" and one not in self.messages:
            self.messages.append(one)
            every, start = PERIODS[one] * SECOND, service.now + n * SECOND
            self.started.append((every, MISFIRES[n % 3], start))
            row = recurring(len(self.messages) - 1, start, f"@every {PERIODS[one]}s", misfire=MISFIRES[n % 3])
            service.step(row, seals=chosen[0])
        elif kind == "run":
            for i in range(n):
                self.step(chosen, i)
        elif kind == "down":
            service.now += n * 10 * SECOND
            self.step(chosen, n)
        elif kind == "arrive":
            self.arrive(chosen, n % 2 == 0)
        elif kind == "crash" and self.messages:
            self.crash()
        elif kind == "pause":
            self.is_paused = not self.is_paused
            service.pause(0b01, self.is_paused)
        elif one in self.messages and kind in COMMANDS:
            self.order(kind, self.messages.index(one), tuple(sorted({n % 2, one % 2})), n)
        self.look()

    def step(self, chosen: list[bool], i: int) -> None:
        self.service.step(seals=i % 3 == 2)
        self.look()
        self.arrive(chosen, i % 2 == 0)

    def arrive(self, chosen: list[bool], is_written: bool) -> None:
        self.service.arrive(chosen, is_written)
        for bit, name in enumerate(NAMES):
            for entry, number in self.service.arrived[name]:
                self.arrived_at[bit, entry].setdefault(number, self.service.now)

    def crash(self) -> None:
        """The checkpoint is lost: the first occurrence that has not arrived is next."""
        skipped = self.skipped()
        for of, due in self.due.items():
            missing = sorted(due.keys() - self.arrived_at[of].keys() - skipped[of])
            if missing and of not in self.cancelled and missing[0] - 1 in {0, *self.arrived_at[of]}:
                self.lost[of] = missing[0]
        self.service.lose_checkpoint()

    def skipped(self) -> dict[tuple[int, int], set[int]]:
        """Returns by subscription and entry the numbers that were skipped."""
        rows = self.service.tables.sql(
            "SELECT subscription, entry_id, occurrence FROM outcomes "
            "WHERE operation = 'SKIP_NEXT' AND result = 'APPLIED'"
        )
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        for row in rows.to_pylist():
            found[NAMES.index(row["subscription"]), row["entry_id"]].add(row["occurrence"])
        return found

    def order(self, kind: str, entry: int, bits: tuple[int, ...], seconds: int) -> None:
        """A command has the result that it is to have."""
        service, cutoff = self.service, self.service.cutoff
        pending = {bit: self.pending(bit, entry) for bit in bits}
        results = service.order(kind, entry, bits, service.now + seconds * SECOND)
        for bit, result in zip(bits, results, strict=True):
            of = bit, entry
            if kind == CANCEL:
                assert (result == Result.ALREADY_APPLIED) is (of in self.cancelled) or result == Result.TOO_LATE
                if result == Result.APPLIED:
                    self.cancelled[of] = pending[bit]
                    self.were_cancelled.add(of)
            elif kind == RESTORE:
                assert (result == Result.ALREADY_APPLIED) is (of not in self.cancelled)
                until = self.cancelled.get(of, HELD_DELIVER_AT)
                if until != HELD_DELIVER_AT:  # what is held back may have gone out since
                    assert (result == Result.APPLIED) is (until > cutoff), (until, cutoff, result)
                if result == Result.APPLIED:
                    del self.cancelled[of]
            elif of in self.cancelled:
                assert result in (Result.INVALID, Result.TOO_LATE)
            elif kind == PAUSE_SCHEDULE:
                assert result == (Result.ALREADY_APPLIED if of in self.asleep else Result.APPLIED)
                self.asleep.add(of)
            elif kind == RESUME_SCHEDULE:
                assert result == (Result.APPLIED if of in self.asleep else Result.ALREADY_APPLIED)
                self.asleep.discard(of)
            elif kind == SKIP_NEXT:
                assert result == Result.APPLIED
            else:
                assert result == (Result.INVALID if of in self.asleep else Result.APPLIED)
                self.moved.add(of)

    def pending(self, bit: int, entry: int) -> int:
        """Returns when the next occurrence is due, ms since the epoch."""
        ids = MessageIds(*(np.array([number]) for number in (1, entry, -1)))
        moves, times, _ = Moved(self.service.store).find_moves(bit, ids)
        return int(times[0]) if moves[0] else self.started[entry][2]

    def look(self) -> None:
        """What has been handed out is as the rules have it; what is paused waits."""
        service = self.service
        n_late: dict[tuple[int, int], int] = defaultdict(int)
        for tick, name, row in service.in_flight:
            of = NAMES.index(name), row["entry_id"]
            every, misfire, start = self.started[of[1]]
            due = row["deliver_at"] if row["occurrence_at"] is None else row["occurrence_at"]
            known = self.due[of]
            if tick != service.tick:
                continue
            if row["occurrence"] in known:
                is_late = (
                    misfire == "skip" and service.now - known[row["occurrence"]] > MISFIRE_GRACE_MILLIS - 5 * SECOND
                )
                before = self.arrived_at[of].get(row["occurrence"] - 1, 0)
                if self.lost.get(of) == row["occurrence"] and not is_late and before < known[row["occurrence"]]:
                    assert due == known[row["occurrence"]], (of, row["occurrence"])
                self.lost.pop(of, None)
                continue
            known[row["occurrence"]] = due
            assert (due - start) % every == 0
            assert sorted(known.values()) == [known[number] for number in sorted(known)]
            assert len(set(known.values())) == len(known)
            if of in self.moved:
                continue
            if misfire == "all":
                assert due == start + (row["occurrence"] - 1) * every
            elif misfire == "skip":
                assert service.now - due <= MISFIRE_GRACE_MILLIS
            n_late[of] += misfire == "once" and due < service.now
        assert all(n <= 1 for n in n_late.values())
        for bit, entry in self.asleep:  # what had been handed out before may come
            assert max(service.numbers(NAMES[bit], entry), default=0) < self.paused_at(NAMES[bit], entry)

    def paused_at(self, name: str, entry: int) -> int:
        """Which occurrence was next when a schedule was paused."""
        found = self.service.tables.sql(
            f"SELECT occurrence FROM outcomes WHERE operation = 'PAUSE_SCHEDULE' AND result = 'APPLIED' "
            f"AND subscription = '{name}' AND entry_id = {entry} ORDER BY sequence DESC LIMIT 1"
        )
        return int(found["occurrence"][0].as_py())

    def end(self) -> None:
        """All goes on, once more without its checkpoint; each occurrence has arrived once."""
        service = self.service
        if self.is_paused:
            service.pause(0b01, False)
        for bit, entry in sorted(self.asleep):
            told = service.order(RESUME_SCHEDULE, entry, (bit,))
            assert told == [Result.INVALID if (bit, entry) in self.cancelled else Result.APPLIED]
        self.asleep = set()
        self.crash()
        for i in range(60):
            self.step([True], i)
        skipped = self.skipped()
        for bit, name in enumerate(NAMES):
            for entry, (every, _, _) in enumerate(self.started):
                gaps = skipped[bit, entry]
                numbers = service.numbers(name, entry)
                assert len(numbers) == len(set(numbers)), (name, entry, numbers)
                missing = set(range(1, max(numbers, default=0) + 1)) - set(numbers) - gaps
                # Of what is cancelled the one in flight at that moment may have been lost with the checkpoint.
                assert not missing or (bit, entry) in self.were_cancelled, (name, entry, numbers, gaps)
                if (bit, entry) not in self.cancelled:
                    last = max(self.due[bit, entry].values())
                    assert service.now - last <= every + 12 * SECOND
        findings = run_audit_of_tables(service)
        assert not findings.keys() & {"doubled", "lost", "reject_delivered"}, findings


@effort(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([*OTHERS, *COMMANDS]),
            st.integers(0, 2),
            st.integers(1, 12),
            st.lists(st.booleans(), min_size=1, max_size=3),
        ),
        max_size=16,
    )
)
@example(moves=[("new", 0, 4, [False]), ("run", 0, 11, [False]), ("crash", 0, 8, [True]), ("run", 0, 12, [True])])
def test_whatever_happens_each_occurrence_arrives_once_for_each_subscription(moves: list[Move]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        for move in moves:
            history.do(move)
        history.end()
