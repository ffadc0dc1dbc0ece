"""Which examples hypothesis tries: HYPOTHESIS_PROFILE is `thorough` in `make chaos`, `fast` in `make test-fast`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")

# Of so many examples one is tried.
_PART = {"thorough": 1, "default": 10, "fast": 20}[PROFILE]
_LEAST = 3

# Of a property that says no number itself.
_MOST = {"thorough": 200, "default": 50, "fast": 10}


def examples(n: int) -> int:
    """The examples of a property that is tried with n when it is tried thoroughly."""
    return min(n, max(_LEAST, n // _PART))


def load_profile() -> None:
    """Sets how properties are tried that do not say it themselves.

    `make test` tries the same examples each time: what fails there is by the change. `make chaos` looks for new ones.
    How long one takes, and how long they take to make, says nothing where machines are slow.
    """
    settings.register_profile(
        "ours",
        settings.get_profile("default"),
        derandomize=PROFILE != "thorough",
        max_examples=_MOST[PROFILE],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("ours")
