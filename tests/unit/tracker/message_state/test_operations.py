"""Sequences, by which commands and moves are in order: they stay within their tick."""

from __future__ import annotations

import numpy as np
import pytest

import tracker.message_state.operations
import tracker.message_state.parking
from tests.support.tracker.messages import TOPIC, commands, messages, tick_at
from tracker import Shard, TickInput
from tracker.commands.control import Control
from tracker.commands.decode import decode
from tracker.commands.kinds import ANSWER
from tracker.context import Moment
from tracker.message_state.operations import SequencesExhaustedError
from tracker.messages import concat
from tracker.schemas import KNOWN, SubscriptionRule
from tracker.store import MemoryStore
from tracker.wire.delaylake_pb2 import ControlCommand, Result, SkipEntry, SkipMessages

BITS = 6
NAMES = ["a", "b", "c", "d", "e"]
MOMENT = Moment(tick=7, now=1_000, released=1_000, ingested_through=7)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    monkeypatch.setattr(tracker.message_state.operations, "SEQUENCE_BITS", BITS)
    monkeypatch.setattr(tracker.message_state.parking, "_MAX_IN_ORDER", 1 << BITS - 1)
    monkeypatch.setattr(tracker.message_state.parking, "_LEFT_FOR_OTHERS", 1 << BITS - 3)
    return Control(MemoryStore(), {TOPIC: NAMES}, 1_000)


def test_what_is_held_back_in_one_tick_has_only_sequences_of_that_tick(control: Control) -> None:
    control.begin({TOPIC: (1 << len(NAMES)) - 1}, {})
    control.hand_out(messages([(1, i, 900) for i in range(40)]), MOMENT)
    moved = control.take_moves().to_pylist()
    assert {row["sequence"] >> BITS for row in moved} == {MOMENT.tick}
    of_first = [row["sequence"] for row in moved if row["subscription"] == "a"]
    assert of_first[:33] == sorted(set(of_first)), "as far as there is room they rise"
    firsts = [min(row["sequence"] for row in moved if row["subscription"] == name) for name in NAMES]
    assert firsts == sorted(set(firsts))
    assert [control.next_sequence(MOMENT) for _ in range(3)][-1] >> BITS == MOMENT.tick


def test_a_tick_with_more_commands_than_sequences_is_an_error_and_not_the_next_ticks(control: Control) -> None:
    given = np.array([control.next_sequence(MOMENT) for _ in range(1 << BITS)])
    assert given.tolist() == list(range(7 << BITS, 8 << BITS))
    with pytest.raises(SequencesExhaustedError, match="more than 64 commands and moves in tick 7"):
        control.next_sequence(MOMENT)


def test_the_answers_of_one_command_share_a_sequence(control: Control) -> None:
    one = {"kind": ANSWER, "topic": TOPIC, "ledger_id": -1, "entry_id": -1, "batch_index": -1, "deliver_at": 0}
    rows = [
        one | {"request_id": f"r{n}", "result": 5, "subscriptions": 0, "body": n} for n in range(3) for _ in range(50)
    ]
    answers = control.apply(commands(rows), {}, KNOWN.empty_table(), np.zeros(0, np.bool_), MOMENT)
    of_tick = 7 << BITS
    assert answers["sequence"].to_pylist() == [of_tick + n for n in range(3) for _ in range(50)]


@pytest.mark.slow
def test_commands_that_name_a_million_messages_in_one_batch_leave_the_shard_going() -> None:
    entries = [SkipEntry(ledger_id=1, entry_id=n, batch_indexes=range(125)) for n in range(800)]
    payloads = [
        ControlCommand(request_id=f"r{n}", topic=TOPIC, skip=SkipMessages(entries=entries)).SerializeToString()
        for n in range(11)
    ]
    assert max(map(len, payloads)) < 120_000
    sent = concat([messages([(1, n, 0)], payload=payload) for n, payload in enumerate(payloads)])
    decoded = decode(sent, {TOPIC: [SubscriptionRule("a", False)]})
    shard = Shard(MemoryStore(), {TOPIC: ["a"]}, 50_000)
    effects = shard.apply(tick_at(1, 1_000), TickInput(commands=decoded.commands, request_ids=decoded.request_ids))
    results = effects.outcomes.group_by(["request_id", "result"]).aggregate([([], "count_all")]).to_pylist()
    counted = {(row["request_id"], row["result"]): row["count_all"] for row in results}
    applied = {f"r{n}" for n in range(5)}
    assert {request: n for (request, result), n in counted.items() if result == Result.INVALID} == {
        f"r{n}": 1 for n in range(5, 11)
    }
    assert {request for request, _ in counted} - {f"r{n}" for n in range(5, 11)} == applied
