"""Reads the first of the messages that are parked for a slow destination."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import MESSAGES, empty_table, in_order_of_dues, int64, is_among, typed, where
from tracker.packing import fitting
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, all_of, columns
from warehouse.pending import are_moved_on

_PLACE = ["ledger_id", "entry_id", "batch_index", "sequence"]
_SQL = NamedQueries(__file__, place=columns(_PLACE), held_deliver_at=HELD_DELIVER_AT)
_MAX_BYTES = 16 << 20  # of payloads in a round, and the first message in any case


def find_first_held(tables: Tables, version: int, topic: str, name: str, most: int) -> tuple[pa.Table, int | None]:
    """Reads the sealed rows of the messages that were due first, of those parked for a subscription.

    Args:
        version: of the delayed index.
        topic: the source topic.
        name: of the subscription.
        most: the most rows.

    Returns:
        the rows, as MESSAGES, in the order in which they were due; and when the last of them was due, ms since the
        epoch, None: these are all.
    """
    places, moves = (
        tables.query("delayed_index", _SQL(query, topic=topic, subscription=name), version)
        for query in ("places", "moves")
    )
    places = in_order_of_dues(where(places, ~are_moved_on(places, moves)))
    sizes = int64(places.set_column(0, "size", pc.fill_null(places["payload_bytes"], 0)), "size")
    first = places.slice(0, min(most, fitting(sizes, _MAX_BYTES)))
    if not first.num_rows:
        return empty_table(MESSAGES), None
    # Earlier rounds' rows are not read again.
    since, until = first["was_due"][0].as_py(), first["was_due"][first.num_rows - 1].as_py()
    conditions = []
    if since is not None:
        conditions.append(_SQL("was_due_from_or_unknown" if until is None else "was_due_from", since=since))
    if until is not None:
        conditions.append(_SQL("was_due_until", until=until))
    sql = _SQL("rows", topic=topic, subscription=name, was_due=all_of(conditions))
    rows = tables.query("delayed_index", sql, version)
    rows = in_order_of_dues(typed(where(rows, is_among(rows, first, _PLACE)), MESSAGES))
    if first.num_rows == places.num_rows:
        return rows, None
    return rows, HELD_DELIVER_AT if until is None else until
