"""Reads the first of the messages that are held back for a slow destination."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracker.message_state.moves import HELD_DELIVER_AT
from tracker.messages import MESSAGES, empty_table, in_order_of_dues, int64, is_among, typed, where
from tracker.packing import fitting
from warehouse.delta.tables import Tables, literal
from warehouse.pending import are_moved_on

_PLACE = ["ledger_id", "entry_id", "batch_index", "sequence"]
_MAX_BYTES = 16 << 20  # of payloads in a round, and the first message in any case


def find_first_held(tables: Tables, version: int, topic: str, name: str, most: int) -> tuple[pa.Table, int | None]:
    """Reads the sealed rows of the messages that were due first, of those held back for a subscription.

    Args:
        tables: of the warehouse.
        version: of the delayed index.
        topic: the source topic.
        name: of the subscription.
        most: the most rows.

    Returns:
        the rows, as MESSAGES, in the order in which they were due; and when the last of them was due, ms since the
        epoch, None: these are all.
    """
    sql = (
        f"SELECT {{}} FROM delayed_index WHERE deliver_at = {HELD_DELIVER_AT} AND operation = {{}} "  # noqa: S608
        f"AND topic = {literal(topic)} AND subscription = {literal(name)}"
    )
    columns = ", ".join([*_PLACE, "was_due", "payload_bytes"])
    places = tables.query("delayed_index", sql.format(columns, "'DELAY'"), version)
    moves = tables.query("delayed_index", sql.format(", ".join(_PLACE), "'MOVE'"), version)
    places = in_order_of_dues(where(places, ~are_moved_on(places, moves)))
    sizes = int64(places.set_column(0, "size", pc.fill_null(places["payload_bytes"], 0)), "size")
    first = places.slice(0, min(most, fitting(sizes, _MAX_BYTES)))
    if not first.num_rows:
        return empty_table(MESSAGES), None
    # What is not known when it was due comes last. Earlier rounds' rows are not read again.
    since, until = first["was_due"][0].as_py(), first["was_due"][first.num_rows - 1].as_py()
    condition = (
        "" if since is None else f" AND (was_due >= {since}{'' if until is not None else ' OR was_due IS NULL'})"
    )
    condition += "" if until is None else f" AND was_due <= {until}"
    rows = tables.query("delayed_index", sql.format("*", "'DELAY'") + condition, version)
    rows = in_order_of_dues(typed(where(rows, is_among(rows, first, _PLACE)), MESSAGES))
    if first.num_rows == places.num_rows:
        return rows, None
    return rows, HELD_DELIVER_AT if until is None else until
