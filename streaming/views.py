"""Views over the tables that answer what is asked most: for `delaylake sql`, and as SQL for Spark, too."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from conf.settings import Settings, local_path
from streaming.tables import SCHEMAS, literal, run_sql
from tracker.moved import HELD_MILLIS

# Views are made in this order, each of the tables and of those before it. Times are ms since the epoch in columns
# named like deliver_at, and timestamps in others.
VIEWS = {
    "subscriptions": "SELECT * FROM (VALUES {subscriptions}) AS s (topic, subscription)",
    # What was taken back and not restored, a row a message; batch_index -1 is a whole entry.
    "cancellations": """
SELECT o.topic, o.subscription, o.partition, o.ledger_id, o.entry_id, o.batch_index, o.operation, o.request_id,
       o.issued_by, o.issued_at, o.applied_at, o.sequence
FROM outcomes AS o
LEFT ANTI JOIN (SELECT * FROM outcomes WHERE result = 'APPLIED' AND operation = 'RESTORE') AS r
    ON r.subscription = o.subscription AND r.ledger_id = o.ledger_id AND r.entry_id = o.entry_id
    AND r.batch_index = o.batch_index AND r.sequence > o.sequence
WHERE o.result = 'APPLIED' AND o.operation IN ('CANCEL', 'SKIP')
""",
    # What waits: a row a message and subscription. What was held back by a pause is due when it is rescheduled.
    "pending": f"""
SELECT i.topic, s.subscription, i.partition, i.ledger_id, i.entry_id, i.batch_index, i.deliver_at,
       i.deliver_at >= {HELD_MILLIS} AS is_held, i.key, i.properties, i.publish_time, i.producer_name, i.payload
FROM delayed_index AS i
JOIN subscriptions AS s ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
LEFT ANTI JOIN deliveries AS d ON d.subscription = s.subscription AND d.ledger_id = i.ledger_id
    AND d.entry_id = i.entry_id AND d.batch_index = i.batch_index
LEFT ANTI JOIN cancellations AS c ON c.subscription = s.subscription AND c.ledger_id = i.ledger_id
    AND c.entry_id = i.entry_id AND c.batch_index IN (-1, i.batch_index)
LEFT ANTI JOIN (SELECT * FROM delayed_index WHERE operation = 'MOVE') AS m
    ON m.subscription = s.subscription AND m.ledger_id = i.ledger_id AND m.entry_id = i.entry_id
    AND m.batch_index = i.batch_index AND m.sequence > coalesce(i.sequence, 0)
WHERE i.operation = 'DELAY'
""",  # noqa: S608
    # How many messages go out in each minute.
    "schedule": """
SELECT topic, subscription, date_trunc('minute', to_timestamp_millis(deliver_at)) AS minute, count(*) AS messages
FROM pending WHERE NOT is_held GROUP BY topic, subscription, minute ORDER BY minute, topic, subscription
""",
    # How late messages went out, minute by minute, in ms; those that came in too late to be planned are apart.
    "lateness": """
SELECT topic, subscription, date_trunc('minute', to_timestamp_millis(sent_at)) AS minute, short_notice,
       count(*) AS messages, approx_percentile_cont(sent_at - deliver_at, 0.5) AS p50_millis,
       approx_percentile_cont(sent_at - deliver_at, 0.99) AS p99_millis, max(sent_at - deliver_at) AS max_millis
FROM deliveries GROUP BY topic, subscription, minute, short_notice ORDER BY minute, topic, subscription
""",
    # What became of the messages of each topic: of all that are accounted for.
    "funnel": """
SELECT s.topic, s.subscription, coalesce(e.taken_in, 0) AS taken_in, coalesce(d.delivered, 0) AS delivered,
       coalesce(c.commands, 0) AS taken_back, coalesce(p.pending, 0) AS pending, coalesce(r.rejected, 0) AS rejected
FROM subscriptions AS s
LEFT JOIN (SELECT topic, sum(batch_size) AS taken_in FROM entries GROUP BY topic) AS e ON e.topic = s.topic
LEFT JOIN (SELECT topic, subscription, count(*) AS delivered FROM deliveries GROUP BY topic, subscription) AS d
    ON d.topic = s.topic AND d.subscription = s.subscription
LEFT JOIN (SELECT topic, subscription, count(*) AS commands FROM cancellations GROUP BY topic, subscription) AS c
    ON c.topic = s.topic AND c.subscription = s.subscription
LEFT JOIN (SELECT topic, subscription, count(*) AS pending FROM pending GROUP BY topic, subscription) AS p
    ON p.topic = s.topic AND p.subscription = s.subscription
LEFT JOIN (SELECT topic, count(*) AS rejected FROM rejects GROUP BY topic) AS r ON r.topic = s.topic
ORDER BY s.topic, s.subscription
""",
}


class Warehouse:
    """The tables of the settings' warehouse and the views, for queries, as they are or were.

    Args:
        as_of: ms since the epoch; None: the newest versions.

    Raises:
        DeltaError: a table is missing, or had no version then, or has it no more.
    """

    def __init__(self, settings: Settings, as_of: int | None = None) -> None:
        self._builder = QueryBuilder()
        # `entries` first: what it has is in the other tables already, also while the job runs.
        for name in sorted(SCHEMAS, key=lambda name: name != "entries"):
            self._builder.register(name, _table(settings, name, as_of))
        rows = [(route.source, s.name) for route in settings.routes for s in route.subscriptions] or [("", "")]
        values = ", ".join(f"({literal(topic)}, {literal(name)})" for topic, name in rows)
        for name, sql in VIEWS.items():
            run_sql(self._builder, f"CREATE VIEW {name} AS {sql.replace('{subscriptions}', values)}")

    def sql(self, sql: str) -> pa.Table:
        """The rows of a query.

        Raises:
            DeltaError: the query is wrong.
        """
        return run_sql(self._builder, sql)


def _table(settings: Settings, name: str, as_of: int | None) -> DeltaTable:
    table = DeltaTable(f"{local_path(settings.warehouse)}/{name}")
    if as_of is not None:
        table.load_as_version(datetime.fromtimestamp(as_of / 1000, UTC))
    return table
