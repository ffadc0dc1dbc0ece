"""How many examples hypothesis tries: few in `make test-fast`, which sets HYPOTHESIS_PROFILE to fast."""

from __future__ import annotations

import os

from hypothesis import settings

FAST = os.environ.get("HYPOTHESIS_PROFILE") == "fast"

_FAST_PART = 10  # of so many examples one is tried
_LEAST = 3


def examples(n: int) -> int:
    """The examples of a property that is tried with n."""
    return min(n, max(_LEAST, n // _FAST_PART)) if FAST else n


def load_profile() -> None:
    """Sets how properties are tried that do not say it themselves: with new examples each time, in CI, too."""
    settings.register_profile("fast", settings.get_profile("default"), max_examples=10)
    settings.load_profile("fast" if FAST else "default")
