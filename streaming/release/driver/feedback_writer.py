"""Writes the feedback for the source process: how far the releases are, and which destinations can't be written."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

from streaming.release.driver.lookahead import Lookahead
from streaming.release.driver.run_context import DispatchedBatch, RunStates
from streaming.release.feedback import Feedback, FeedbackFile

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0  # until feedback that could not be written is written again


class FeedbackWriter:
    """Writes what follows from the states of releases and destinations. Thread-safe.

    Args:
        states: of the run.
        file: the file that the source process reads.
        lookahead: has the measured lookahead.
    """

    def __init__(self, states: RunStates, file: FeedbackFile, lookahead: Lookahead) -> None:
        self._lock, self._stopped = states.lock, states.stopped
        self._releases, self._destinations = states.releases, states.destinations
        self._file = file
        self._lookahead = lookahead
        self._feedback = Feedback(lookahead_millis=lookahead.millis)
        self._is_behind = False  # the file lacks what could not be written, and is written again
        self._write()

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is dispatched, as the feedback says, ms."""
        return self._feedback.lookahead_millis

    def end_batch(self, batch: DispatchedBatch) -> None:
        """Writes the feedback after a batch, whose releases have all been added."""
        with self._lock:
            self._feedback = replace(
                self._feedback,
                next_due=batch.next_due,
                waiting=(batch.tick, batch.waiting),
                resuming=(batch.tick, batch.resuming),
                large_bytes=batch.large_bytes,
            )
            self.write()

    def write(self) -> None:
        """Writes the feedback as the states are now; nothing before the first batch of this run."""
        with self._lock:
            if not self._releases.has_batch:
                return
            progress = self._releases.progress(self._lookahead.farthest())
            self._feedback = replace(
                self._feedback,
                confirmed=progress.confirmed,
                settled=progress.settled,
                lookahead_millis=self._lookahead.millis,
                in_flight=progress.in_flight,
                in_flight_bytes=progress.in_flight_bytes,
                unwritable=self._destinations.recorded(),
            )
            self._write()

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        with self._lock:
            self._feedback = replace(self._feedback, is_stopping=True)
            self._write()
            self._lock.notify_all()

    def _write(self) -> None:
        """Writes the feedback. Whoever has changed it goes on where the disk is full: it is written again."""
        try:
            self._file.write(self._feedback)
        except OSError as error:
            if not self._is_behind:
                _log.warning("the feedback is written again: %s", error)
                self._is_behind = True
                threading.Thread(target=self._write_again, name="feedback", daemon=True).start()

    def _write_again(self) -> None:
        while self._is_behind and not self._stopped.wait(_AGAIN_SECONDS):
            with self._lock, contextlib.suppress(OSError):
                self._file.write(self._feedback)
                self._is_behind = False
