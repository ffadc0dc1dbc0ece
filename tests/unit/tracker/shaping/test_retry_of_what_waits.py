"""Retries of messages that have not been handed out: the answer is that they wait, and they come as they would have."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import pytest

from tests.support.tracker.messages import TOPIC, command, commands, resumed
from tests.support.tracker.shaped_service import CLOSED, START, Service, many, rate
from tracker.commands.kinds import RESCHEDULE, RETRY, SKIP
from tracker.messages import concat
from tracker.schemas import KNOWN, PauseChange
from tracker.wire.delaylake_pb2 import Result

N = 200
WAITS = int(Result.ALREADY_APPLIED)


def apply(service: Service, *given: dict[str, Any], millis: int = 400, **changes: Any) -> list[int]:
    """Applies commands for `s` in one tick; returns their results."""
    rows = concat(service.sealed)
    known = rows.filter(pc.is_null(rows["sequence"])).select(KNOWN.names).cast(KNOWN)
    request_ids = {str(one["request_id"]): 1 for one in given} | changes.pop("request_ids", {})
    rows_given = {"known_messages": known, "payload_rows": rows} | changes
    [effects] = service.step(millis, commands=commands(list(given)), request_ids=request_ids, **rows_given)
    results: list[int] = effects.outcomes["result"].to_pylist()
    return results


def retries(*entries: int, name: str = "r", **others: Any) -> list[dict[str, Any]]:
    return [command(f"{name}{i}", 7, i, kind=RETRY) | {"reason": "why"} | others for i in entries]


def attempts(service: Service) -> list[int]:
    """The numbers of the retries that have been given."""
    rows = concat(service.sealed)
    return [n for n in pc.fill_null(rows["attempt"], 0).to_pylist() if n]


@pytest.mark.parametrize("rule", [rate(50, burst=10), rate(25, 5, "key"), CLOSED])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_message_that_waits_for_its_place(rule: str, is_moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 20)
    service = Service(rule, shards=1)
    service.step(100, many(N, START + (60_000 if is_moved else 10_000)))
    service.run_until(START + 3_000)
    if is_moved:
        moves = [command(f"m{i}", 7, i, cancel_at=START + 10_000, kind=RESCHEDULE) for i in range(N)]
        assert set(apply(service, *moves)) == {Result.APPLIED}
    while service.cutoff < START + 10_000:
        service.step(400)
    handed_out = {row[1] for row in service.of("s")}
    late = [i for i in range(N) if i not in handed_out]
    assert len(late) > 100
    assert set(apply(service, *retries(*late))) == {WAITS}
    service.run_out(N)
    assert sorted(row[1] for row in service.of("s")) == list(range(N))
    assert not attempts(service)


def test_a_retry_that_waits_for_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.shaping.shaper.MOST_PLACES", 2)
    service = Service(rate(1, burst=1), shards=1)
    service.step(100, many(6, START + 5_000))
    service.run_out(6)
    assert set(apply(service, *retries(*range(6), after_millis=1))) == {Result.APPLIED}
    handed_out = {row[1] for row in service.of("s")[6:]}
    late = [i for i in range(6) if i not in handed_out]
    assert len(late) >= 4
    assert set(apply(service, *retries(*late, name="again"))) == {WAITS}
    service.run_out(12)
    assert sorted(row[1] for row in service.of("s")) == sorted([*range(6), *range(6)])
    assert set(attempts(service)) == {1}


def test_what_is_delivered_now_by_another_command_of_the_batch() -> None:
    service = Service(None, shards=1)
    service.step(100, many(1, START + 60_000))
    service.run_until(START + 5_000)
    now = command("now", 7, 0, cancel_at=1, kind=RESCHEDULE)
    assert apply(service, now, *retries(0)) == [Result.APPLIED, WAITS]
    assert [row[1] for row in service.of("s")] == [0]
    assert not attempts(service)


def test_what_is_resumed_by_another_command_of_the_batch() -> None:
    service = Service(None, shards=1)
    pause = PauseChange("p", TOPIC, 1, is_paused=True)
    service.step(100, many(1, START + 5_000), pause_changes=[pause], request_ids={"p": 1})
    service.run_until(START + 8_000)
    assert apply(service, *retries(0, name="held")) == [WAITS]
    resume = PauseChange("q", TOPIC, 1, is_paused=False)
    rounds = resumed(concat(service.sealed), "s")
    assert apply(service, *retries(0), pause_changes=[resume], request_ids={"q": 1}, **rounds) == [WAITS]
    assert [row[1] for row in service.of("s")] == [0]
    assert not attempts(service)


def test_what_is_retried_at_once_by_another_command_of_the_batch() -> None:
    service = Service(None, shards=1)
    service.step(100, many(1, START + 5_000))
    service.run_until(START + 8_000)
    between = command("skip", 7, 0, (1,), kind=SKIP)
    found = apply(service, *retries(0, after_millis=1), between, *retries(0, name="again", after_millis=1))
    assert found == [Result.APPLIED, Result.TOO_LATE, WAITS]
    assert [row[1] for row in service.of("s")] == [0, 0]
    assert attempts(service) == [1]


def test_one_that_was_handed_out_comes_again_whatever_waits_beside_it() -> None:
    service = Service(rate(1, burst=1), shards=1)
    service.step(100, many(6, START + 5_000))
    service.run_until(START + 5_500)
    first = service.of("s")[0][1]
    assert apply(service, *retries(first, after_millis=1)) == [Result.APPLIED]
    service.run_out(7)
    assert sorted(row[1] for row in service.of("s")) == sorted([*range(6), first])
