"""Which rejects go to their topic when it can be written again, and how many at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, batches, messages
from tracker.messages import MESSAGES, with_columns
from tracker.packing import payload_sizes
from warehouse.delta.tables import Tables
from warehouse.queries.held_rejects import RejectKey, Round, Span, find_rejects, find_round
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
    assert find_round(tables, version, TOPIC, RejectKey.before_tick(7)).to is None
    found = find_rejects(tables, version, Span(TOPIC, RejectKey.before_tick(7), None))
    assert found.schema == MESSAGES
    assert found["entry_id"].to_pylist() == [9, 4, 5]
    assert set(found["key"].to_pylist()) == {"k"}
    assert not find_rejects(tables, version, Span(f"{TOPIC}3", RejectKey.before_tick(1), None)).num_rows


@pytest.mark.parametrize("is_of_earlier_version", [False, True])
def test_rounds_have_bounded_bytes_and_together_all_rejects_once_and_in_order(
    tmp_path: Path, is_of_earlier_version: bool
) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    sizes = [3_000, 10, 9_000, 0, 2_500, 2_500, 7_000, 40, 5_000, 1]
    # In each tick two entries of three messages, two of them of the same entry and size.
    for tick, size in enumerate(sizes, 5):
        rows = batches([(1, entry, i, 3, 0) for entry in (2, 1) for i in range(3)], payload=b"x" * size)
        rejects = to_rejects(with_columns(rows, reason=pa.array(["bad"] * 6)), tick)
        assert rejects["payload_bytes"].to_pylist() == [size] * 6
        if is_of_earlier_version:
            place = rejects.schema.get_field_index("payload_bytes")
            rejects = rejects.set_column(place, "payload_bytes", pa.nulls(6, pa.int64()))
        tables.append("rejects", rejects, {})
    version, most = tables.version("rejects"), 20_000
    after: RejectKey | None = RejectKey.before_tick(6)
    found: list[Any] = []
    of_rounds = []
    while after is not None:
        one = find_round(tables, version, TOPIC, after, most)
        rows = find_rejects(tables, version, Span(TOPIC, after, one.to))
        n_bytes = int(payload_sizes(rows).sum())
        entries = rows.group_by(["publish_time", "ledger_id", "entry_id"]).aggregate([]).num_rows
        assert n_bytes == one.n_bytes
        assert n_bytes <= most or (entries == 1 and rows.num_rows == 3)
        of_rounds.append(n_bytes)
        found += zip(rows["entry_id"].to_pylist(), payload_sizes(rows).tolist(), strict=True)
        after = one.to
    assert found == [(entry, size) for size in sizes[1:] for entry in (1, 2) for _ in range(3)]
    assert len(of_rounds) > 5
    assert find_round(tables, version, TOPIC, RejectKey(14, 1, 2), most) == Round(None, 0)


def test_a_round_has_no_more_rows_than_are_sent_in_a_while(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    rows = messages([(1, entry, 0) for entry in range(6_000)])
    tables.append("rejects", to_rejects(with_columns(rows, reason=pa.array(["bad"] * 6_000)), 3), {})
    one = find_round(tables, tables.version("rejects"), TOPIC, RejectKey.before_tick(3))
    assert one == Round(RejectKey(3, 1, 4_999), 0)
    assert find_round(tables, tables.version("rejects"), TOPIC, RejectKey(3, 1, 4_999)) == Round(None, 0)


def test_properties_count_in_a_round(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    own = {"payload": b"x" * 10, "properties": [("name", "y" * 986), ("none", "")]}
    rows = messages([(1, entry, 0) for entry in range(20)], **own)
    tables.append("rejects", to_rejects(with_columns(rows, reason=pa.array(["bad"] * 20)), 3), {})
    version = tables.version("rejects")
    assert find_round(tables, version, TOPIC, RejectKey(3, 1, 4), 5_500) == Round(RejectKey(3, 1, 9), 5 * 1_004)
    assert find_round(tables, version, TOPIC, RejectKey(3, 1, 14), 5_500) == Round(None, 5 * 1_004)
