"""What a request was answered first is found in the table, for a day, by its id."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tests.support.warehouse.tables import DAY, HOUR, NOW, rows
from tracker.commands.repeats import ANSWERS, OTHER_BODY
from tracker.messages import FIRST_IMPORTED_LEDGER
from tracker.requests import OPERATION, outcome_id
from tracker.schemas import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.queries.first_answers import find_bodies, find_first_answers, find_message_bodies
from warehouse.queries.index_rows import outcomes_to_rows


def outcome(request_id: str, entry_id: int, **given: object) -> dict[str, object]:
    return {
        "request_id": request_id,
        "subscription": "a",
        "ledger_id": 1,
        "entry_id": entry_id,
        "result": "APPLIED",
        "operation": "SKIP",
        "applied_at": NOW,
        "batch_id": 7,
        **given,
    }


def test_answers_are_found_by_request_id(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    published = [
        outcome("it's", 1),
        outcome("it's", 2, result="TOO_LATE", reason="released", batch_id=8),
        outcome("r", 3),
        outcome("it's", -1, ledger_id=-1, subscription=None, result="NOT_FOUND"),
        outcome("old", 4, applied_at=NOW - DAY - 2 * HOUR),
        # No first answers.
        outcome("it's", 5, result="INVALID", reason=OTHER_BODY),
        outcome("it's", 6, result="ALREADY_APPLIED", reason="the request id has been applied"),
    ]
    tables.append("outcomes", rows("outcomes", published), {})
    version = tables.version("outcomes")
    tables.append("outcomes", rows("outcomes", [outcome("it's", 9)]), {})

    found = find_first_answers(tables, version, ["it's", "nobody", "old"], NOW)
    assert found.schema == ANSWERS
    names = ("subscription", "entry_id", "result", "reason", "tick")
    assert [tuple(row[name] for name in names) for row in found.to_pylist()] == [
        (None, -1, Result.NOT_FOUND, None, 7),
        ("a", 1, Result.APPLIED, None, 7),
        ("a", 2, Result.TOO_LATE, "released", 8),
    ]
    assert find_first_answers(tables, None, ["it's"], NOW).num_rows == 4
    assert find_first_answers(tables, version, [], NOW).schema == ANSWERS


def test_bodies_are_those_of_first_commands(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    published = [
        outcome("r", 1, result="WAITING", command_hash=-7),
        outcome("r", 1, command_hash=None),  # it waited: its command is not known any more
        outcome("r", 2, result="INVALID", reason=OTHER_BODY, command_hash=8),
        outcome("of an earlier version", 3),
        outcome("old", 4, command_hash=9, applied_at=NOW - DAY),
    ]
    tables.append("outcomes", rows("outcomes", published), {})
    assert find_bodies(tables, NOW) == {"of an earlier version": 0, "r": -7}


def test_messages_with_request_ids_are_found_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    topics = "persistent://public/default/a", "persistent://public/default/b"

    def message(topic: str, request_id: str, entry_id: int, **given: object) -> dict[str, object]:
        fields = {"topic": topic, "subscription": None, "operation": OPERATION, "command_hash": entry_id}
        return outcome(outcome_id(topic, request_id), entry_id, **fields | given)

    published = [
        message(topics[0], "late@night", 1, applied_at=NOW - 1),
        message(topics[0], "early", 2, applied_at=NOW - 2),
        message(topics[1], "early", 3),
        message(topics[0], "early", 4, result="ALREADY_APPLIED", superseded_by="1:2:-1:-1"),
        message(topics[0], "wrong", 5, result="INVALID", reason="deliverAt is negative"),
        message(topics[0], "old", 6, applied_at=NOW - DAY),
        # A message that another broker's copy of the topic has, too.
        message(topics[0], "of another broker", 7, ledger_id=FIRST_IMPORTED_LEDGER + 1),
        outcome("a command", 8),
    ]
    tables.append("outcomes", rows("outcomes", published), {})
    found = find_message_bodies(tables, NOW)
    assert found == {topics[0]: {"early": 2, "late@night": 1}, topics[1]: {"early": 3}}
    assert list(found[topics[0]]) == ["early", "late@night"]
    assert find_bodies(tables, NOW).keys() == {"a command"}


def test_what_is_published_again_is_not_written_down_again() -> None:
    published = [
        {"request_id": "r", "ledger_id": 1, "entry_id": i, "result": 3, "is_repeat": i > 0 or None} for i in (0, 1)
    ]
    written = outcomes_to_rows(pa.Table.from_pylist(published, schema=OUTCOME_ROWS), 5, NOW)
    assert [(row["entry_id"], row["result"], row["batch_id"]) for row in written.to_pylist()] == [(0, "TOO_LATE", 5)]
