"""Sequences, by which commands and moves are in order: they stay within their tick."""

from __future__ import annotations

import numpy as np
import pytest

import tracker.context
import tracker.message_state.parking
from tests.support.tracker.control_desk import Desk
from tests.support.tracker.messages import TOPIC, commands, messages, tick_at
from tracker.commands.decode import decode
from tracker.commands.kinds import ANSWER
from tracker.context import SequencesExhaustedError
from tracker.messages import concat
from tracker.schemas import SubscriptionRule
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput
from tracker.wire.delaylake_pb2 import ControlCommand, Result, SkipEntry, SkipMessages

BITS = 6
NAMES = ["a", "b", "c", "d", "e"]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(tracker.context, "SEQUENCE_BITS", BITS)
    monkeypatch.setattr(tracker.message_state.parking, "_MAX_IN_ORDER", 1 << BITS - 1)
    monkeypatch.setattr(tracker.message_state.parking, "_LEFT_FOR_OTHERS", 1 << BITS - 3)
    return Desk(subscriptions={TOPIC: NAMES}).at(7, 1_000)


def test_what_is_held_back_in_one_tick_has_only_sequences_of_that_tick(desk: Desk) -> None:
    desk.parking.begin_tick({TOPIC: (1 << len(NAMES)) - 1}, {}, 0)
    desk.choose_subscriptions(messages([(1, i, 900) for i in range(40)]))
    moved = desk.state.take_moves().to_pylist()
    assert {row["sequence"] >> BITS for row in moved} == {7}
    of_first = [row["sequence"] for row in moved if row["subscription"] == "a"]
    assert of_first[:33] == sorted(set(of_first)), "as far as there is room they rise"
    firsts = [min(row["sequence"] for row in moved if row["subscription"] == name) for name in NAMES]
    assert firsts == sorted(set(firsts))
    assert [desk.context.next_sequence() for _ in range(3)][-1] >> BITS == 7


def test_a_tick_with_more_commands_than_sequences_is_an_error_and_not_the_next_ticks(desk: Desk) -> None:
    given = np.array([desk.context.next_sequence() for _ in range(1 << BITS)])
    assert given.tolist() == list(range(7 << BITS, 8 << BITS))
    with pytest.raises(SequencesExhaustedError, match="more than 64 commands and moves in tick 7"):
        desk.context.next_sequence()


def test_the_answers_of_one_command_share_a_sequence(desk: Desk) -> None:
    one = {"kind": ANSWER, "topic": TOPIC, "ledger_id": -1, "entry_id": -1, "batch_index": -1, "deliver_at": 0}
    rows = [
        one | {"request_id": f"r{n}", "result": 5, "subscriptions": 0, "body": n} for n in range(3) for _ in range(50)
    ]
    answers = desk.publish(commands(rows), {})
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
