"""Dead letters as a destination of their own, beside that of their subscription: one can be written, the other not."""

from __future__ import annotations

# Ends the name of a subscription, or of a topic in `tracker.in_flight.OpenReleases`, where its dead letters alone are
# meant. Neither has a space in its name.
_SUFFIX = " dlq"


def dead_letters_of(name: str) -> str:
    """Returns what stands for the dead letters of a subscription, or of all subscriptions of a topic."""
    return name + _SUFFIX


def without_dead_letters(name: str) -> tuple[str, bool]:
    """Returns the name of the subscription, and whether its dead letters alone are meant."""
    return name.removesuffix(_SUFFIX), name.endswith(_SUFFIX)
