"""`delaylake audit`: is every message that was taken in accounted for? In SQL over the Delta tables alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from conf.errors import DelayLakeError
from jobs.options import Output, OutputOption, global_options, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conf.settings import Settings

EXAMPLES = 20

# A message is known by ledger_id, entry_id and batch_index; batch_index is -1 where the entry is one message, and, in
# `outcomes`, for the entry as a whole.
_VIEWS = """
WITH subscriptions (topic, subscription) AS (VALUES {subscriptions}),
pending AS (SELECT * FROM delayed_index WHERE operation = 'DELAY'),
delivered AS (
    SELECT topic, subscription, ledger_id, entry_id, batch_index, count(*) AS times
    FROM deliveries GROUP BY topic, subscription, ledger_id, entry_id, batch_index
),
taken_back AS (
    SELECT DISTINCT subscription, ledger_id, entry_id, batch_index FROM outcomes WHERE result = 'APPLIED'
),
messages AS (
    SELECT topic, ledger_id, entry_id, batch_index, max(deliver_at) AS deliver_at, max(in_index) AS in_index FROM (
        SELECT topic, ledger_id, entry_id, batch_index, deliver_at, 1 AS in_index FROM pending
        UNION ALL
        SELECT topic, ledger_id, entry_id, batch_index, deliver_at, 0 AS in_index FROM deliveries
    ) AS seen GROUP BY topic, ledger_id, entry_id, batch_index
),
fates AS (
    SELECT m.*, s.subscription, coalesce(d.times, 0) AS times, e.entry_id IS NOT NULL AS is_booked,
           t.entry_id IS NOT NULL OR w.entry_id IS NOT NULL AS is_taken_back
    FROM messages AS m
    JOIN subscriptions AS s ON s.topic = m.topic
    LEFT JOIN delivered AS d ON d.subscription = s.subscription AND d.topic = m.topic
         AND d.ledger_id = m.ledger_id AND d.entry_id = m.entry_id AND d.batch_index = m.batch_index
    LEFT JOIN taken_back AS t ON t.subscription = s.subscription
         AND t.ledger_id = m.ledger_id AND t.entry_id = m.entry_id AND t.batch_index = m.batch_index
    LEFT JOIN taken_back AS w ON w.subscription = s.subscription AND w.batch_index = -1 AND m.batch_index <> -1
         AND w.ledger_id = m.ledger_id AND w.entry_id = m.entry_id
    LEFT JOIN (SELECT DISTINCT ledger_id, entry_id FROM entries) AS e
         ON e.ledger_id = m.ledger_id AND e.entry_id = m.entry_id
)
"""

# What must not be: rows of (topic, subscription, position).
_POSITION = "concat_ws(':', ledger_id, entry_id, batch_index) AS position"
_FINDINGS = {
    # Some message of a booked entry is in no table.
    "lost": f"""
        SELECT e.topic, CAST(NULL AS VARCHAR) AS subscription, concat_ws(':', e.ledger_id, e.entry_id) AS position
        FROM (SELECT DISTINCT topic, ledger_id, entry_id, batch_size FROM entries) AS e
        LEFT JOIN (
            SELECT ledger_id, entry_id, count(DISTINCT batch_index) AS found FROM (
                SELECT ledger_id, entry_id, batch_index FROM messages
                UNION ALL SELECT ledger_id, entry_id, batch_index FROM rejects
                UNION ALL SELECT ledger_id, entry_id, batch_index FROM taken_back
            ) AS known GROUP BY ledger_id, entry_id
        ) AS f ON f.ledger_id = e.ledger_id AND f.entry_id = e.entry_id
        LEFT JOIN (SELECT DISTINCT ledger_id, entry_id FROM taken_back WHERE batch_index = -1) AS w
            ON w.ledger_id = e.ledger_id AND w.entry_id = e.entry_id
        WHERE coalesce(f.found, 0) < e.batch_size AND w.entry_id IS NULL
        UNION ALL
        SELECT topic, subscription, {_POSITION} FROM fates
        WHERE is_booked AND in_index = 0 AND times = 0 AND NOT is_taken_back
    """,  # noqa: S608
    "doubled": f"SELECT topic, subscription, {_POSITION} FROM delivered WHERE times > 1",  # noqa: S608
    "early": f"SELECT topic, subscription, {_POSITION} FROM deliveries WHERE sent_at < deliver_at",  # noqa: S608
    "delivered_although_taken_back": f"SELECT topic, subscription, {_POSITION} FROM fates WHERE times > 0 AND is_taken_back",  # noqa: S608, E501
    "delivered_although_rejected": """
        SELECT d.topic, d.subscription, d.position FROM deliveries AS d
        JOIN rejects AS r ON r.topic = d.topic AND r.position = d.position
    """,
    # Due long before the newest delivery, and still waiting.
    "overdue": f"""
        SELECT topic, subscription, {_POSITION} FROM fates
        WHERE in_index = 1 AND times = 0 AND NOT is_taken_back
          AND deliver_at < (SELECT max(sent_at) FROM deliveries) - 60000
    """,  # noqa: S608
}

_COUNTS = """
SELECT topic, subscription,
       count(*) FILTER (WHERE times > 0) AS delivered,
       count(*) FILTER (WHERE times = 0 AND is_taken_back) AS taken_back,
       count(*) FILTER (WHERE times = 0 AND NOT is_taken_back) AS pending
FROM fates GROUP BY topic, subscription ORDER BY topic, subscription
"""

_TOTALS = """
SELECT (SELECT coalesce(sum(batch_size), 0) FROM (SELECT DISTINCT ledger_id, entry_id, batch_size FROM entries) AS e)
           AS taken_in,
       (SELECT count(*) FROM rejects) AS rejected
"""


class AuditError(DelayLakeError):
    """The tables can't be read."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        taken_in: messages of all booked entries.
        rejected: rows of `rejects`.
        counts: for each topic and subscription, how many messages were delivered, taken back, and are pending.
        findings: by kind, how many there are and up to EXAMPLES of them as (topic, subscription, position).
    """

    taken_in: int
    rejected: int
    counts: list[dict[str, Any]]
    findings: dict[str, dict[str, Any]]

    @property
    def is_clean(self) -> bool:
        return not self.findings


def run_audit(settings: Settings) -> Audit:
    """Audits the settings' warehouse, for the subscriptions of the settings' routes.

    Raises:
        AuditError: a table is missing.
    """
    from deltalake import DeltaTable, QueryBuilder
    from deltalake.exceptions import TableNotFoundError

    from streaming.tables import SCHEMAS, Tables

    if not settings.routes:
        raise AuditError("no routes in the settings: there is nothing to audit")
    tables = Tables(settings.warehouse)
    builder = QueryBuilder()
    # `entries` first: what it has is in the other tables already, also while the job runs.
    for name in sorted(SCHEMAS, key=lambda name: name != "entries"):
        try:
            builder.register(name, DeltaTable(tables.path(name)))
        except TableNotFoundError:
            raise AuditError(f"no table {name} in the warehouse {settings.warehouse}: has the job run?") from None
    views = _VIEWS.format(subscriptions=_values((r.source, s.name) for r in settings.routes for s in r.subscriptions))

    def rows(sql: str) -> list[dict[str, Any]]:
        import pyarrow as pa

        return pa.table(builder.execute(views + sql).read_all()).to_pylist()

    found = {}
    for kind, sql in _FINDINGS.items():
        if wrong := rows(sql):
            found[kind] = {"count": len(wrong), "examples": wrong[:EXAMPLES]}
    return Audit(**rows(_TOTALS)[0], counts=rows(_COUNTS), findings=found)


def _values(rows: Any) -> str:
    return ", ".join(f"('{topic}', '{name}')" for topic, name in rows)


def audit(context: typer.Context, output: OutputOption = Output.TEXT) -> None:
    """Check over the Delta tables that every message taken in is pending, delivered once, taken back or rejected.

    Exit status 1 where anything is lost, doubled, early, overdue or delivered against a command.
    """
    result = run_audit(global_options(context).settings)
    show(output, asdict(result) | {"ok": result.is_clean}, "\n".join(_lines(result)))
    if not result.is_clean:
        raise typer.Exit(1)


def _lines(result: Audit) -> Sequence[str]:
    lines = [f"{result.taken_in:,} messages taken in, {result.rejected:,} rejected"]
    for row in result.counts:
        topic = row["topic"].removeprefix("persistent://")
        lines.append(
            f"  {topic} {row['subscription']}: "
            f"{row['delivered']:,} delivered, {row['taken_back']:,} taken back, {row['pending']:,} pending"
        )
    for kind, found in result.findings.items():
        lines.append(f"{kind.replace('_', ' ')}: {found['count']:,}")
        lines += [f"  {e['topic']} {e['subscription'] or ''} {e['position']}" for e in found["examples"]]
    lines.append("all accounted for" if result.is_clean else "NOT all accounted for")
    return lines
