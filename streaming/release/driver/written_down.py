"""The records of releases that the driver writes: deliveries, and messages that no producer takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from streaming.release.naming import Target
from tracker.commands.holding.giving_up import NOT_DELIVERED, NOT_TAKEN, cancelled
from tracker.commands.schema import OUTCOME_ROWS, SEQUENCE_BITS
from tracker.dead_letter_targets import without_dead_letters
from tracker.messages import concat, is_among, where
from warehouse.delta.tables import Tables, literal
from warehouse.queries.index_rows import outcomes_to_rows, to_rejects

_log = logging.getLogger(__name__)

# What tells apart what is sent of a topic's messages to a subscription.
_MESSAGE = ["ledger_id", "entry_id", "batch_index", "attempt", "occurrence"]
_RETRY_SECONDS = 1.0


class WrittenDown:
    """The rows of releases in the tables.

    Args:
        app_id: the checkpoint's, which is in the names of writers.
        stopped: ends waiting for a table that can't be written.
    """

    def __init__(self, tables: Tables, app_id: str, stopped: threading.Event) -> None:
        self._tables = tables
        self._app_id = app_id
        self._stopped = stopped

    def writer(self, lane: str, target: Target | None = None) -> str:
        """Returns the name by which the table `deliveries` knows the last tick of a lane that is written down.

        Args:
            lane: its name.
            target: of what was open for an unwritable destination; None: of whole releases.
        """
        return f"{self._app_id}:{lane}" if target is None else f"{self._app_id}:{lane}:{target[0]}:{target[1]}"

    def last_tick(self, writer: str) -> int:
        """Returns the last tick that is written down under a writer's name; -1: none."""
        return self._tables.written("deliveries", writer)

    def append(self, table: str, rows: pa.Table, versions: dict[str, int]) -> bool:
        """Appends rows, if there are any, again and again until it works; returns false when told to stop."""
        while rows.num_rows:
            try:
                self._tables.append(table, rows, versions)
                return True
            except OSError as error:
                _log.warning("%s are written again: %s", table, error)
                if self._stopped.wait(_RETRY_SECONDS):
                    return False
        return True

    def refuse(self, refused: pa.Table, writer: str, tick: int, resumed: Target | None = None) -> bool:
        """Writes down messages that no producer takes: as rejects, and as cancelled for their subscription.

        Args:
            resumed: the target of a part of which a run before may have written some down; None: none has.

        Returns:
            whether that is done; False: told to stop.
        """
        if not refused.num_rows:
            return True
        now, version = time.time_ns() // 1_000_000, {f"{writer}:refused": tick}
        outcomes = []
        for row in range(refused.num_rows):
            one = refused.slice(row, 1)
            name, reason = one["subscription"][0].as_py(), one["reason"][0].as_py()
            outcomes.append(cancelled(one, name, reason, tick << SEQUENCE_BITS, tick, now))
        rejects = to_rejects(refused, tick)
        cancels = outcomes_to_rows(concat(outcomes, OUTCOME_ROWS), tick, now)
        if resumed is not None:
            of_topic, of_subscription = of_target(resumed)
            reason = literal(f"{NOT_DELIVERED}{without_dead_letters(resumed[1])[0]}{NOT_TAKEN}")
            rejects = self.missing("rejects", rejects, [tick], of_topic, f"starts_with(reason, {reason})")
            request = f"request_id = {literal(cancels['request_id'][0].as_py())}"
            cancels = self.missing("outcomes", cancels, [tick], of_topic, of_subscription, request)
        return self.append("rejects", rejects, version) and self.append("outcomes", cancels, version)

    def missing(self, table: str, rows: pa.Table, ticks: Iterable[int], *conditions: str) -> pa.Table:
        """Returns the messages that a table lacks: of a resumed part a run before may have written some down.

        Args:
            rows: of one target.
            ticks: of the resumed parts.
            conditions: SQL, which the rows of the target in the table meet.
        """
        of_ticks = f"batch_id IN ({', '.join(map(str, ticks))})"
        # Of a recurring message several occurrences may be open; one that does not recur has none.
        named = [name for name in _MESSAGE if name in rows.column_names]
        written = self._tables.query(
            table,
            f"SELECT {', '.join(named)} FROM {table} WHERE {' AND '.join([of_ticks, *conditions])}",  # noqa: S608
        )
        keys, others = (pa.table({name: pc.fill_null(of[name], 0) for name in named}) for of in (rows, written))
        return where(rows, ~is_among(keys, others, named))


def of_target(target: Target) -> tuple[str, str]:
    """SQL conditions: a row is of a target's topic, and of its subscription."""
    return f"topic = {literal(target[0])}", f"subscription = {literal(without_dead_letters(target[1])[0])}"
