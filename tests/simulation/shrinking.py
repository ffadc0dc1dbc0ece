"""Shortens a history that breaks a guarantee: leaves out faults, messages and commands as long as it still breaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulation.faults import Fault
from tests.simulation.world import Plan, Result, simulate

_MOST_SECONDS = 180.0


def shrink(plan: Plan, result: Result) -> Result:
    """Returns a result that breaks a guarantee, too, with what is left when nothing more can be left out.

    It ends after three minutes at most. First go faults, then what users do, and faults once more: with fewer messages
    fewer of them may do.
    """
    shrinking = _Shrinking(plan, result)
    shrinking.leave_out(lambda found: found.fallen)
    shrinking.leave_out(lambda found: found.done)
    shrinking.leave_out(lambda found: found.fallen)
    return shrinking.best


class _Shrinking:
    def __init__(self, plan: Plan, result: Result) -> None:
        self.best = result
        self._plan = plan
        self._ends_at = time.monotonic() + _MOST_SECONDS

    def leave_out(self, among: Callable[[Result], Sequence[Fault]]) -> None:
        """Leaves out parts of some list, half of it at first, later ones before those that came before them."""
        size = len(among(self.best))
        while size and time.monotonic() < self._ends_at:
            is_shorter, end = False, len(among(self.best))
            while end > 0 and time.monotonic() < self._ends_at:
                start = max(0, end - size)
                is_shorter |= self._is_left_out(among(self.best)[start:end])
                end = min(start, len(among(self.best)))
            size = size if is_shorter and size == 1 else size // 2

    def _is_left_out(self, some: Sequence[Fault]) -> bool:
        """Leaves something out, if a guarantee is still broken, and no more faults fall."""
        plan = replace(self._plan, left_out=self._plan.left_out | set(some))
        found = simulate(plan)
        if not found.broken or _size(found) >= _size(self.best):
            return False
        self.best, self._plan = found, plan
        return True


def _size(result: Result) -> tuple[int, int]:
    return len(result.fallen), len(result.done)
