"""Commands that a client sends once more."""

from __future__ import annotations

import pytest
from delaylake.control import Window

_REPEAT_SECONDS = 2.0


def repeat_soon(patch: pytest.MonkeyPatch) -> None:
    """Has clients repeat a command without an answer soon, and not when half of their time-out is over.

    So a test may give the answer as long as a slow machine takes, and need not wait half as long for the repeat.
    """

    def repeat_at(window: Window) -> float:
        return window._deadline - window._timeout_seconds + _REPEAT_SECONDS

    patch.setattr(Window, "_repeat_at", property(repeat_at))
