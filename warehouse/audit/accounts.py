"""Checks by SQL over the Delta tables, and against the broker, that every message is accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import DelayLakeError
from status.alerts import NOT_SEEN_REASON
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.properties import POSITION_SQL
from tracker.schemas import SEQUENCE_BITS
from warehouse.delivery_key import COLUMNS
from warehouse.named_queries import NamedQueries, Sql, columns, rows_of_values
from warehouse.pending import (
    IS_RESTORE,
    LAST_COMMANDS,
    is_cancelled,
    is_moved_on,
    join_commands,
    last,
    last_occurrences,
)

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

# The kinds of findings: each has a query, of rows of (topic, subscription, position).
_FINDINGS = (
    "lost",
    "doubled",
    "early",
    "delivered_although_cancelled",
    "overdue",
    "without_route",
    "reject_delivered",
    "not_seen",
)

_SQL = NamedQueries(
    __file__,
    reason_not_seen=f"{NOT_SEEN_REASON}%",
    reason_not_delivered=f"{NOT_DELIVERED}%",
    position=Sql(POSITION_SQL),
    delivery_key=columns(COLUMNS),
    is_restore=IS_RESTORE,
    last_occurrences=last_occurrences(),
    last_commands=LAST_COMMANDS,
    join_commands_of_row=join_commands("commands", "i", Sql("s.subscription"), Sql("i.message")),
    join_commands_of_message=join_commands("commands", "m", Sql("s.subscription"), Sql("m.message")),
    is_moved_on=is_moved_on(Sql("i.sequence")),
    is_cancelled=is_cancelled(),
    last_cancelled=last("cancelled"),
    sequence_bits=SEQUENCE_BITS,
    overdue_millis=OVERDUE_MILLIS,
)


class AuditError(DelayLakeError):
    """The tables can't be audited."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        taken_in: the number of messages of all durable entries.
        rejected: the number of messages that could not be taken.
        counts: for each `topic` and `subscription` the numbers of messages that are `delivered`, `taken_back`
            (cancelled by a command, superseded or expired), `superseded` and `expired` (parts of `taken_back`),
            `rejected` and `pending`; and of delivered `occurrences` of recurring messages, each of which counts as one
            delivered message.
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
    from warehouse.routes.membership import Memberships
    from warehouse.routes.missing_routes import missing_routes

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
    memberships = Memberships.of(settings.warehouse)
    has_routes = rows_of_values(
        (r.source, s.name, memberships.has(r.source, s.name)) for r in routes for s in r.subscriptions
    )
    queries.create("subscriptions", _SQL("subscriptions", routes=has_routes))
    numbers = Sql(queries.numbers_below("CAST(batch_size AS BIGINT)"))
    queries.create("messages", _SQL("messages", numbers=numbers))
    of_subscription = Sql("s.topic"), Sql("s.subscription")
    missed = memberships.sql("m", Sql("m.first_due"), *of_subscription)
    own_missed = memberships.sql("i", Sql("i.deliver_at"), *of_subscription, Sql("i.sequence"))
    queries.create("fates", _SQL("fates", missed=missed, own_missed=own_missed))
    found = {}
    missing_topics = ["", *(route.source for route in missing)]
    for kind in _FINDINGS:
        wrong = _SQL(kind, now=_SQL("last_delivery") if now is None else now, missing_topics=missing_topics)
        if count := queries.rows(_SQL("count", finding=wrong))[0]["n"]:
            found[kind] = {"count": count, "examples": queries.rows(_SQL("examples", finding=wrong, n=EXAMPLES))}
    comparison = compare(settings, broker, queries.stream)
    if comparison.not_seen:
        _add_not_seen(found, comparison, queries.rows(_SQL("not_seen")))
    totals, counts = queries.rows(_SQL("totals"))[0], queries.rows(_SQL("counts"))
    return Audit(**totals, counts=counts, findings=found, comparison=comparison)


def _add_not_seen(found: dict[str, dict[str, Any]], comparison: Comparison, known: Iterable[dict[str, Any]]) -> None:
    """Adds to the findings those entries not seen that the comparison found and that `rejects` does not have."""
    known_positions = {(row["topic"], row["position"]) for row in known}
    new = [at for at in comparison.not_seen if at not in known_positions]
    if new:
        finding = found.setdefault("not_seen", {"count": 0, "examples": []})
        finding["count"] += len(new)
        examples = [{"topic": topic, "subscription": "", "position": position} for topic, position in new]
        finding["examples"] = (finding["examples"] + examples)[:EXAMPLES]


def _rows_of(table: DeltaTable) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.sum(pa.table(table.get_add_actions(flatten=True))["num_records"]).as_py() or 0
