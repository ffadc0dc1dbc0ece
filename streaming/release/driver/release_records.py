"""Writes the results of releases to the tables: deliveries, and messages that the client does not take."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from status.alerts import NOT_SENT, Alerts
from streaming.release.naming import Recipient
from tracker.commands.outcomes import NOT_DELIVERED, NOT_TAKEN
from tracker.giving_up import cancelled
from tracker.messages import concat, is_among, position_texts, where
from tracker.schemas import OUTCOME_ROWS, SEQUENCE_BITS
from tracker.subscriptions import without_dead_letters
from warehouse.delivery_key import COLUMNS, Key
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Sql, all_of, columns, identifier
from warehouse.queries.index_rows import outcomes_to_rows, to_rejects

_log = logging.getLogger(__name__)

_SQL = NamedQueries(__file__)

# The columns that identify a delivery to a subscription of a source topic.
_MESSAGE = ["ledger_id", "entry_id", "batch_index", "attempt", "occurrence"]
_RETRY_SECONDS = 1.0


class ReleaseRecords:
    """Writes and reads the rows of releases in the tables.

    Args:
        tables: of the warehouse.
        app_id: of the checkpoint; names of writers begin with it.
        stopped: ends waiting for a table that can't be written.
        alerts: records messages that were not sent.
    """

    def __init__(self, tables: Tables, app_id: str, stopped: threading.Event, alerts: Alerts | None = None) -> None:
        self._tables = tables
        self._app_id = app_id
        self._stopped = stopped
        self._alerts = alerts or Alerts()

    def writer(self, lane: str, recipient: Recipient | None = None) -> str:
        """Returns the writer's name under which the table `deliveries` keeps the last written tick of a lane.

        Args:
            lane: the lane's name.
            recipient: of remainders for an unwritable destination; None: for whole releases.
        """
        return f"{self._app_id}:{lane}" if recipient is None else f"{self._app_id}:{lane}:{recipient[0]}:{recipient[1]}"

    def last_tick(self, writer: str) -> int:
        """Returns the last tick that a writer has written to `deliveries`; -1: none."""
        return self._tables.written("deliveries", writer)

    def append(self, table: str, rows: pa.Table, versions: dict[str, int]) -> bool:
        """Appends rows, if there are any, and retries until it works; returns False if `stopped` is set before."""
        while rows.num_rows:
            try:
                self._tables.append(table, rows, versions)
                return True
            except OSError as error:
                _log.warning("%s are written again: %s", table, error)
                if self._stopped.wait(_RETRY_SECONDS):
                    return False
        return True

    def write_refused(self, refused: pa.Table, writer: str, tick: int, resumed: Recipient | None = None) -> bool:
        """Writes messages that the client does not take: to `rejects`, and to `outcomes` as cancelled.

        Args:
            refused: the messages, with subscription and reason.
            writer: of the release.
            tick: of the release.
            resumed: the recipient of a resumed remainder, of which an earlier run may have written some messages; None:
                the remainder, or the release, is new.

        Returns:
            whether all are written; False: `stopped` was set.
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
            of_topic, of_subscription = recipient_conditions(resumed)
            reason = _SQL("with_reason", reason=f"{NOT_DELIVERED}{without_dead_letters(resumed[1])[0]}{NOT_TAKEN}")
            rejects = self.missing("rejects", rejects, [tick], of_topic, reason)
            request = _SQL("of_request", request_id=cancels["request_id"][0].as_py())
            cancels = self.missing("outcomes", cancels, [tick], of_topic, of_subscription, request)
        if not (self.append("rejects", rejects, version) and self.append("outcomes", cancels, version)):
            return False
        self._tell(refused)
        return True

    def _tell(self, refused: pa.Table) -> None:
        """Records messages that were not sent as alerts of their source topics; the text names the last one."""
        counts = Counter(refused["topic"].to_pylist())
        last = dict(zip(refused["topic"].to_pylist(), range(refused.num_rows), strict=True))
        positions = position_texts(refused)
        for topic, row in last.items():
            text = f"{positions[row]} was {refused['reason'][row]}; the table rejects has it"
            self._alerts.add(NOT_SENT, topic, text, counts[topic])

    def recorded(self, ticks: Iterable[int], recipient: Recipient) -> frozenset[Key]:
        """Returns the keys of the deliveries that an earlier run has written of resumed remainders.

        Args:
            ticks: of the resumed remainders.
            recipient: of them all.
        """
        conditions = all_of(recipient_conditions(recipient))
        sql = _SQL("written", columns=columns(COLUMNS), table="deliveries", ticks=list(ticks), conditions=conditions)
        written = self._tables.query("deliveries", sql)
        texts = (pc.fill_null(written[name].cast(pa.string()), "").to_pylist() for name in COLUMNS)
        return frozenset(zip(*texts, strict=True))

    def missing(self, table: str, rows: pa.Table, ticks: Iterable[int], *conditions: Sql) -> pa.Table:
        """Returns the rows of resumed remainders that an earlier run has not written to a table.

        Args:
            table: its name.
            rows: of the resumed remainders, all of one recipient.
            ticks: of the resumed remainders.
            conditions: SQL conditions for the rows of the recipient in the table.
        """
        # Several occurrences of a recurring message may be open; `occurrence` is null for other messages.
        named = [name for name in _MESSAGE if name in rows.column_names]
        sql = _SQL(
            "written",
            columns=columns(named),
            table=identifier(table),
            ticks=list(ticks),
            conditions=all_of(conditions),
        )
        written = self._tables.query(table, sql)
        keys, others = (pa.table({name: pc.fill_null(of[name], 0) for name in named}) for of in (rows, written))
        return where(rows, ~is_among(keys, others, named))


def recipient_conditions(recipient: Recipient) -> tuple[Sql, Sql]:
    """Returns SQL conditions for a recipient's rows: (of its topic, of its subscription)."""
    name = without_dead_letters(recipient[1])[0]
    return _SQL("of_topic", topic=recipient[0]), _SQL("of_subscription", subscription=name)
