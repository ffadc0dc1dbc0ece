"""Keeps the open parts of releases for unwritable destinations, and tries these destinations again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from status.alerts import SLOW, UNWRITABLE, Alerts
from streaming.release.driver.drain import Drain
from streaming.release.driver.open_parts import OpenPart, PartsSent, Release, is_held_back, oldest
from streaming.release.naming import Target

if TYPE_CHECKING:
    from streaming.release.driver.job import Job

_log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 1.0  # until the first new attempt
_POLL_SECONDS = 0.1
_LATELY_SECONDS = 600  # for so long one that was slow does not share a connection

# For so long a slow destination has to keep up, twice as long each time that it is slow again.
_KEEPS_UP_SECONDS = 10.0
_MOST_KEEPS_UP_SECONDS = 300.0


@dataclass
class _Stuck:
    """An unwritable or slow destination of a target."""

    since: int  # ms since the epoch
    reason: str  # why it can't be written, or is slow
    destination: str
    parts: dict[Release, OpenPart] = field(default_factory=dict)
    rejects: str = ""  # the reason with which due messages are rejected; empty: they wait
    delay: float = _FIRST_DELAY_SECONDS  # until the next attempt, seconds
    is_slow: bool = False
    was_slow: bool = False  # until it could not be written: then it is slow again
    drain: Drain = field(default_factory=Drain)  # of a slow one
    keeps_up_seconds: float = 0.0  # for so long a slow one has to keep up
    sending_since: float = 0.0  # since when the oldest parts are sent, seconds, monotonic; 0: they are not

    @property
    def has_recalled(self) -> bool:
        """Whether the shards are still to hold some messages back."""
        return any(self.recalls(part) for part in self.parts.values())

    def recalls(self, part: OpenPart) -> bool:
        """Whether the shards are to hold a part's messages back: where they reject them, nobody would let them go."""
        return part.is_recalled and not self.rejects


class UnwritableDestinations:
    """The unwritable and the slow destinations, and the open parts of releases for them. Thread-safe.

    A thread for each target tries its destination again, at longer and longer intervals. It sends the open parts
    together, ordered by when messages are due. The destination is writable again when all open parts have arrived, or,
    without open parts, when it accepts a producer. Until then no more messages are handed out for the target, so that
    it gets all in order.

    A slow destination has a connection of its own, and shares no lane with others. It gets what is held back for it in
    rounds (`Drain`), as much as it takes, until it has kept up for a while.

    Of what was handed out, and of which nothing was sent, the shards are told to hold it back again: then it can be
    cancelled.

    Args:
        destinations: the topic of each target.
        retry_max_seconds: the longest time between two attempts.
        wait_written: waits until the release of a part, and older ones of its lane, are written but for open parts.
        send: called with parts of one target, the oldest first, and whether it is slow. Sends them again, together,
            and writes their deliveries when all have arrived.
        probe: tries whether a topic accepts a producer. Returns why it does not; an empty text: it does.
        is_on_its_way: whether a lane may still have messages for a target that were handed out before it was held back.
        on_change: called when `recorded` has changed.
        alerts: records each unwritable destination.
        stopped: set when the job stops; then the threads end.
        reject_after_millis: due messages of a subscription are rejected when its destination has been unwritable for so
            long; None: they wait. Rejects and dead letters always wait for their topic.
        slow_seconds: a destination that takes for longer what it is given is slow.
        gone: targets that the settings no longer have; they are forgotten when they have no open parts.
    """

    def __init__(
        self,
        destinations: Mapping[Target, str],
        retry_max_seconds: float,
        *,
        wait_written: Callable[[OpenPart], None],
        send: Callable[[list[OpenPart], bool], PartsSent],
        probe: Callable[[str], str],
        is_on_its_way: Callable[[Target], bool],
        on_change: Callable[[], None],
        alerts: Alerts,
        stopped: threading.Event,
        reject_after_millis: int | None = None,
        slow_seconds: float = 2.0,
        gone: Collection[Target] = frozenset(),
    ) -> None:
        self._destinations = destinations
        self._retry_max_seconds = retry_max_seconds
        self._wait_written = wait_written
        self._send = send
        self._probe = probe
        self._is_on_its_way = is_on_its_way
        self._on_change = on_change
        self._alerts = alerts
        self._stopped = stopped
        self._reject_after_millis = reject_after_millis
        self._slow_seconds = slow_seconds
        self._gone = gone
        self._round = 0  # of all slow destinations together
        self._slow_until: dict[Target, float] = {}  # when targets stopped being slow, seconds, monotonic
        self._keeps_up_seconds: dict[Target, float] = {}  # for so long they had to keep up
        self._lock = threading.RLock()
        self._stuck: dict[Target, _Stuck] = {}

    @property
    def targets(self) -> frozenset[Target]:
        """The targets whose destinations can't be written."""
        with self._lock:
            return frozenset(self._stuck)

    @property
    def lately_slow(self) -> frozenset[Target]:
        """The targets whose destinations were slow a short while ago."""
        with self._lock:
            since = time.monotonic() - _LATELY_SECONDS
            return frozenset(target for target, until in self._slow_until.items() if until > since)

    @property
    def recorded(self) -> dict[str, Any]:
        """The unwritable targets and their open parts, as `Feedback.unwritable` has them."""
        with self._lock:
            found: dict[str, dict[str, Any]] = {}
            for (source, subscription), stuck in sorted(self._stuck.items()):
                one: dict[str, Any] = {"since": stuck.since, "open": []}
                for (tick, kind), part in sorted(stuck.parts.items()):
                    one.setdefault("recalled" if stuck.recalls(part) else "open", []).append([tick, kind])
                one |= {"rejects": stuck.rejects} if stuck.rejects else {}
                one |= {"round": stuck.drain.round, "most": stuck.drain.most} if stuck.drain.round else {}
                found.setdefault(source, {})[subscription] = one
            return found

    def begin(self, recorded: Mapping[str, Any], jobs: Mapping[Release, Job]) -> None:
        """Takes over the unwritable targets of the run before.

        Args:
            recorded: `Offset.unwritable` of its last offset.
            jobs: the releases that are handed out again; open parts of other releases are dropped.
        """
        for source, of_source in recorded.items():
            for subscription, stuck in of_source.items():
                target = (source, subscription)
                open_releases = [(tick, kind) for tick, kind in stuck["open"]]
                parts = [
                    OpenPart(jobs[release], target, is_resumed=True) for release in open_releases if release in jobs
                ]
                rejects = stuck.get("rejects", "") if self._reject_after_millis is not None else ""
                self._round = max(self._round, stuck.get("round", 0))
                self.add(target, "so it was before the start", parts, stuck["since"], rejects, "round" in stuck)

    def forget_taken_back(self, recorded: Mapping[str, Any]) -> None:
        """Forgets open parts whose messages the shards reject, or hold back.

        Args:
            recorded: `Offset.unwritable`, which says for which targets and releases they do.
        """
        with self._lock:
            for source, of_source in recorded.items():
                for subscription, stuck in of_source.items():
                    if (known := self._stuck.get((source, subscription))) is not None:
                        for tick, kind in [*stuck.get("recalled", ()), *(stuck["open"] if "rejects" in stuck else ())]:
                            known.parts.pop((tick, kind), None)

    def note_drained(self, drained: Mapping[Target, tuple[int, bool]]) -> None:
        """Notes by target how many messages a tick has let go to a slow destination, and whether others wait."""
        with self._lock:
            for target, (n, others_wait) in drained.items():
                if target in self._stuck:
                    self._stuck[target].drain.note_answer(n, others_wait)

    def add(
        self,
        target: Target,
        reason: str,
        parts: list[OpenPart],
        since: int | None = None,
        rejects: str = "",
        is_slow: bool = False,
    ) -> None:
        """Notes that the destination of a target can't be written, or is slow, and keeps open parts for it.

        Args:
            target: of the destination.
            reason: why the destination can't be written; empty: as before.
            parts: the open parts; may be empty.
            since: since when it can't be written, ms since the epoch; None: now. Ignored for a known target.
            rejects: the reason with which due messages are rejected; empty: they wait. Ignored for a known target.
            is_slow: whether the destination is slow. Ignored for a known target.
        """
        with self._lock:
            stuck = self._stuck.get(target)
            if stuck is None:
                destination = self._destinations[target]
                now = time.time_ns() // 1_000_000
                stuck = self._stuck[target] = _Stuck(
                    since or now, reason, destination, rejects=rejects, is_slow=is_slow
                )
                stuck.delay = 0.0 if is_slow else _FIRST_DELAY_SECONDS
                longer = 2 * self._keeps_up_seconds.get(target, 0.0) if target in self.lately_slow else 0.0
                stuck.keeps_up_seconds = min(max(longer, _KEEPS_UP_SECONDS), _MOST_KEEPS_UP_SECONDS)
                what = "is slow" if is_slow else "can't be written"
                _log.warning("%s %s, and what is due for it waits: %s", destination, what, reason)
                name = f"retry {destination}"
                threading.Thread(target=self._look_after, args=(target,), name=name, daemon=True).start()
            if reason:
                self._tell(stuck, reason)
            for part in parts:
                stuck.parts.setdefault(part.release, part)
        self._on_change()

    def has(self, release: Release, target: Target) -> bool:
        """Whether a release has an open part for a target."""
        with self._lock:
            return target in self._stuck and release in self._stuck[target].parts

    def _tell(self, stuck: _Stuck, reason: str) -> None:
        stuck.reason = reason
        if stuck.is_slow:
            why = reason.removeprefix("slow: ")
            self._alerts.begin(SLOW, stuck.destination, f"is slow, and what is due for it waits: {why}")
        else:
            what = "; what is due for it is rejected" if stuck.rejects else ""
            self._alerts.begin(UNWRITABLE, stuck.destination, f"can't be written: {reason}{what}")

    def _set_slow(self, stuck: _Stuck, is_slow: bool) -> None:
        """Notes that a destination that could not be written is only slow, or that a slow one can't be written."""
        if is_slow != stuck.is_slow:
            stuck.is_slow, stuck.was_slow, stuck.drain = is_slow, not is_slow, Drain()
            stuck.since, stuck.sending_since = time.time_ns() // 1_000_000, 0.0
            self._end_alert(UNWRITABLE if is_slow else SLOW, stuck)

    def _end_alert(self, kind: str, stuck: _Stuck) -> None:
        with self._lock:
            is_slow = kind == SLOW
            others = [one for one in self._stuck.values() if one is not stuck and one.is_slow == is_slow]
            if all(one.destination != stuck.destination for one in others):
                self._alerts.end(kind, stuck.destination)

    def _reject_in_time(self, target: Target, stuck: _Stuck) -> None:
        """Begins to reject due messages of a subscription, if its destination has been unwritable for long enough.

        If it is too early, the next attempt is made at that time at the latest.
        """
        if self._reject_after_millis is None or stuck.rejects or not is_held_back(target):
            return
        if stuck.is_slow or stuck.has_recalled:
            return
        left = stuck.since + self._reject_after_millis - time.time_ns() // 1_000_000
        if left > 0:
            stuck.delay = min(stuck.delay, left / 1000)
            return
        _log.warning("%s can't be written for too long, and what is due for it is rejected", stuck.destination)
        stuck.rejects = f"{stuck.destination} can't be written: {stuck.reason}"
        self._on_change()

    def _look_after(self, target: Target) -> None:
        """Tries a destination again until it is writable, whatever fails meanwhile: nobody else would."""
        while not self._stopped.is_set():
            try:
                self._retry(target)
                return
            except Exception:
                _log.exception("%s is tried again", self._destinations[target])
                self._stopped.wait(_FIRST_DELAY_SECONDS)

    def _retry(self, target: Target) -> None:
        while not self._stopped.wait(self._stuck[target].delay):
            stuck = self._stuck[target]
            try:
                sent = self._try(target, stuck)
            except Exception as error:
                sent = PartsSent(f"{type(error).__name__}: {error}")
            if self._stopped.is_set():
                return
            if sent.reason:
                self._set_slow(stuck, sent.is_slow)
                longer = min(max(2 * stuck.delay, _FIRST_DELAY_SECONDS), self._retry_max_seconds)
                stuck.delay = 0.0 if stuck.is_slow else longer
                stuck.reason = sent.reason
                self._reject_in_time(target, stuck)
                self._tell(stuck, sent.reason)
                continue
            stuck.delay = 0.0
            if stuck.was_slow:
                self._set_slow(stuck, is_slow=True)
                self._tell(stuck, "it could not be written, and was slow before")
            is_over = self._keeps_up(target, stuck)
            while self._is_on_its_way(target):
                if self._stopped.wait(_POLL_SECONDS):
                    return
            with self._lock:
                if stuck.parts or not is_over:
                    stuck.delay = _POLL_SECONDS if stuck.rejects or stuck.is_slow or stuck.has_recalled else 0.0
                    continue
                del self._stuck[target]
                if stuck.is_slow:
                    self._slow_until[target] = time.monotonic()
                    self._keeps_up_seconds[target] = stuck.keeps_up_seconds
                self._end_alert(SLOW if stuck.is_slow else UNWRITABLE, stuck)
            now = "keeps up again" if stuck.is_slow else "can be written again"
            now = "is not in the settings, and nothing is open" if target in self._gone else now
            _log.warning("%s %s", stuck.destination, now)
            self._on_change()
            return

    def _keeps_up(self, target: Target, stuck: _Stuck) -> bool:
        """Whether a destination to which all has arrived that was handed out for it is not slow any more.

        If it is, this asks for the next messages that are held back for it, unless they are on their way.
        """
        if (
            not stuck.is_slow
            or not is_held_back(target)
            or stuck.drain.is_over(self._slow_seconds, stuck.keeps_up_seconds)
        ):
            return True
        self._ask(target, stuck)
        return False

    def _ask(self, target: Target, stuck: _Stuck) -> None:
        """Asks the shards for the next messages for a slow destination, once all has come that was asked for before."""
        if stuck.drain.is_answered and not stuck.has_recalled and not self._is_on_its_way(target):
            with self._lock:
                self._round += 1
                stuck.drain.ask(self._round)
            self._on_change()

    def _try(self, target: Target, stuck: _Stuck) -> PartsSent:
        """Sends the open parts; without any, tries whether the destination accepts a producer."""
        while not self._stopped.is_set():
            parts = self._oldest(stuck)
            if not parts or stuck.rejects:
                is_known = target in self._gone or stuck.is_slow
                return PartsSent() if is_known else PartsSent(self._probe(stuck.destination))
            for part in parts:
                self._wait_written(part)
            if parts != self._oldest(stuck):
                continue  # other parts have been added meanwhile
            if stuck.is_slow and stuck.drain.others_wait and is_held_back(target):
                self._ask(target, stuck)  # so that they are at hand when these have arrived
            stuck.sending_since = stuck.sending_since or time.monotonic()
            sent = self._send(parts, stuck.is_slow)
            if sent.reason:
                return sent
            stuck.drain.note_sent(sent.messages, time.monotonic() - stuck.sending_since)
            stuck.sending_since = 0.0
            with self._lock:
                for part in parts:
                    stuck.parts.pop(part.release, None)
            self._on_change()
        return PartsSent()

    def _oldest(self, stuck: _Stuck) -> list[OpenPart]:
        """Returns the parts to send together, without those whose messages the shards are to hold back."""
        with self._lock:
            return oldest(part for _, part in sorted(stuck.parts.items()) if not part.is_recalled)
