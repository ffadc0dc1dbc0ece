"""Checks by SQL over the Delta tables, and against the broker, that every message is accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import DelayLakeError
from status.troubles import NOT_SEEN_REASON
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.properties import POSITION_SQL
from warehouse.delivery_key import COLUMNS
from warehouse.pending import IS_RESTORE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltalake import DeltaTable

    from conf.settings import Settings
    from warehouse.audit.broker_comparison import Comparison
    from warehouse.delta.engine import Engine

EXAMPLES = 20

# A pending message that was due this long ago counts as overdue, ms.
OVERDUE_MILLIS = 60_000

# The order in which an audit opens the tables, so that it finds no false errors beside the running job: `entries` gets
# messages after the other tables, and `delayed_index` gets a batch's rows after `outcomes`.
_OPENED = ("entries", "deliveries", "outcomes", "delayed_index", "rejects")

# `message` counts an entry's messages from 0, whether its batch_index is -1 (the entry is one message) or not.
_KEY = "topic, partition, ledger_id, entry_id, message"

_MESSAGE = "CAST(greatest(batch_index, 0) AS BIGINT) AS message"

# Two kinds of rows in `rejects` are not of rejected messages: entries not seen were never taken in, and messages that a
# destination did not take count as cancelled there, and may have gone to others.
_IS_SEEN = f"coalesce(reason, '') NOT LIKE '{NOT_SEEN_REASON}%'"

_IS_REJECTED = f"{_IS_SEEN} AND coalesce(reason, '') NOT LIKE '{NOT_DELIVERED}%'"

# The subscriptions that should get a topic's messages, also those of missing routes. A subscription that was added to
# the settings since the job was started is not there yet (`is_there`): it should have got nothing.
_SUBSCRIPTIONS = """
SELECT * FROM (VALUES {values}) AS routes (topic, subscription, is_there)
"""

# A row for each message in any table, with the tables that have it. If only `entries` has an entry, no more than the
# number of its messages is known.
_MESSAGES = f"""
SELECT {_KEY}, coalesce(min(batch_index), CASE WHEN max(batch_size) > 1 THEN message ELSE -1 END) AS batch_index,
       max(deliver_at) AS deliver_at,
       coalesce(min(deliver_at) FILTER (WHERE in_table = 'delayed_index' AND NOT is_moved), min(deliver_at))
           AS first_due,
       bool_or(in_table = 'entries') AS is_durable,
       bool_or(in_table = 'delayed_index') AS is_sealed,
       bool_or(in_table = 'rejects') AS is_rejected
FROM (
    SELECT 'entries' AS in_table, topic, partition, ledger_id, entry_id,
           {{numbers}} AS message,
           CAST(NULL AS INT) AS batch_index, batch_size, CAST(NULL AS BIGINT) AS deliver_at, false AS is_moved
    FROM entries
    UNION ALL
    SELECT 'delayed_index', topic, partition, ledger_id, entry_id, {_MESSAGE}, batch_index, NULL, deliver_at,
           subscription IS NOT NULL
    FROM delayed_index WHERE operation = 'DELAY'
    UNION ALL
    SELECT 'deliveries', topic, partition, ledger_id, entry_id, {_MESSAGE}, batch_index, NULL, deliver_at, false
    FROM deliveries
    UNION ALL
    SELECT 'rejects', topic, partition, ledger_id, entry_id, {_MESSAGE}, batch_index, NULL, NULL, false
    FROM rejects WHERE {_IS_REJECTED}
) AS seen
GROUP BY {_KEY}
"""  # noqa: S608

_POSITION = f"{POSITION_SQL} AS position"

# The queries for each kind of finding: rows of (topic, subscription, position).
_FINDINGS = {
    # A message of a durable entry is nowhere: neither waiting, delivered, cancelled nor rejected.
    "lost": f"""
        SELECT topic, subscription, {_POSITION} FROM fates
        WHERE is_durable AND NOT is_sealed AND NOT is_rejected AND NOT is_cancelled AND NOT is_superseded AND times = 0
            AND NOT is_retried_last
    """,  # noqa: S608
    # A message was delivered more than once to a subscription, also to one that is no longer in the settings. Each
    # retry and each occurrence is a delivery of its own.
    "doubled": f"""
        SELECT DISTINCT topic, subscription, position FROM (
            SELECT topic, subscription, position FROM deliveries
            GROUP BY topic, subscription, {", ".join(COLUMNS)} HAVING count(*) > 1
        ) AS d
    """,  # noqa: S608
    # A message was sent before it was due, by the sender's clock.
    "early": "SELECT topic, subscription, position FROM deliveries WHERE sent_at < deliver_at",
    # A message was delivered although a command had cancelled it. Occurrences of a recurring message that were handed
    # out before the command's batch are right.
    "delivered_although_cancelled": f"""
        SELECT topic, subscription, {_POSITION} FROM fates WHERE is_cancelled AND times > 0
            AND (recurring_until IS NULL OR recurring_until >= cancelled_in)
    """,  # noqa: S608
    # A message waits although its time is long past.
    "overdue": f"""
        SELECT topic, subscription, {_POSITION} FROM fates
        WHERE is_sealed AND NOT is_cancelled AND topic NOT IN {{missing}}
            AND CASE WHEN times = 0 THEN deliver_at ELSE next_due END < {{now}} - {OVERDUE_MILLIS}
    """,  # noqa: S608
    # A message waits, and the settings have no route for its topic any more.
    "without_route": f"""
        SELECT topic, subscription, {_POSITION} FROM fates
        WHERE is_sealed AND NOT is_cancelled AND NOT is_rejected AND times = 0 AND topic IN {{missing}}
    """,  # noqa: S608
    # A message was rejected and delivered.
    "reject_delivered": f"SELECT topic, subscription, {_POSITION} FROM fates WHERE is_rejected AND times > 0",  # noqa: S608
    # The broker never handed the entry to the job; the finding is for all subscriptions.
    "not_seen": f"SELECT topic, '' AS subscription, position FROM rejects WHERE NOT ({_IS_SEEN})",  # noqa: S608
}

# The messages by topic, subscription and what became of them.
_COUNTS = """
SELECT topic, subscription,
       count(*) FILTER (WHERE times > 0) AS delivered,
       sum(CASE WHEN recurring_until IS NULL THEN 0 ELSE times END) AS occurrences,
       count(*) FILTER (WHERE times = 0 AND is_cancelled) AS taken_back,
       count(*) FILTER (WHERE times = 0 AND is_cancelled AND is_superseded) AS superseded,
       count(*) FILTER (WHERE times = 0 AND NOT is_cancelled AND is_rejected) AS rejected,
       count(*) FILTER (WHERE times = 0 AND NOT is_cancelled AND NOT is_rejected AND is_sealed) AS pending
FROM fates GROUP BY topic, subscription ORDER BY topic, subscription
"""

# How many messages have come in and are durable, and how many were rejected.
_TOTALS = """
SELECT count(*) FILTER (WHERE is_durable) AS taken_in, count(*) FILTER (WHERE is_rejected) AS rejected FROM messages
"""

# The time against which messages are overdue: that of the last delivery, so that a stopped job has no overdue ones.
_LAST_DELIVERY = "(SELECT max(sent_at) FROM deliveries)"


class AuditError(DelayLakeError):
    """The tables can't be audited."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        taken_in: the number of messages of all durable entries.
        rejected: the number of messages that could not be taken.
        counts: for each `topic` and `subscription` the numbers of messages that are `delivered`, `taken_back`
            (cancelled by a command or superseded), `superseded` (a part of `taken_back`), `rejected` and `pending`; and
            of delivered `occurrences` of recurring messages, each of which counts as one delivered message.
        findings: by kind, the number (`count`) and up to EXAMPLES of them (`examples`: topic, subscription, position);
            only the kinds that were found.
        comparison: the comparison of the tables with the broker.
    """

    taken_in: int
    rejected: int
    counts: list[dict[str, Any]]
    findings: dict[str, dict[str, Any]]
    comparison: Comparison

    @property
    def is_clean(self) -> bool:
        """Whether there are no findings."""
        return not self.findings


def run_audit(settings: Settings, now: int | None = None, engine: Engine | None = None) -> Audit:
    """Audits the settings' warehouse, for the subscriptions of their routes and of missing ones.

    The job may run meanwhile.

    Args:
        now: a message due more than OVERDUE_MILLIS before this is overdue, ms since the epoch; None: the time of the
            last delivery.
        engine: joins the tables; None: the local one.

    Raises:
        AuditError: a table is missing, or there are no routes.
        UnreadableWarehouseError: a table exists and can't be read.
    """
    from deltalake.exceptions import TableNotFoundError

    from warehouse.audit.broker_comparison import compare, read_broker
    from warehouse.delta.engine import LOCAL
    from warehouse.delta.opening import open_table
    from warehouse.delta.tables import literal
    from warehouse.routes.missing_routes import missing_routes
    from warehouse.routes.tenure import Tenures

    if not settings.routes:
        raise AuditError("no routes in the settings: there is nothing to audit")
    broker = read_broker(settings)  # before the tables are opened, so that they have all entries acknowledged by then
    opened: dict[str, DeltaTable] = {}  # each table once, so that all queries see one version of it
    for name in _OPENED:
        try:
            opened[name] = open_table(settings.warehouse, name)
        except TableNotFoundError:
            raise AuditError(settings.no_tables(name)) from None
    n_rows = sum(_rows_of(table) for table in opened.values())
    queries = (engine or LOCAL).of(n_rows).queries(opened)
    missing = missing_routes(settings)
    routes = [*settings.routes, *missing]
    tenures = Tenures.of(settings.warehouse)
    values = _values((r.source, s.name, tenures.has(r.source, s.name)) for r in routes for s in r.subscriptions)
    queries.create("subscriptions", _SUBSCRIPTIONS.format(values=values))
    queries.create("messages", _MESSAGES.format(numbers=queries.numbers_below("CAST(batch_size AS BIGINT)")))
    missed = tenures.sql("m", "m.first_due", "s.topic", "s.subscription")
    own_missed = tenures.sql("i", "i.deliver_at", "s.topic", "s.subscription", "i.sequence")
    queries.create("fates", _fates(missed, own_missed))
    found = {}
    for kind, sql in _FINDINGS.items():
        topics = ", ".join(literal(topic) for topic in ("", *(route.source for route in missing)))
        wrong = sql.format(now=_LAST_DELIVERY if now is None else now, missing=f"({topics})")
        if count := queries.rows(f"SELECT count(*) AS n FROM ({wrong}) AS wrong")[0]["n"]:  # noqa: S608
            examples = queries.rows(f"{wrong} ORDER BY topic, position, subscription LIMIT {EXAMPLES}")
            found[kind] = {"count": count, "examples": examples}
    comparison = compare(settings, broker, queries.stream)
    if comparison.not_seen:
        known = f"SELECT topic, position FROM ({_FINDINGS['not_seen']}) AS known"  # noqa: S608
        _add_not_seen(found, comparison, queries.rows(known))
    return Audit(**queries.rows(_TOTALS)[0], counts=queries.rows(_COUNTS), findings=found, comparison=comparison)


def _add_not_seen(found: dict[str, dict[str, Any]], comparison: Comparison, known: Iterable[dict[str, Any]]) -> None:
    """Adds to the findings those entries not seen that the comparison found and that `rejects` does not have."""
    known_positions = {(row["topic"], row["position"]) for row in known}
    new = [at for at in comparison.not_seen if at not in known_positions]
    if new:
        of_kind = found.setdefault("not_seen", {"count": 0, "examples": []})
        of_kind["count"] += len(new)
        examples = [{"topic": topic, "subscription": "", "position": position} for topic, position in new]
        of_kind["examples"] = (of_kind["examples"] + examples)[:EXAMPLES]


def _fates(missed: str, own_missed: str) -> str:
    """Returns SQL for the table `fates`: for each message and subscription, its state and when it is due.

    Args:
        missed: SQL condition: the message (m) was handed out while the subscription (s) was not in the settings.
        own_missed: the same condition for a row of the delayed index (i), which may be for the subscription alone.
    """
    from tracker.schemas import SEQUENCE_BITS
    from warehouse.pending import LAST_COMMANDS, is_cancelled, is_moved_on, join_commands, last, last_occurrences

    return f"""
-- The state of a retried message is that of its last retry. If that retry was answered in the last batch, the delayed
-- index may not have it yet (is_last).
WITH retried AS (
    SELECT ledger_id, entry_id, message, subscription, max(attempt) AS attempt, max(deliver_at) AS deliver_at,
           max(batch_id) = (SELECT max(batch_id) FROM outcomes) AS is_last
    FROM (SELECT *, {_MESSAGE} FROM outcomes WHERE {IS_RESTORE} AND attempt IS NOT NULL) AS o
    GROUP BY ledger_id, entry_id, message, subscription
),
delivered AS (
    SELECT {_KEY}, subscription, attempt, count(*) AS times,
           max(CASE WHEN occurrence IS NOT NULL THEN batch_id END) AS recurring_until
    FROM (SELECT *, {_MESSAGE} FROM deliveries) AS d GROUP BY {_KEY}, subscription, attempt
),
occurrences AS ({last_occurrences()}),
commands AS ({LAST_COMMANDS}),
-- Only `outcomes` has messages that were superseded in the batch that brought them, for all subscriptions.
superseded AS (SELECT DISTINCT ledger_id, entry_id, {_MESSAGE} FROM outcomes WHERE result = 'SUPERSEDED'),
due AS (
    SELECT i.topic, i.partition, i.ledger_id, i.entry_id, i.message, s.subscription, max(i.deliver_at) AS deliver_at,
           min(CASE WHEN i.occurrence > coalesce(n.occurrence, 0) AND NOT {own_missed} THEN i.deliver_at END)
               AS next_due,
           bool_and({own_missed}) FILTER (WHERE i.subscription IS NOT NULL) AS is_missed
    FROM (SELECT *, {_MESSAGE} FROM delayed_index WHERE operation = 'DELAY') AS i
    JOIN subscriptions AS s ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
    LEFT JOIN occurrences AS n ON n.subscription = s.subscription AND n.ledger_id = i.ledger_id
        AND n.entry_id = i.entry_id AND n.batch_index = i.batch_index
    {join_commands("commands", "i", "{of}.subscription = s.subscription", "i.message")}
    WHERE NOT ({is_moved_on("i.sequence")})
    GROUP BY i.topic, i.partition, i.ledger_id, i.entry_id, i.message, s.subscription
)
SELECT m.topic, m.partition, m.ledger_id, m.entry_id, m.message, m.batch_index, m.is_durable, m.is_sealed,
       m.is_rejected, s.subscription, coalesce(d.times, 0) AS times,
       coalesce(greatest(t.deliver_at, r.deliver_at), t.deliver_at, r.deliver_at, m.deliver_at) AS deliver_at,
       {is_cancelled()} AS is_cancelled, u.message IS NOT NULL AS is_superseded, t.next_due, d.recurring_until,
       {last("cancelled")} >> {SEQUENCE_BITS} AS cancelled_in, coalesce(r.is_last, false) AS is_retried_last
FROM messages AS m
JOIN subscriptions AS s ON s.topic = m.topic
LEFT JOIN retried AS r ON r.ledger_id = m.ledger_id AND r.entry_id = m.entry_id AND r.message = m.message
    AND r.subscription = s.subscription
LEFT JOIN delivered AS d ON d.topic = m.topic AND d.partition = m.partition AND d.ledger_id = m.ledger_id
    AND d.entry_id = m.entry_id AND d.message = m.message AND d.subscription = s.subscription
    AND (r.attempt IS NULL OR d.attempt = r.attempt)
LEFT JOIN due AS t ON t.topic = m.topic AND t.partition = m.partition AND t.ledger_id = m.ledger_id
    AND t.entry_id = m.entry_id AND t.message = m.message AND t.subscription = s.subscription
LEFT JOIN superseded AS u ON u.ledger_id = m.ledger_id AND u.entry_id = m.entry_id AND u.message = m.message
{join_commands("commands", "m", "{of}.subscription = s.subscription", "m.message")}
WHERE d.times > 0 OR (s.is_there AND NOT coalesce(t.is_missed, {missed}))
    """  # noqa: S608


def _rows_of(table: DeltaTable) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.sum(pa.table(table.get_add_actions(flatten=True))["num_records"]).as_py() or 0


def _values(rows: Iterable[tuple[str, str, bool]]) -> str:
    from warehouse.delta.tables import literal

    return ", ".join(f"({literal(topic)}, {literal(name)}, {is_there})" for topic, name, is_there in rows)
