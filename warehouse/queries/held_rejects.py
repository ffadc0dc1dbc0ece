"""Messages rejected while the rejects topic could not be written: the table `rejects` keeps them for the topic."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from status.troubles import NOT_SEEN_REASON
from tracker.commands.holding.giving_up import NOT_TAKEN
from tracker.messages import LEFT_OUT, MESSAGES, typed
from warehouse.delta.tables import Tables, literal


def find_rejects(tables: Tables, version: int, since: Mapping[str, int]) -> pa.Table:
    """Finds the messages that are to go to rejects topics now, in the order of their ticks, as MESSAGES.

    Args:
        version: of the table `rejects`.
        since: for each source topic, at least one, the first tick whose rejects its rejects topic does not have.
    """
    of_topics = " OR ".join(f"(topic = {literal(topic)} AND batch_id >= {tick})" for topic, tick in since.items())
    # Rows that never go to a rejects topic, or that the sender publishes there by itself.
    others = " OR ".join(f"reason LIKE '{text}'" for text in (f"{NOT_SEEN_REASON}%", f"{LEFT_OUT}%", f"%{NOT_TAKEN}%"))
    order = "batch_id, ledger_id, entry_id, batch_index, reason"
    sql = f"SELECT * FROM rejects WHERE ({of_topics}) AND NOT ({others}) ORDER BY {order}"  # noqa: S608
    return typed(tables.query("rejects", sql, version), MESSAGES)
