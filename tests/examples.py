"""How many examples hypothesis tries: HYPOTHESIS_PROFILE is `thorough` in `make chaos`, `fast` in `make test-fast`."""

from __future__ import annotations

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")

# Of so many examples one is tried. They are new ones each time, so that all runs together try many.
_PART = {"thorough": 1, "default": 4, "fast": 10}[PROFILE]
_LEAST = 3

# Of a property that says no number itself; the default profile's are hypothesis' own.
_MOST = {"thorough": 200, "fast": 10}


def examples(n: int) -> int:
    """The examples of a property that is tried with n when it is tried thoroughly."""
    return min(n, max(_LEAST, n // _PART))


def load_profile() -> None:
    """Sets how properties are tried that do not say it themselves: with new examples each time, in CI, too."""
    for name, most in _MOST.items():
        settings.register_profile(name, settings.get_profile("default"), max_examples=most)
    settings.load_profile(PROFILE)
