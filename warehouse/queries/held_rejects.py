"""Finds the messages that were rejected while the rejects topic could not be written, in the table `rejects`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from status.troubles import NOT_SEEN_REASON
from tracker.commands.outcomes import NOT_TAKEN
from tracker.messages import LEFT_OUT, MESSAGES, typed
from warehouse.delta.tables import Tables, literal


def find_rejects(tables: Tables, version: int, since: Mapping[str, int]) -> pa.Table:
    """Finds the messages that go to rejects topics now, as MESSAGES, in the order of their ticks.

    Args:
        version: the version of the table `rejects` to read.
        since: the first tick whose rejects the rejects topic lacks, by source topic; not empty.
    """
    of_topics = " OR ".join(f"(topic = {literal(topic)} AND batch_id >= {tick})" for topic, tick in since.items())
    # Rows that never go to a rejects topic, or that the sender publishes there itself.
    others = " OR ".join(f"reason LIKE '{text}'" for text in (f"{NOT_SEEN_REASON}%", f"{LEFT_OUT}%", f"%{NOT_TAKEN}%"))
    order = "batch_id, ledger_id, entry_id, batch_index, reason"
    sql = f"SELECT * FROM rejects WHERE ({of_topics}) AND NOT ({others}) ORDER BY {order}"  # noqa: S608
    return typed(tables.query("rejects", sql, version), MESSAGES)
