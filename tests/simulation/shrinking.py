"""Shortens a history that breaks a guarantee: leaves out faults as long as it still breaks."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.simulation.world import Plan, Result, simulate

_MOST_SECONDS = 120.0


def shrink(plan: Plan, result: Result) -> Result:
    """Returns the result with the fewest faults that was found within two minutes; it breaks a guarantee, too."""
    ends_at = time.monotonic() + _MOST_SECONDS
    best, size = result, max(1, len(result.fallen) // 2)
    while size and time.monotonic() < ends_at:
        is_shorter = False
        start = 0
        while start < len(best.fallen) and time.monotonic() < ends_at:
            without = plan.left_out | set(best.fallen[start : start + size])
            found = simulate(replace(plan, left_out=frozenset(without)))
            if found.broken and len(found.fallen) < len(best.fallen):
                best, plan, is_shorter = found, replace(plan, left_out=frozenset(without)), True
            else:
                start += size
        size = size if is_shorter and size == 1 else size // 2
    return best
