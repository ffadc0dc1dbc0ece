"""Finds the messages that were rejected while the rejects topic could not be written, in the table `rejects`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from status.alerts import NOT_SEEN_REASON
from tracker.commands.outcomes import NOT_TAKEN
from tracker.messages import LEFT_OUT, MESSAGES, typed
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, some_of

_SQL = NamedQueries(__file__, not_seen=f"{NOT_SEEN_REASON}%", left_out=f"{LEFT_OUT}%", not_taken=f"%{NOT_TAKEN}%")


def find_rejects(tables: Tables, version: int, since: Mapping[str, int]) -> pa.Table:
    """Finds the messages that go to rejects topics now, as MESSAGES, in the order of their ticks.

    Args:
        version: the version of the table `rejects` to read.
        since: the first tick whose rejects the rejects topic lacks, by source topic; not empty.
    """
    in_topics = some_of(_SQL("in_topic", topic=topic, tick=tick) for topic, tick in since.items())
    return typed(tables.query("rejects", _SQL("rejects", in_topics=in_topics), version), MESSAGES)
