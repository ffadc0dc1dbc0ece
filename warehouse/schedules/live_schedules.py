"""Counts live recurring messages in the Delta tables."""

from __future__ import annotations

from deltalake.exceptions import TableNotFoundError

from conf.settings import Settings
from warehouse.delta.snapshot import Snapshot
from warehouse.named_queries import NamedQueries, Sql, rows_of_values
from warehouse.pending import IS_CANCEL, IS_RESTORE, NEXT_IS_THERE_MILLIS, is_cancelled, join_commands
from warehouse.routes.membership import Memberships

_SQL = NamedQueries(
    __file__,
    is_cancel=IS_CANCEL,
    is_restore=IS_RESTORE,
    join_commands=join_commands("commands", "live", Sql("live.subscription"), Sql("live.message")),
    is_cancelled=is_cancelled(),
)


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
    try:
        before = Memberships.of(settings.warehouse).sql_before(
            "d", *map(Sql, ("d.deliver_at", "d.topic", "d.subscription"))
        )
        tables = Snapshot(settings.warehouse, dict.fromkeys(("delayed_index", "deliveries", "outcomes")))
    except TableNotFoundError:
        return found  # the job has not run yet
    since, subscriptions = now - NEXT_IS_THERE_MILLIS, rows_of_values(found)
    sql = _SQL("live_schedules", subscriptions=subscriptions, now=now, since=since, before=before)
    rows = tables.sql(sql).to_pylist()
    counts = {(row["topic"], row["subscription"]): int(row["n"]) for row in rows}
    return {of: counts.get(of, 0) for of in found}
