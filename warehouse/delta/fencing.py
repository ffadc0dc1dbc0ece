"""One warehouse has one writer: the last start of a job, or the last rebuild.

Each of these raises the warehouse's epoch, the number of a transaction in each fenced table. Each commit there is the
very next version after one that was checked to have the writer's own epoch. So a writer that was fenced, and did not
notice because it was paused or cut off, can't commit any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from conf.errors import DelayLakeError

EPOCH = "delaylake-epoch"  # the app id of the transaction

# A sender that stood still for longer than this checks the epoch again: somebody else may have taken over.
PAUSE_SECONDS = 5.0


class FencedError(DelayLakeError):
    """Somebody else has taken the warehouse over. The message is one line."""

    def __init__(self, warehouse: str, own: int, newest: int) -> None:
        super().__init__(
            f"another start of the job, or a rebuild, has taken over the warehouse {warehouse} "
            f"(epoch {newest}, this one has {own}): this one ends; one job at a time may run on a warehouse"
        )


class PauseWatch:
    """Notices that this process has stood still (SIGSTOP, a paused machine) between two iterations of a loop.

    Args:
        after_pause: called by the first `check` after a pause.
        seconds: a longer time between two checks is a pause.
        since: when the epoch was checked last, by the last of the clocks, seconds; None: now.
        clocks: functions that return seconds; None: `time.monotonic` and `time.time`. There are two, since the
            monotonic clock of a paused machine may stand still, too, while its wall clock is set afterwards.
    """

    def __init__(
        self,
        after_pause: Callable[[], None],
        seconds: float = PAUSE_SECONDS,
        since: float | None = None,
        clocks: tuple[Callable[[], float], ...] | None = None,
    ) -> None:
        self._after_pause = after_pause
        self._seconds = seconds
        self._clocks = clocks or (time.monotonic, time.time)
        self._last = [clock() for clock in self._clocks]
        if since is not None:
            self._last[-1] = since

    def check(self) -> None:
        """Looks at the clocks; called at the beginning of each iteration of the loop."""
        now = [clock() for clock in self._clocks]
        is_after_pause = max(new - old for new, old in zip(now, self._last, strict=True)) > self._seconds
        self._last = now
        if is_after_pause:
            self._after_pause()
