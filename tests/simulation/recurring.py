"""What comes of messages that recur, by docs/schedules.md alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.accounts import Accounts, BrokenGuaranteeError, require
from tests.simulation.expected import Arrival, Repeat, entry_of


@dataclass
class Schedule:
    """A message that recurs, of a subscription.

    Attributes:
        came: the numbers of its occurrences.
        skipped: numbers that a command has left out.
        moved: numbers that a command has given another time.
        ended_at: since when it has ended, ms since the epoch; None: it goes on.
        paused_at: likewise.
        was_restored: a command took it up again.
        is_unsure: answers about it came after the backup that is the warehouse now: they are given again, about what
            has come meanwhile.
    """

    repeat: Repeat
    came: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    ended_at: int | None = None
    paused_at: int | None = None
    was_restored: bool = False
    is_unsure: bool = False


class Schedules:
    """The accounts of all messages that recur.

    Args:
        accounts: have the commands.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._schedules: dict[tuple[str, str], Schedule] = {}  # by position and subscription
        self._positions: set[str] = set()
        self._last_resume: dict[tuple[str, str], int] = {}  # when it was sent, ms since the epoch

    def sent(self, position: str, repeat: Repeat, subscriptions: Iterable[str]) -> None:
        """A message that recurs is in a source topic."""
        self._positions.add(position)
        for name in sorted(subscriptions):
            self._schedules[position, name] = Schedule(repeat)

    def has(self, position: str) -> bool:
        """Whether a message recurs."""
        return position in self._positions

    def are_over(self, entry: str) -> bool:
        """Whether outcomes say that what recurs in an entry, alone there, has ended for all its subscriptions."""
        found = [one for (position, _), one in self._schedules.items() if entry_of(position) == entry]
        return bool(found) and all(one.ended_at is not None for one in found)

    def of_subscription(self, name: str) -> dict[str, Schedule]:
        """The schedules of a subscription, by position."""
        return {position: one for (position, of_name), one in self._schedules.items() if of_name == name}

    def resumed(self, position: str, name: str, now: int) -> None:
        """A command that resumes a schedule is on its way."""
        self._last_resume[position, name] = now
        self._schedules[position, name].paused_at = None

    def arrived(self, arrival: Arrival, now: int) -> None:
        """An occurrence has come to a destination: once, never early, and not after the end, or in a pause."""
        one, number = self._schedules[arrival.position, arrival.subscription], arrival.occurrence
        what = f"{arrival.subscription} has got occurrence {number} of {arrival.position}"
        require(0 < number <= one.repeat.times, f"{what}, which has {one.repeat.times}")
        require(number not in one.came, f"{what} twice")
        require(one.is_unsure or number not in one.skipped, f"{what}, which was skipped")
        one.came.add(number)
        if self._accounts.operations_for(arrival.position) & {"RESCHEDULE", "POSTPONE", "RESTORE"}:
            return
        due = one.repeat.due(number)
        early = due - now - self._accounts.ahead_millis
        require(early <= 0, f"{what} {early} ms early")
        if one.is_unsure:
            return
        for since, why in ((one.ended_at, "end"), (one.paused_at, "pause")):
            is_after = since is not None and arrival.deliver_at > since + self._accounts.dispatched_millis
            require(not is_after, f"{what}, due {arrival.deliver_at - (since or 0)} ms after its {why}")

    def restored(self, lost: Iterable[Mapping[str, Any]]) -> None:
        """A backup is the warehouse now, without these answers."""
        self.are_unsure((row["position"], row["subscription"]) for row in lost)

    def are_unsure(self, pairs: Iterable[tuple[str, str]]) -> None:
        """What was done of the schedules among these messages, each of a subscription, may not be known any more."""
        for pair in pairs:
            if (one := self._schedules.get(pair)) is not None:
                one.is_unsure = True

    def answered(self, row: Mapping[str, Any]) -> None:
        """A command for a schedule is answered in `outcomes`."""
        position, name = row["position"], row["subscription"]
        operation, result, number = row["operation"], row["result"], row["occurrence"]
        one = self._schedules[position, name]
        what = f"{operation} {position} of {name}: {result} {number}"
        if result != "APPLIED":
            return
        if one.is_unsure:
            if operation in ("CANCEL", "SKIP", "RESTORE"):
                one.ended_at = None if operation == "RESTORE" else row["applied_at"]
            return
        match operation:
            case "SKIP_NEXT":
                require(one.ended_at is None or one.was_restored, f"{what}, though it has ended")
                require(number not in one.came | one.skipped, f"{what}, which has come, or is skipped")
                one.skipped.add(number)
            case "CANCEL" | "SKIP":
                require(one.ended_at is None or one.was_restored, f"{what}, though it has ended")
                one.ended_at = row["applied_at"]
            case "RESTORE":
                one.ended_at, one.was_restored = None, True
            case "PAUSE_SCHEDULE":
                command = self._accounts.commands.get(row["request_id"])  # a rebuild tells of pauses under its own ids
                if command is not None and self._last_resume.get((position, name), -1) < command.sent_at:
                    one.paused_at = row["applied_at"]
            case "RESUME_SCHEDULE" | "RESCHEDULE" | "POSTPONE":
                pass
            case _:
                raise BrokenGuaranteeError(what)

    def check_end(self) -> None:
        """Nothing waits any more: each number has come, or was skipped."""
        for (position, name), one in self._schedules.items():
            if one.is_unsure and self._accounts.operations_for(position) & {"CANCEL", "SKIP", "SKIP_NEXT"}:
                continue
            done = one.came | one.skipped
            last = one.repeat.times if one.ended_at is None else max(done, default=0)
            if one.ended_at is not None and self._accounts.n_rebuilds:
                last = 0  # the first number that was missing became the next one, which has ended
            missing = sorted({*range(1, last + 1)} - done)
            require(not missing, f"{name} has not got the occurrences {missing} of {position}")
