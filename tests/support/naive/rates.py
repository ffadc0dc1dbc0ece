"""How many come how soon after each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def most_within(times: Sequence[float], span: float) -> int:
    """The most of the times within any span of so long, in the same unit, without its end."""
    at = np.sort(times)
    return int((np.searchsorted(at, at + span) - np.arange(len(at))).max(initial=0))
