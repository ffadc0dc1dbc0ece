"""Destinations that fail, driven step by step: the time, and what has arrived, are arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conf.times import Moment
from status.alerts import SLOW, UNWRITABLE
from streaming.release.driver import unwritable_destinations as module
from streaming.release.driver.lane_release import LaneRelease, Remainder, RemainderResult
from streaming.release.driver.releases import Releases
from streaming.release.driver.unwritable_destinations import (
    Drain,
    Ended,
    Probe,
    RetryRules,
    Send,
    Step,
    UnwritableDestinations,
    Wait,
)
from tests.support.tracker.messages import TOPIC

TARGET = (TOPIC, "a")


class Run:
    """A run without releases that are on their way, whose time stands still until a test lets it pass."""

    def __init__(self, **rules: Any) -> None:
        self.releases = Releases()
        self.destinations = UnwritableDestinations(
            {TARGET: "a"}, RetryRules(retry_max_seconds=5, **rules), self.releases
        )
        self.seconds = 100.0
        self.name()

    @property
    def now(self) -> Moment:
        return Moment(int(self.seconds * 1_000), self.seconds)

    def name(self) -> None:
        """A batch whose offset names what is open."""
        self.releases.begin_batch(1, self.destinations.recorded() or {TOPIC: {"a": {"open": []}}})

    def leave(self, tick: int, is_slow: bool = False, **remainder: Any) -> None:
        release = LaneRelease(tick=tick, kind=1, lane="l", assignments=(), due=np.array([1]))
        self.destinations.add(TARGET, "away", [Remainder(release, TARGET, **remainder)], self.now, is_slow)

    def step(self) -> Step:
        return self.destinations.next_step(TARGET, self.now)

    def step_after_waiting(self) -> Step:
        """Lets the time pass until there is something to do."""
        for _ in range(1_000):
            if not isinstance(step := self.step(), Wait):
                return step
            self.seconds += step.seconds
        raise AssertionError("nothing is to be done")

    def answer(self, step: Step, reason: str = "", is_slow: bool = False, messages: int = 0) -> None:
        assert isinstance(step, Send | Probe)
        self.destinations.note_result(TARGET, step, RemainderResult(reason, is_slow, messages), self.now)

    @property
    def recorded(self) -> dict[str, Any]:
        found: dict[str, Any] = self.destinations.recorded()[TOPIC]["a"]
        return found


def test_what_is_open_is_sent_at_longer_and_longer_intervals_and_then_it_is_writable() -> None:
    run = Run()
    run.leave(1)
    waits = []
    for _ in range(5):
        before = run.seconds
        step = run.step_after_waiting()
        assert isinstance(step, Send)
        assert ([remainder.release.tick for remainder in step.remainders], step.is_slow) == ([1], False)
        waits.append(run.seconds - before)
        run.answer(step, "refused")
    assert waits == pytest.approx([1, 2, 4, 5, 5])
    assert run.destinations.alerts() == {(UNWRITABLE, "a"): "can't be written: refused"}
    run.answer(run.step_after_waiting())
    assert run.recorded["open"] == []
    run.answer(run.step_after_waiting())  # a probe
    assert isinstance(run.step(), Ended)
    assert (run.destinations.recipients, run.destinations.alerts()) == (frozenset(), {})


def test_it_waits_for_what_is_on_its_way_and_for_older_releases_to_be_written() -> None:
    run = Run()
    release = LaneRelease(tick=0, kind=1, lane="l", assignments=(), due=np.array([1]))
    run.releases.add(release)
    run.leave(1)
    run.seconds += 1
    assert isinstance(run.step(), Wait), "an older release of the lane may leave a remainder open, too"


def test_what_is_recalled_is_not_sent_and_over_when_an_offset_says_so() -> None:
    run = Run()
    run.leave(1, is_untouched=True)
    assert (run.recorded["open"], run.recorded["recalled"]) == ([], [[1, 1]])
    step = run.step_after_waiting()
    assert isinstance(step, Probe)
    run.answer(step)
    assert not isinstance(run.step(), Ended)
    run.destinations.forget_taken_back(run.destinations.recorded())
    run.answer(run.step_after_waiting())
    assert isinstance(run.step(), Ended)


def test_after_a_while_what_is_due_is_rejected_and_it_is_only_probed() -> None:
    run = Run(reject_after_millis=4_000)
    run.leave(1)
    while not run.recorded.get("rejects"):
        run.answer(run.step_after_waiting(), "refused")
    assert run.seconds == pytest.approx(104)
    assert run.recorded["rejects"] == "a can't be written: refused"
    assert "is rejected" in run.destinations.alerts()[UNWRITABLE, "a"]
    step = run.step_after_waiting()
    assert isinstance(step, Probe)
    run.answer(step)
    assert not isinstance(run.step(), Ended), "the offset has to say that it is rejected"
    run.destinations.forget_taken_back(run.destinations.recorded())
    run.answer(run.step_after_waiting())
    assert isinstance(run.step(), Ended)


def test_a_slow_one_gets_rounds_until_it_keeps_up_and_has_to_for_longer_the_next_time() -> None:
    run = Run()
    run.leave(1, is_slow=True)
    assert run.destinations.alerts() == {(SLOW, "a"): "is slow, and what is due for it waits: away"}
    for expected in (module._KEEPS_UP_SECONDS, 2 * module._KEEPS_UP_SECONDS):
        step = run.step_after_waiting()
        assert isinstance(step, Send)
        assert step.is_slow
        run.answer(step, messages=1)
        began, answered = run.seconds, run.recorded.get("round", 0) - 1
        while not isinstance(step := run.step(), Ended):
            assert isinstance(step, Wait)
            run.seconds += max(step.seconds, 0.001)
            if (asked := run.destinations.recorded().get(TOPIC, {}).get("a", {}).get("round", 0)) > answered:
                answered = asked
                run.destinations.note_drained({TARGET: (0, False)})
        assert expected <= run.seconds - began < expected + 2
        assert run.destinations.lately_slow(run.now) == {TARGET}
        run.leave(2, is_slow=True)
    run.seconds += 2_000
    assert run.destinations.lately_slow(run.now) == frozenset()


def test_a_slow_one_that_can_not_be_written_for_a_while_is_slow_again() -> None:
    run = Run()
    run.leave(1, is_slow=True)
    run.answer(run.step_after_waiting(), "refused")
    assert [kind for kind, _ in run.destinations.alerts()] == [UNWRITABLE]
    run.answer(run.step_after_waiting())
    run.answer(run.step_after_waiting())  # a probe
    assert [kind for kind, _ in run.destinations.alerts()] == [SLOW]


@pytest.mark.parametrize("is_rejecting", [False, True])
def test_another_run_goes_on_with_what_the_offset_says(is_rejecting: bool) -> None:
    run = Run(reject_after_millis=1_000_000)
    release = LaneRelease(tick=3, kind=1, lane="l", assignments=(), due=np.array([1]))
    one = {"since": 7, "open": [[3, 1], [4, 1]], "round": 5, "most": 9} | ({"rejects": "gone"} if is_rejecting else {})
    assert run.destinations.resume({TOPIC: {"a": one}}, {(3, 1): release}, run.now) == [TARGET]
    assert (run.recorded["since"], run.recorded["open"]) == (7, [[3, 1]])
    assert run.recorded.get("rejects") == ("gone" if is_rejecting else None)
    assert [kind for kind, _ in run.destinations.alerts()] == [UNWRITABLE if is_rejecting else SLOW]


@pytest.mark.parametrize(
    ("n", "others_wait", "seconds", "is_over"),
    [(50, False, 1, True), (50, False, 10, False), (50, True, 1, False), (0, True, 10, True)],
    ids=["all, fast", "all, slow", "some", "nothing may go out"],
)
def test_it_is_over_when_all_that_waits_is_taken_in_no_time(
    n: int, others_wait: bool, seconds: float, is_over: bool
) -> None:
    drain = Drain()
    assert not drain.is_over(3, 0, 1)
    drain.ask(1)
    assert not drain.is_over(3, 0, 1)
    drain.note_answer(n, others_wait)
    drain.note_sent(n, seconds)
    assert drain.is_over(3, 0, 1) == is_over


def test_it_has_to_keep_up_for_a_while() -> None:
    now = [100.0]
    drain = Drain()

    def is_over_after(n: int, others_wait: bool, seconds: float) -> bool:
        drain.ask(drain.round + 1)
        drain.note_answer(n, others_wait)
        drain.note_sent(n, 0.1)
        now[0] += seconds
        return drain.is_over(3, 10, now[0])

    assert not is_over_after(5, False, 1)
    assert not is_over_after(5, False, 9)
    assert not is_over_after(5, True, 5)  # it has to begin anew
    assert not is_over_after(5, False, 1)
    assert not is_over_after(0, False, 9)
    drain.ask(drain.round + 1)
    now[0] += 5
    assert not drain.is_over(3, 10, now[0])  # it is asked, and not answered
    assert is_over_after(5, False, 0)


@pytest.mark.parametrize(("messages", "seconds", "most"), [(100, 10, 100), (1_000, 5, 1_000), (1_000_000, 5, 20_000)])
def test_a_round_has_as_many_as_it_takes_in_five_seconds_within_limits(
    messages: int, seconds: float, most: int
) -> None:
    drain = Drain()
    drain.note_sent(messages, seconds)
    assert drain.most == most
