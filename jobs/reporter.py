"""Prints the output of `delaylake run`: `ready`, changes of routes, and lines of progress."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jobs.options import Output
from jobs.unread import redirect_to_null

if TYPE_CHECKING:
    import pyarrow as pa

    from status.batch_status import BatchStatus

_log = logging.getLogger(__name__)


class Reporter:
    """Prints `ready` and lines of progress.

    Counts are those of the last batch; rates and lateness are since the last line.

    Args:
        output: text, or lines with a JSON object each.
        every_seconds: the minimum time between two lines of progress; 0: none are printed.
        max_in_flight: with more messages in flight the job is held up.
    """

    def __init__(self, output: Output, every_seconds: float, max_in_flight: int) -> None:
        self._output = output
        self._max_in_flight = max_in_flight
        self._every = every_seconds
        self._lock = threading.Lock()
        self._is_ready = False
        self._status: dict[str, int] = {}
        self._begin()

    def standby(self) -> None:
        """Prints that the job waits, and could take over."""
        self._print("standby", {}, "standby", sys.stdout)

    def changed(self, lines: Sequence[str]) -> None:
        """Prints the changes of the settings' routes since the last run, a line each."""
        for line in lines:
            self._print("changed", {"text": line}, line, sys.stdout)

    def batch(self, status: BatchStatus) -> None:
        """Adds a batch: prints `ready` with the first one, and a line of progress when it is time for one."""
        with self._lock:
            if not self._is_ready:
                self._is_ready = True
                self._print("ready", {}, "ready", sys.stdout)
                self._begin()
            self._status = status.counts | {"lookahead_millis": status.lookahead_millis}
            self._taken += status.counts["taken"]
            self._batch_millis.append(status.counts["sink_millis"])
            if self._every and time.monotonic() - self._since >= self._every:
                self._report()
                self._begin()

    def deliveries(self, rows: pa.Table) -> None:
        """Adds delivered messages: rows of the table `deliveries`."""
        import numpy as np

        late = rows["sent_at"].to_numpy() - rows["deliver_at"].to_numpy()
        planned = ~np.asarray(rows["short_notice"].to_numpy(zero_copy_only=False))
        with self._lock:
            self._delivered += rows.num_rows
            self._lateness.append(late[planned])

    def _begin(self) -> None:
        """Begins to count for the next line of progress."""
        self._since = time.monotonic()
        self._taken = self._delivered = 0
        self._batch_millis: list[int] = []
        self._lateness: list[Any] = []

    def _report(self) -> None:
        """Prints a line of progress."""
        import numpy as np

        seconds = time.monotonic() - self._since
        late = np.concatenate(self._lateness) if self._lateness else np.zeros(0)
        p50, p99 = (float(p) for p in np.percentile(late, [50, 99])) if len(late) else (None, None)
        values = {
            "pending": self._status["delayed"],
            "in_state": self._status["loaded"],
            "in_flight": self._status["in_flight"],
            "lookahead_millis": self._status["lookahead_millis"],
            "is_held_up": self._status["in_flight"] > self._max_in_flight,
            "taken_per_second": round(self._taken / seconds, 1),
            "delivered_per_second": round(self._delivered / seconds, 1),
            "batches_per_second": round(len(self._batch_millis) / seconds, 2),
            "batch_millis_p50": float(np.median(self._batch_millis)),
            "late_millis_p50": p50,
            "late_millis_p99": p99,
        }
        late_text = "" if p50 is None else f"   late p50 {p50:.0f} ms, p99 {p99:.0f} ms"
        text = (
            f"pending {values['pending']:,} (in state {values['in_state']:,}, in flight {values['in_flight']:,})   "
            f"in {values['taken_per_second']}/s, out {values['delivered_per_second']}/s{late_text}"
            + ("   held up: the senders are behind" if values["is_held_up"] else "")
        )
        self._print("progress", values, text, sys.stderr)

    def _print(self, event: str, values: dict[str, Any], text: str, stream: Any) -> None:
        """Prints a line: the text on the stream, or the event with its values as JSON on stdout."""
        if self._output is Output.JSON:
            text, stream = json.dumps({"event": event, **values}), sys.stdout
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:
            _log.warning("nobody reads the output any more; deliveries go on")
            redirect_to_null(stream.fileno())
