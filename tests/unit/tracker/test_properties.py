"""The position of a message as text: the same in Python, in columns and in SQL, and read back."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest

from broker.entries.message_ids import MessageRef, parse_triplet
from tracker.messages import position_texts
from tracker.properties import POSITION_SQL, MessagePosition, is_position, position_of

POSITIONS = [MessagePosition(7, 0, -1, -1), MessagePosition(7, 1, 3, 12), MessagePosition(1 << 52, 5, 0, -1)]
TEXTS = ["7:0:-1:-1", "7:1:3:12", "4503599627370496:5:0:-1"]


def test_the_text_is_the_same_however_it_is_made() -> None:
    rows = pa.Table.from_pylist([one._asdict() for one in POSITIONS])
    assert [str(one) for one in POSITIONS] == TEXTS
    assert [str(MessageRef(*one)) for one in POSITIONS] == TEXTS
    assert position_texts(rows).to_pylist() == TEXTS
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    assert [position_of(columns, i) for i in range(3)] == POSITIONS
    assert duckdb.connect().execute(f"SELECT {POSITION_SQL} FROM rows").fetchall() == [(text,) for text in TEXTS]


def test_it_is_read_back() -> None:
    assert [MessagePosition.parse(text) for text in TEXTS] == POSITIONS
    assert [MessagePosition(*vars(parse_triplet(text)).values()) for text in TEXTS] == POSITIONS
    assert all(map(is_position, TEXTS))


@pytest.mark.parametrize("text", ["", "7:0", "7:0:-2:-1", "7:0:1:2:3", "7:a:-1:-1", "7:0:-1:-1 ", f"{10**18}:0:-1:-1"])
def test_another_text_is_no_position(text: str) -> None:
    assert not is_position(text)
