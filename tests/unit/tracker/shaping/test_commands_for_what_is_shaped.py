"""Commands for what is shaped: it is cancelled and moved as any other, and what a command makes due is shaped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.naive.rates import most_within
from tests.support.tracker.messages import TOPIC, command, commands, messages, resumed
from tests.support.tracker.shaped_service import START, Service, many, rate
from tracker.commands.kinds import RESCHEDULE
from tracker.messages import concat, int64
from tracker.schemas import KNOWN, PauseChange
from tracker.wire.delaylake_pb2 import Result


def test_a_shaped_message_is_cancelled_or_moved_as_any_other() -> None:
    service = Service(rate(1, burst=2), shards=1)
    due = START + 3_000
    service.step(100, many(10, due))
    service.run_until(START + 6_000)
    waiting = [entry for entry in range(10) if entry not in {row[1] for row in service.of("s")}]
    cancelled, moved = waiting[-1], waiting[-2]
    rows = commands(
        [command("c", 7, cancelled, (0,)), command("m", 7, moved, (0,), cancel_at=START + 60_000, kind=RESCHEDULE)]
    )
    known = many(10, due).select(KNOWN.names).filter(pa.array([i in (cancelled, moved) for i in range(10)]))
    payload = concat(part.filter(pa.array(np.isin(int64(part, "entry_id"), [moved]))) for part in service.sealed)
    effects = service.step(
        400, commands=rows, request_ids={"c": 1, "m": 1}, known_messages=known.cast(KNOWN), payload_rows=payload
    )
    assert effects[0].outcomes["result"].to_pylist() == [int(Result.APPLIED)] * 2
    service.run_until(START + 62_000, step=900)
    shaped = {row[1]: row for row in service.of("s")}
    assert sorted(shaped) == [i for i in range(10) if i != cancelled]
    # Moved by a command it goes at that time: what shaping had done to it does not count any more.
    assert shaped[moved][3:] == (START + 60_000, None)


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(3))
def test_what_a_pause_held_back_is_shaped_when_it_goes_on(phase: int) -> None:
    service = Service(rate(20, burst=2))
    for _ in range(phase):  # so that the seal epoch ends with another one of the ticks that follow
        service.step(1)
    # Another one that is cancelled for long: moves are looked at while there is anything of the kind.
    other = messages([(8, 0, START + 10**8)])
    service.step(1, other)
    rows, known = commands([command("c", 8, 0, (1,))]), other.select(KNOWN.names).cast(KNOWN)
    service.step(1, commands=rows, request_ids={"c": 1}, known_messages=known)
    pause = PauseChange("p", TOPIC, 1, is_paused=True)
    service.step(100, many(200, START + 3_000), pause_changes=[pause], request_ids={"p": 1})
    service.run_until(START + 8_000)
    assert not service.of("s")
    resume = PauseChange("r", TOPIC, 1, is_paused=False)
    service.step(400, pause_changes=[resume], request_ids={"r": 1}, **resumed(concat(service.sealed), "s"))
    service.run_until(START + 40_000)
    shaped = service.of("s")
    assert len({row[1] for row in shaped}) == len(shaped) == 200
    assert most_within([row[3] for row in shaped], 1_000) <= 22


def test_what_is_delivered_now_by_commands_is_shaped() -> None:
    service = Service(rate(20, burst=2), shards=1)
    waiting = many(100, START + 60_000)
    service.step(100, waiting)
    service.run_until(START + 5_000)
    ids = {f"n{entry}": 1 for entry in range(100)}
    rows = commands(
        [command(id_, 7, entry, (0,), cancel_at=service.now, kind=RESCHEDULE) for entry, id_ in enumerate(ids)]
    )
    known, payload = waiting.select(KNOWN.names).cast(KNOWN), concat(service.sealed)
    service.step(400, commands=rows, request_ids=ids, known_messages=known, payload_rows=payload)
    service.run_until(START + 30_000)
    shaped = service.of("s")
    assert len({row[1] for row in shaped}) == len(shaped) == 100
    assert most_within([row[3] for row in shaped], 1_000) <= 22
    assert not service.of("t")  # it was not named, and waits
