"""Sequences, by which commands and moves are in order: they stay within their tick."""

from __future__ import annotations

import numpy as np
import pytest

import tracker.commands.holding.holding
import tracker.commands.operations
from tests.support.tracker.messages import TOPIC, messages
from tracker.commands.control import Control
from tracker.commands.moment import Moment
from tracker.commands.operations import SequencesExhaustedError
from tracker.store import MemoryStore

BITS = 6
NAMES = ["a", "b", "c", "d", "e"]
MOMENT = Moment(tick=7, now=1_000, released=1_000, ingested_through=7)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    monkeypatch.setattr(tracker.commands.operations, "SEQUENCE_BITS", BITS)
    monkeypatch.setattr(tracker.commands.holding.holding, "_MAX_IN_ORDER", 1 << BITS - 1)
    monkeypatch.setattr(tracker.commands.holding.holding, "_LEFT_FOR_OTHERS", 1 << BITS - 3)
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
