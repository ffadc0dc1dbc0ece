"""Which rejects go to their topic when it can be written again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import MESSAGES, with_columns
from warehouse.delta.tables import Tables
from warehouse.queries.held_rejects import find_rejects
from warehouse.queries.index_rows import to_rejects


def test_what_was_rejected_since_the_topic_was_unwritable_comes_in_order_and_what_was_never_for_it_does_not(
    tmp_path: Path,
) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()

    def reject(tick: int, *entries: int, reason: str = "bad", topic: str = TOPIC) -> None:
        rows = messages([(1, entry, 0) for entry in entries], topic=topic, key="k", payload=b"x")
        rows = with_columns(rows, reason=pa.array([reason] * len(entries)))
        tables.append("rejects", to_rejects(rows, tick), {})

    reject(6, 1)  # when it could still be written
    reject(8, 5, 4)
    reject(7, 9, reason="not delivered to a: its topic can't be written: TopicTerminated")
    reject(7, 2, reason="not seen: skipped")
    reject(7, 3, reason="replicated from west")
    reject(7, 6, reason="not delivered to a: the client does not take it: MessageTooBig")
    reject(9, 7, topic=f"{TOPIC}2")
    version = tables.version("rejects")
    reject(9, 8)
    found = find_rejects(tables, version, {TOPIC: 7, f"{TOPIC}3": 1})
    assert found.schema == MESSAGES
    assert found["entry_id"].to_pylist() == [9, 4, 5]
    assert set(found["key"].to_pylist()) == {"k"}
