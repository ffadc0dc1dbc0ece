"""What tells deliveries apart: the message, of a retry its number, and which occurrence it is."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streaming.release import outgoing
from tests.support.servers.fake_destinations import seen
from tests.support.tracker.messages import messages
from tracker.messages import with_columns
from warehouse.delivery_key import COLUMNS, PROPERTIES, attempt_ids, key_of, key_of_row
from warehouse.schemas import DELIVERIES


def columns_of(rows: pa.Table) -> dict[str, list[Any]]:
    return {name: rows[name].to_pylist() for name in rows.column_names}


@pytest.mark.parametrize(("attempt", "occurrence"), [(None, None), (2, None), (None, 3)])
def test_a_message_that_is_sent_has_the_key_of_its_row(attempt: int | None, occurrence: int | None) -> None:
    rows = with_columns(
        messages([(7, 8, 1_000)]),
        attempt=pa.array([attempt], pa.int32()),
        occurrence=pa.array([occurrence], pa.int64()),
    )
    columns = columns_of(rows)
    sent = seen(outgoing.delivered(columns, 0, 1, 1_000, None)).properties
    assert key_of(sent) == key_of_row(columns, 0, is_rejected=False)
    assert key_of(sent)[1:] == (str(attempt or ""), str(occurrence or ""))


def test_a_rejected_message_has_neither_an_attempt_nor_an_occurrence() -> None:
    rows = with_columns(
        messages([(7, 8, 1_000)]),
        attempt=pa.array([2], pa.int32()),
        occurrence=pa.array([3], pa.int64()),
        reason=pa.array(["wrong"]),
    )
    columns = columns_of(rows)
    sent = seen(outgoing.rejected(columns, 0, 1, 1_000_000)).properties
    assert key_of(sent) == key_of_row(columns, 0, is_rejected=True)
    assert key_of(sent)[1:] == ("", "")


def test_the_columns_are_of_deliveries_in_the_order_of_the_properties() -> None:
    assert set(COLUMNS) <= set(DELIVERIES.names)
    assert len(COLUMNS) == len(PROPERTIES) == len(key_of({}))


def test_the_ids_of_attempts_are_a_messages_own() -> None:
    rows = with_columns(messages([(7, 8, 1)] * 3), attempt=pa.array([None, 1, 2], pa.int32()))
    ids = list(zip(*(column.tolist() for column in attempt_ids(rows)), strict=True))
    assert len(set(ids)) == 3
    assert ids[0] == (7, 8, 0)
    assert attempt_ids(rows.drop_columns("attempt"))[2].tolist() == [0, 0, 0]
