"""Which messages that come again from Pulsar were rejected before: table and rejects topic do not get them twice."""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import PulsarError
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from checkpoint_from_tables.rebuild.changes import not_to_deliver
from checkpoint_from_tables.rebuild.context import ALL_DESTINATIONS, DestinationReading, RebuildContext
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS, is_not_durable
from checkpoint_from_tables.rebuild.destinations import first_not_durable, is_producer_of, may_be_there, messages_since
from conf.errors import one_line
from conf.settings import rejects_topic
from status.alerts import NOT_SEEN_REASON
from streaming.release.outgoing import is_own
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.messages import LEFT_OUT, concat, int64, where
from tracker.properties import MESSAGE_ID, REASON
from warehouse.named_queries import NamedQueries, all_of, is_in
from warehouse.schemas import MOVED_AT, REJECTS

_log = logging.getLogger(__name__)

_SQL = NamedQueries(__file__, not_seen=f"{NOT_SEEN_REASON}%", not_delivered=f"{NOT_DELIVERED}%")
_COLUMNS = ["topic", "partition", "ledger_id", "entry_id", "batch_index", "position", "reason"]
_DELETED_AT_ONCE = 5_000


def find_rejected(context: RebuildContext, reading: DestinationReading = ALL_DESTINATIONS) -> pa.Table:
    """Finds the messages that come again, and that both the table `rejects` and their rejects topic have.

    Those that the table alone has it loses: when they come again, table and topic get them.

    Args:
        context: of the rebuild; the log gets its warnings, too.
        reading: how topics are read.

    Returns:
        the messages, as NOT_TO_DELIVER, with 0 for the subscription.

    Raises:
        PulsarError: the source topics can't be read.
    """
    topics = {route.source for route in context.known.routes}
    in_table = concat(
        (
            where(rows, is_not_durable(rows, context.durable))
            for rows in context.tables.stream(_SQL("rejected", topics=sorted(topics)))
        ),
        pa.schema([REJECTS.field(name) for name in _COLUMNS]),
    )
    if not in_table.num_rows:
        return not_to_deliver(_as_done(in_table), context.now)
    is_done = np.array([str(reason).startswith(LEFT_OUT) for reason in in_table["reason"].to_pylist()], np.bool_)
    brokers, admin = Brokers(context.settings.pulsar), AdminClient(context.settings.pulsar)
    try:
        for topic in pc.unique(in_table["topic"]).to_pylist():
            sent = pa.array(sorted(_sent(context, reading, topic, brokers, admin)), pa.string())
            is_sent = pc.and_(pc.equal(in_table["topic"], topic), pc.is_in(in_table["position"], sent))
            is_done |= is_sent.to_numpy(zero_copy_only=False)
    finally:
        admin.close()
        brokers.close()
    _remove(context, where(in_table, ~is_done))
    return not_to_deliver(_as_done(where(in_table, is_done)), context.now)


def _sent(
    context: RebuildContext, reading: DestinationReading, source: str, brokers: Brokers, admin: AdminClient
) -> Collection[str]:
    """Returns the positions of the messages of a source topic that its rejects topic has; not all where it warns."""
    topic = rejects_topic(source)
    if reading.renumbering is not None or not may_be_there(admin, topic):
        return ()
    since = first_not_durable(brokers, source, context.durable)
    if since is None:
        return ()
    moved_at = max(0, context.tables.written("entries", MOVED_AT))
    why = "it is left out"
    try:
        if topic not in reading.without:
            found = messages_since(brokers, admin, topic, max(moved_at, since - CLOCKS_MILLIS))
            is_producer = is_producer_of("")
            return {
                message.properties[MESSAGE_ID]
                for message in found
                if is_own(message.properties, source) and REASON in message.properties and is_producer(message.producer)
            }
    except PulsarError as error:
        why = one_line(error)
    text = f"{topic}: not read ({why}): what was rejected last may be there twice"
    _log.warning("%s", text)
    context.reports.on_warning(text)
    return ()


def _remove(context: RebuildContext, rows: pa.Table) -> None:
    """Removes rows from the table `rejects`."""
    for start in range(0, rows.num_rows, _DELETED_AT_ONCE):
        some = rows.slice(start, _DELETED_AT_ONCE)
        topics = pc.unique(some["topic"]).to_pylist()
        context.tables.delete(
            "rejects", all_of([_SQL("comes_again", topics=topics), is_in("position", some["position"].to_pylist())])
        )


def _as_done(rows: pa.Table) -> pa.Table:
    zeros = pa.array(np.zeros(rows.num_rows, np.int64))
    columns = {name: int64(rows, name) for name in ("ledger_id", "entry_id", "batch_index")}
    return pa.table({"subscription": zeros.cast(pa.int32()), **columns, "deliver_at": zeros})
