"""What recurring messages of a source topic may be: how often they recur, how many they are, what their rules cost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, TrackerSettings
from tracker.due_time import BadScheduleError
from tracker.recurrence.columns import accepted_first
from warehouse.schedules.live_schedules import live_schedules

_log = logging.getLogger(__name__)

_COUNT_SECONDS = 10.0  # the recurring messages are counted again so often at the most
_USUAL_SECONDS = 0.000_2  # CPU time that the rule of a message may take beside all else


class Recurring:
    """Takes in the recurring messages of a topic, within the settings' limits. Thread-safe: for all of its partitions.

    Args:
        topic: the source topic.
        settings: the limits.
        count: counts the topic's recurring messages that have an occurrence to come, as far as the tables know them.
    """

    def __init__(self, topic: str, settings: TrackerSettings, count: Callable[[], int]) -> None:
        self._topic, self._settings, self._count = topic, settings, count
        self._lock = threading.Lock()
        self._most = settings.max_recurring_messages
        self._counted_at: float | None = None
        self._n = 0  # those that were counted, and those that have come since: no fewer than there are

    @classmethod
    def of(cls, settings: Settings, topic: str) -> Recurring:
        """Returns the limits of a source topic, whose recurring messages are counted in the tables."""

        def count() -> int:
            live = live_schedules(settings, time.time_ns() // 1_000_000)
            return max((n for (source, _), n in live.items() if source == topic), default=0)

        return cls(topic, settings.tracker, count)

    def first(self, properties: Mapping[str, str], published: int) -> int:
        """Returns when the first occurrence of a new recurring message is, ms since the epoch.

        Args:
            properties: the message's.
            published: when it was published, ms since the epoch.

        Raises:
            BadScheduleError: the message is none that is accepted.
        """
        settings = self._settings
        first = accepted_first(properties, published, settings.max_delay_millis, settings.min_repeat_millis)
        if self._most:
            with self._lock:
                self._check_number()
        return first

    def _check_number(self) -> None:
        """Counts a new message; raises BadScheduleError where it would be one too many."""
        is_old = self._counted_at is None or time.monotonic() - self._counted_at > _COUNT_SECONDS
        if is_old and (self._counted_at is None or self._n >= self._most):
            self._counted_at = time.monotonic()
            try:
                self._n = self._count()
            except (DelayLakeError, OSError) as error:  # none is rejected because it can't be counted now
                self._n = 0
                _log.warning("%s: its recurring messages can't be counted: %s", self._topic, one_line(error))
        if self._n >= self._most:
            raise BadScheduleError(
                f"the topic has {self._n} recurring messages, and tracker.max_recurring_messages is {self._most}"
            )
        self._n += 1


class RuleCost:
    """The CPU time that rules of messages have taken beyond what is usual.

    Attributes:
        seconds: CPU time beyond the usual.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, first: Callable[[Mapping[str, str], int], int], properties: Mapping[str, str], published: int) -> int:
        """Returns what a function says of a message's properties and publish time, and adds what that has taken."""
        began = time.thread_time()
        try:
            return first(properties, published)
        finally:
            self.seconds += max(0.0, time.thread_time() - began - _USUAL_SECONDS)
