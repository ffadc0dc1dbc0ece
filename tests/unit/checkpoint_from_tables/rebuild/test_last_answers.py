"""A rebuild finds the outcomes that may not have been published."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS
from checkpoint_from_tables.rebuild.last_answers import find_last_answers
from tests.support.warehouse.tables import NOW, make, rows
from warehouse.delta.tables import Tables
from warehouse.schemas import MOVED_AT


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """The newest batch has answered `new`, which it has read, and `waited`, which an earlier one has read."""
    _, tables = make(tmp_path)
    outcome = {"subscription": "a", "ledger_id": 1, "operation": "SKIP", "command_hash": 7}
    outcomes = [
        {**outcome, "request_id": "told", "result": "APPLIED", "batch_id": 4},
        {**outcome, "request_id": "waited", "result": "WAITING", "batch_id": 4},
        {**outcome, "request_id": "waited", "result": "APPLIED", "batch_id": 5},
        {**outcome, "request_id": "new", "result": "APPLIED", "batch_id": 5},
        {**outcome, "request_id": "superseded", "result": "SUPERSEDED", "batch_id": 5, "command_hash": None},
    ]
    tables.append("outcomes", rows("outcomes", [{**one, "applied_at": NOW} for one in outcomes]), {"job": 5})
    return tables


def found(tables: Tables) -> list[str]:
    return find_last_answers(tables)["request_id"].to_pylist()


def test_commands_that_come_again_are_answered_then(tables: Tables) -> None:
    assert found(tables) == ["superseded", "waited"]


def test_commands_that_an_earlier_broker_had_do_not_come_again(tables: Tables) -> None:
    tables.note("entries", {MOVED_AT: NOW + 1})
    assert found(tables) == ["new", "superseded", "waited"]


def test_commands_that_were_answered_long_after_the_broker_was_changed_come_again(tables: Tables) -> None:
    tables.note("entries", {MOVED_AT: NOW - CLOCKS_MILLIS})
    assert found(tables) == ["superseded", "waited"]
