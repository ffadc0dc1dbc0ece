"""What the accounts of a simulation find: each of their rules can fail."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.simulation.accounts import BrokenGuaranteeError
from tests.simulation.expected import Expected, Repeat
from tests.simulation.oracle import Oracle
from tracker.entry_log import ENTRIES
from warehouse.schemas import REJECTS

NOW = 1_000_000  # ms since the epoch
SOURCE = "persistent://public/default/orders"
POSITION = "7:3:-1:-1"


def rows(schema: pa.Schema, **values: Any) -> pa.Table:
    """One row of the entry of POSITION, with these values; the others are null."""
    row = {"ledger_id": 7, "entry_id": 3, "position": POSITION, "topic": SOURCE, **values}
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names}], schema=schema)


def message(**values: Any) -> Expected:
    """A message of the subscription `a`, due now."""
    return Expected(SOURCE, NOW, frozenset({"a"}), {"deliverAt": f"{NOW}"}, b"1", **values)


def oracle_of(expected: Expected) -> Oracle:
    """An oracle that knows of a message, whose entry is in `entries` for good."""
    oracle = Oracle(lambda: NOW)
    oracle.sent(POSITION, expected)
    oracle.stored("entries", rows(ENTRIES))
    return oracle


@pytest.mark.parametrize(
    "expected", [message(), message(rejected_for="deliverAt"), message(repeat=Repeat(NOW, 1_000, 2))]
)
def test_whatever_kind_it_is_an_entry_that_no_table_has_may_not_be_acknowledged(expected: Expected) -> None:
    with pytest.raises(BrokenGuaranteeError, match="7:3 is acknowledged, and no table has it for good"):
        oracle_of(expected).acknowledged_to(["7:3"])


def test_what_is_rejected_may_be_acknowledged_when_the_table_has_it() -> None:
    oracle = oracle_of(message(rejected_for="deliverAt"))
    oracle.stored("rejects", rows(REJECTS, reason="deliverAt is no time"))
    oracle.acknowledged_to(["7:3"])
    assert oracle.acknowledged == 1
