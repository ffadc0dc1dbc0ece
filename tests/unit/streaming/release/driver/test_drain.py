"""The rounds in which a slow destination gets what is held back for it."""

from __future__ import annotations

import pytest

from streaming.release.driver.drain import Drain


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
