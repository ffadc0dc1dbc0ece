"""What of a batch's outcomes is published: one each, or one for all that share a result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.sinks import outcomes as module
from streaming.sinks.outcomes import last_published, to_publish
from tests.unit.streaming.release.test_last_sent import Destination
from tracker.commands.schema import OUTCOME_ROWS
from tracker.wire.delaylake_pb2 import ControlOutcome, Result


def outcome(entry_id: int, **given: object) -> Mapping[str, object]:
    values = {"request_id": "r", "topic": "t", "subscription": "a", "ledger_id": 1, "batch_index": -1}
    result = {"result": int(Result.APPLIED), "reason": "", "operation": "SKIP", "sum_up": True}
    return values | result | {"entry_id": entry_id} | given


def told(*outcomes: Mapping[str, object]) -> list[tuple[object, ...]]:
    """What is published of single outcomes and sums: by whom it is asked for, and the number."""
    rows = to_publish(pa.Table.from_pylist(list(outcomes), schema=OUTCOME_ROWS)).to_pylist()
    return [(row["is_repeat"], row["batch_index"], row["result"], row["has_more"], row["n_named"]) for row in rows]


def published(*outcomes: Mapping[str, object]) -> list[tuple[object, ...]]:
    rows = to_publish(pa.Table.from_pylist(list(outcomes), schema=OUTCOME_ROWS)).to_pylist()
    names = ("request_id", "subscription", "ledger_id", "entry_id", "batch_index", "result", "has_more", "n_named")
    return [tuple(row[name] for name in names) for row in rows]


def test_without_being_asked_to_sum_up_each_outcome_is_told() -> None:
    rows = [outcome(entry, sum_up=asked) for entry, asked in enumerate([False, None])]
    assert published(*rows) == [("r", "a", 1, 0, -1, 1, False, 0), ("r", "a", 1, 1, -1, 1, False, 0)]


def test_those_of_a_request_that_share_a_result_are_one() -> None:
    rows = [outcome(0), outcome(1, request_id="s"), outcome(2), outcome(3, result=3, reason="released")]
    rows += [outcome(4, subscription="b"), outcome(0, request_id="single", sum_up=False), outcome(5)]
    assert published(*rows) == [
        ("single", "a", 1, 0, -1, 1, False, 0),
        ("r", "a", -1, -1, -1, 1, False, 3),
        ("s", "a", -1, -1, -1, 1, False, 1),
        ("r", "a", -1, -1, -1, 3, False, 1),
        ("r", "b", -1, -1, -1, 1, False, 1),
    ]


def test_single_messages_of_an_entry_are_summed_up_unless_the_entry_was_named() -> None:
    rows = [outcome(0, batch_index=0), outcome(0, batch_index=1)]
    rows += [outcome(1, batch_index=i, result=1 + 2 * i, sum_up=False) for i in range(2)] + [outcome(2)]
    assert published(*rows) == [
        ("r", "a", 1, 1, 0, 1, True, 0),
        ("r", "a", 1, 1, 1, 3, False, 0),
        ("r", "a", -1, -1, -1, 1, False, 3),
    ]


def test_an_outcome_for_the_command_as_a_whole_has_no_number() -> None:
    whole = {"subscription": None, "ledger_id": -1, "result": int(Result.INVALID)}
    assert published(outcome(-1, **whole)) == [("r", None, -1, -1, -1, int(Result.INVALID), False, 0)]


def test_what_a_repeated_command_is_told_in_the_tick_of_the_first_is_an_answer_of_its_own() -> None:
    """Added to the first one, the client would take 12 of 10 for done, and never look at those that came too late."""
    first = [
        outcome(entry, result=1 if entry < 6 else 3, reason="" if entry < 6 else "released") for entry in range(10)
    ]
    first += [outcome(10, batch_index=i, result=1 + 2 * i, sum_up=False) for i in range(2)]
    rows = [{**one, "is_repeat": again} for again in (None, True) for one in first]
    singles = [(again, i, 1 + 2 * i, i == 0, 0) for again in (False, True) for i in range(2)]
    sums = [(again, -1, result, False, n) for again in (False, True) for result, n in ((1, 6), (3, 4))]
    assert told(*rows) == [*singles, *sums]


def test_what_a_repeated_command_is_told_is_not_summed_up_with_what_is_new() -> None:
    """Of 10 messages 6 were told in an earlier tick, one is new in this one, and 3 wait."""
    new = outcome(6)
    again = [outcome(entry, is_repeat=True, result=1 if entry < 7 else int(Result.WAITING)) for entry in range(10)]
    whole = outcome(-1, subscription=None, ledger_id=-1, is_repeat=True)
    other = [outcome(0, result=int(Result.INVALID), reason="another command")]
    assert [(row[5], row[7]) for row in published(new, *again, whole, *other)] == [
        (1, 0),
        (1, 1),
        (1, 7),
        (int(Result.WAITING), 3),
        (int(Result.INVALID), 1),
    ]


OUTCOME: dict[str, Any] = {"payload": ControlOutcome(request_id="r").SerializeToString(), "key": "r"}


@pytest.mark.parametrize(
    ("content", "tick"),
    [
        (OUTCOME, 9),
        (OUTCOME | {"key": "s"}, -1),
        ({"payload": b"", "key": ""}, -1),
        ({"payload": b"x"}, -1),
    ],
    ids=["outcome", "another key", "empty", "no outcome"],
)
def test_a_later_tick_counts_unless_the_message_is_no_outcome(
    content: dict[str, Any], tick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Destination()
    topic.send(6, "app-outcomes-batched", {}, **OUTCOME)
    topic.send(9, "app-outcomes-batched", {}, **content)
    monkeypatch.setattr(module, "connect", lambda settings: topic)
    monkeypatch.setattr(module, "AdminClient", lambda settings: contextlib.nullcontext(topic))
    assert last_published(Settings(), "app", Offset(tick=6, now=1)) == tick, "of the next name there is nothing"
