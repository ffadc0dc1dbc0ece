"""Counts live recurring messages in the Delta tables."""

from __future__ import annotations

from deltalake.exceptions import TableNotFoundError

from conf.settings import Settings
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import literal
from warehouse.pending import IS_CANCEL, IS_RESTORE, NEXT_IS_THERE_MILLIS, is_cancelled, join_commands
from warehouse.routes.tenure import Tenures

_LIVE = f"""
WITH live AS (
    SELECT i.topic, s.subscription, i.ledger_id, i.entry_id, greatest(i.batch_index, 0) AS message
    FROM delayed_index AS i
    JOIN (VALUES {{subscriptions}}) AS s (topic, subscription)
        ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
    WHERE i.operation = 'DELAY' AND i.occurrence IS NOT NULL AND i.deliver_at >= {{now}}
    UNION
    SELECT topic, subscription, ledger_id, entry_id, greatest(batch_index, 0) AS message
    FROM deliveries AS d WHERE occurrence IS NOT NULL AND sent_at >= {{since}} AND NOT {{before}}
),
commands AS (
    SELECT subscription, ledger_id, entry_id, batch_index,
           max(CASE WHEN {IS_CANCEL} THEN coalesce(sequence, 0) END) AS cancelled,
           max(CASE WHEN {IS_RESTORE} THEN sequence END) AS restored
    FROM outcomes WHERE ({IS_CANCEL}) OR {IS_RESTORE} GROUP BY subscription, ledger_id, entry_id, batch_index
)
SELECT live.topic, live.subscription, count(*) AS n FROM live
{join_commands("commands", "live", "{of}.subscription = live.subscription", "live.message")}
WHERE NOT ({is_cancelled()}) GROUP BY live.topic, live.subscription
"""  # noqa: S608


def live_schedules(settings: Settings, now: int) -> dict[tuple[str, str], int]:
    """Returns the number of live recurring messages for each topic and subscription of the routes.

    A recurring message is live if it is not cancelled, and has an occurrence to come or had one within the last minute.
    An occurrence from before the subscription's last absence does not count: the next one was missed, or has a row in
    the index.

    Args:
        now: the current time, ms since the epoch.

    Raises:
        UnreadableWarehouseError: the tables can't be read.
    """
    found = {(route.source, s.name): 0 for route in settings.routes for s in route.subscriptions}
    if not found:
        return found
    values = ", ".join(f"({literal(topic)}, {literal(name)})" for topic, name in found)
    sql = _LIVE.replace("{now}", str(now)).replace("{since}", str(now - NEXT_IS_THERE_MILLIS))
    try:
        before = Tenures.of(settings.warehouse).sql_before("d", "d.deliver_at", "d.topic", "d.subscription")
        tables = Snapshot(settings.warehouse, dict.fromkeys(("delayed_index", "deliveries", "outcomes")))
    except TableNotFoundError:
        return found  # the job has not run yet
    rows = tables.sql(sql.replace("{before}", before).replace("{subscriptions}", values)).to_pylist()
    counts = {(row["topic"], row["subscription"]): int(row["n"]) for row in rows}
    return {of: counts.get(of, 0) for of in found}
