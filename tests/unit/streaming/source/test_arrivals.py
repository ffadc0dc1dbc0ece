"""The loop that ends batches wakes up at once for what can't wait, and for nothing else."""

from __future__ import annotations

import threading

import pytest

from streaming.source.arrivals import ANY, Arrivals


class Loop:
    """Waits for arrivals in a thread."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.has_woken = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.arrivals.wait(30)
        self.has_woken.set()


def test_what_is_due_by_the_time_wakes_the_loop() -> None:
    arrivals = Arrivals()
    arrivals.wake_until = 1_000
    loop = Loop(arrivals)
    arrivals.note(1_000)
    assert loop.has_woken.wait(10)


@pytest.mark.parametrize(("wake_until", "earliest"), [(1_000, 0), (ANY, ANY), (ANY, 5_000)])
def test_what_can_not_wait_wakes_the_loop_also_before_it_waits(wake_until: int, earliest: int) -> None:
    arrivals = Arrivals()
    arrivals.wake_until = wake_until
    arrivals.note(earliest)
    assert Loop(arrivals).has_woken.wait(10)


def test_what_is_due_later_does_not_wake_the_loop() -> None:
    arrivals = Arrivals()
    arrivals.wake_until = 1_000
    loop = Loop(arrivals)
    for _ in range(1_000):
        arrivals.note(1_001)
    assert not loop.has_woken.wait(0.05)
    arrivals.note(999)
    assert loop.has_woken.wait(10)
