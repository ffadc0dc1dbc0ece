"""Commands that wait for messages which never come: how many there may be, and what they cost."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.control_desk import Desk
from tests.support.tracker.messages import TOPIC, command, commands, messages
from tracker.commands import waiting
from tracker.commands.waiting import WAITING, WaitingCommands
from tracker.due_time import MAX_TIME_MILLIS
from tracker.packing import pack
from tracker.store import MemoryStore
from tracker.wire.delaylake_pb2 import Result

NEVER = MAX_TIME_MILLIS - 1


def test_of_ten_times_as_many_as_a_subscription_may_have_the_first_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_CANCELS", 50)
    desk.at(5, 10_000)
    given = [command(f"r{i}", i, 7, [0], cancel_at=NEVER) for i in range(500)]
    answered = [desk.apply(*given[first : first + 100]) for first in range(0, 500, 100)]
    results = [result for part in answered for _, result in part]
    assert results.count(Result.WAITING) == desk.control.n_waiting == 50
    assert results.count(Result.INVALID) == 450
    # Another subscription has its own; and there is room again where one is done.
    desk.restart()
    assert desk.apply(command("b", 1, 7, [1], cancel_at=NEVER)) == [("b", Result.WAITING)]
    assert desk.apply(command("x", 900, 7, [0, 1], cancel_at=NEVER)) == [("a", Result.INVALID), ("b", Result.INVALID)]
    assert desk.arrive(messages([(3, 7, 50_000)])) == [("a", Result.APPLIED)]
    assert desk.apply(command("y", 900, 7, [0, 1], cancel_at=NEVER)) == [("a", Result.WAITING), ("b", Result.WAITING)]


def test_other_kinds_have_a_limit_of_their_own(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_CANCELS", 5)
    monkeypatch.setattr(waiting, "MOST_OTHERS", 50)
    desk.at(5, 10_000, ingested_through=4)
    answered = desk.apply(*(command(f"r{i}", i, 7, [0]) for i in range(500)))
    assert [result for _, result in answered].count(Result.WAITING) == desk.control.n_waiting == 50
    desk.restart()
    assert desk.apply(command("c", 1, 7, [0], cancel_at=NEVER)) == [("a", Result.WAITING)]
    assert len(desk.at(6, 10_000).expire()) == 50
    assert desk.control.n_waiting == 1


def test_ten_thousand_cancels_that_wait_for_good_cost_little() -> None:
    store = MemoryStore()
    control = WaitingCommands(store)
    row = command("r", 0, 7, [0], cancel_at=NEVER)
    rows = commands([row]).take(pa.array(np.zeros(10_000, np.int64)))
    rows = rows.set_column(rows.column_names.index("ledger_id"), "ledger_id", pa.array(np.arange(10_000) * 100))
    control.add_commands(rows, 1)
    control.save()
    assert sum(map(len, store.values.values())) < 6_000_000  # bytes; each ledger apart took 28 MB
    # At the end of a seal epoch none of them is read.
    later = WaitingCommands(store)
    with mock.patch.object(later, "_get", side_effect=AssertionError):
        assert later.take_commands_where(lambda rows: np.ones(rows.num_rows, np.bool_), NEVER - 1).num_rows == 0
    assert later.take_commands_where(lambda rows: np.ones(rows.num_rows, np.bool_), NEVER).num_rows == 10_000
    assert len(later) == 0


def test_what_an_earlier_program_has_stored_is_taken_over() -> None:
    store = MemoryStore()
    for ledger, n in ((7, 2), (9_000, 1)):
        rows = commands([command(f"{ledger} {i}", ledger, i, [0, 1], cancel_at=50_000) for i in range(n)])
        store.put("waiting", (ledger, 0), pack(rows.append_column("tick", pa.array([4] * n, pa.int64()))))
    store.put("waiting_ledgers", (0, 0), np.array([[7, 2], [9_000, 1]], np.int64).tobytes())
    for _ in range(2):
        control = WaitingCommands(store)
        assert len(control) == 3
        assert control._counts == {(TOPIC, 0): 3, (TOPIC, 1): 3}
        control.save()
    assert ("waiting_ledgers", (0, 0)) not in store.values
    taken = control.take_commands(messages([(9_000, 0, 1), (7, 1, 1), (7, 5, 1)]))
    assert taken.schema == WAITING
    assert taken["request_id"].to_pylist() == ["7 1", "9000 0"]
    assert control._counts == {(TOPIC, 0): 1, (TOPIC, 1): 1}
