"""Messages rejected while the rejects topic could not be written: the table `rejects` keeps them for the topic."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from status.troubles import NOT_SEEN_REASON
from tracker.commands.giving_up import NOT_TAKEN
from tracker.messages import LEFT_OUT, MESSAGES, typed
from warehouse.tables import Tables, literal


def find_rejects(tables: Tables, version: int, since: Mapping[str, int]) -> pa.Table:
    """The messages that are to go to rejects topics now, in the order in which they were rejected.

    Args:
        version: of the table `rejects`.
        since: by source topic the first tick of which the rejects topic has no messages.
    """
    of_topics = " OR ".join(f"(topic = {literal(topic)} AND batch_id >= {tick})" for topic, tick in since.items())
    # Never told there, or told by who sends, at a time of its own.
    others = " OR ".join(f"reason LIKE '{text}'" for text in (f"{NOT_SEEN_REASON}%", f"{LEFT_OUT}%", f"%{NOT_TAKEN}%"))
    order = "batch_id, ledger_id, entry_id, batch_index, reason"
    sql = f"SELECT * FROM rejects WHERE ({of_topics}) AND NOT ({others}) ORDER BY {order}"  # noqa: S608
    return typed(tables.query("rejects", sql, version), MESSAGES)
