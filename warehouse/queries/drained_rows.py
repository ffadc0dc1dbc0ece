"""Reads the first of the messages that are held back for a slow destination."""

from __future__ import annotations

import pyarrow as pa

from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.messages import MESSAGES, empty_table, in_order_of_dues, is_among, typed, where
from warehouse.delta.tables import Tables, literal
from warehouse.pending import are_moved_on

_PLACE = ["ledger_id", "entry_id", "batch_index", "sequence"]


def find_first_held(tables: Tables, version: int, topic: str, name: str, most: int) -> tuple[pa.Table, bool]:
    """Reads the sealed rows of the messages that were due first, of those held back for a subscription.

    Args:
        tables: of the warehouse.
        version: of the delayed index.
        topic: the source topic.
        name: of the subscription.
        most: the most rows.

    Returns:
        the rows, as MESSAGES, in the order in which they were due; and whether these are all.
    """
    sql = (
        f"SELECT {{}} FROM delayed_index WHERE deliver_at = {HELD_DELIVER_AT} AND operation = {{}} "  # noqa: S608
        f"AND topic = {literal(topic)} AND subscription = {literal(name)}"
    )
    places = tables.query("delayed_index", sql.format(", ".join([*_PLACE, "was_due"]), "'DELAY'"), version)
    moves = tables.query("delayed_index", sql.format(", ".join(_PLACE), "'MOVE'"), version)
    places = in_order_of_dues(where(places, ~are_moved_on(places, moves)))
    first = places.slice(0, most)
    if not first.num_rows:
        return empty_table(MESSAGES), True
    until = first["was_due"][first.num_rows - 1].as_py()
    condition = "" if until is None else f" AND coalesce(was_due, 0) <= {until}"
    rows = tables.query("delayed_index", sql.format("*", "'DELAY'") + condition, version)
    rows = in_order_of_dues(typed(where(rows, is_among(rows, first, _PLACE)), MESSAGES))
    return rows, first.num_rows == places.num_rows
