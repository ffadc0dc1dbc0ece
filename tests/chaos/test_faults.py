"""Faults at random moments under load, and every message checked at the consumers and by the audit.

`make chaos FAULTS=1000 SEED=7 KINDS="kill worker,fill disk"` draws as many, of these kinds or of all, with PAUSE
seconds between them in the mean; with CLUSTER=1 the job runs on two executors. What was found is printed as JSON.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import (
    ALL,
    AddPartition,
    Fault,
    KillBroker,
    KillDriver,
    LoseCheckpoint,
    UnloadControl,
    UnloadDestination,
    UnloadSource,
)
from tests.chaos.unanswered import why_unanswered
from tests.chaos.world import World

_SECONDS_A_FAULT = 15  # at most, in the mean: so many messages there is room for
_REPORT_EVERY = 10
_NEAR_MILLIS = 30_000
_CLUSTER = "local-cluster[2,12,1024]"

_NOT_STORED = ("acknowledged_but_not_stored", "commands_not_stored")

Say = Callable[[dict[str, Any]], None]


def drawn(chance: random.Random, n: int, kinds: Sequence[str]) -> list[Fault]:
    """A schedule: faults of the kinds named, or of all that are to be survived."""
    if unknown := set(kinds) - {fault.name for fault in ALL}:
        raise ValueError(f"no such faults: {unknown}; there are {[fault.name for fault in ALL]}")
    faults = [fault for fault in ALL if (fault.name in kinds if kinds else fault.is_survivable)]
    return chance.choices(faults, [fault.weight for fault in faults], k=n)


def run(
    folder: Path,
    schedule: Sequence[Fault],
    seed: int,
    rate: int,
    pause_seconds: float,
    say: Say,
    master: str | None = None,
    redraw: Callable[[], Fault] | None = None,
) -> dict[str, Any]:
    """Does faults to a job one after another; returns what was sent and delivered, and what was wrong.

    Args:
        redraw: draws another fault in place of one that could not be done; None: there is none.
        rate: messages a second.
        pause_seconds: between two faults, in the mean.
        say: is told how far it is.
        master: Spark's; None: the default.
    """
    chance = random.Random(seed)
    world = World(folder, random.Random(seed + 1), rate, max(60_000, rate * len(schedule) * _SECONDS_A_FAULT), master)
    done: list[tuple[int, str]] = []
    not_done: Counter[str] = Counter()
    try:
        world.start()
        coming = deque(schedule)
        while coming:
            fault = coming.popleft()
            time.sleep(chance.expovariate(1 / pause_seconds))
            at, reason = time.time_ns() // 1_000_000, None
            try:
                reason = fault.apply(world)
                world.keep_running()
            except Exception as error:  # what it found is told at the end
                world.problems.append(f"{fault.name}: {type(error).__name__}: {str(error)[-400:]}")
                world.keep_running()
            if reason:
                not_done[f"{fault.name}: {reason}"] += 1
                if redraw is not None and not_done.total() <= len(schedule):
                    coming.append(redraw())
                continue
            done.append((at, fault.name))
            if len(done) % _REPORT_EVERY == 0:
                say({"faults": len(done), "of": len(schedule), "sent": world.number, "problems": len(world.problems)})
        world.finish_sending()
        audit = world.settle(60)
        report: dict[str, Any] = {
            "seed": seed,
            "faults": dict(Counter(name for _, name in done)),
            "not_done": dict(not_done),
            "sent": world.ledger.sent,
            "acknowledged_but_not_stored": world.ledger.not_stored,
            "delivered": world.ledger.delivered(),
            **world.ledger.comes_again(),
            "superseded": world.keyed.superseded,
            "pauses": sum(map(len, world.ledger.pauses.values())),
            "commands": len(world.commands.asked),
            "commands_not_stored": world.commands.not_stored,
            "unanswered": why_unanswered(world.commands.unanswered(), world.job, world.client, world.admin),
            "contradicted": world.commands.contradicted(),
            **world.ledger.report(world.number),
            "max_lateness_millis": world.ledger.max_late_millis,
            "audit": {"taken_in": audit.taken_in, "findings": audit.findings},
            "renamed": world.renamed(),
            "problems": world.problems,
            "exit_status": world.job.terminate(),
        }
    finally:
        world.close()
    for example in (e for found in report["examples"].values() for e in found if isinstance(e, dict)):
        due = example["due"]
        example["near"] = [(at - due, name) for at, name in done if abs(at - due) < _NEAR_MILLIS]
    say(report)
    return report


def check(report: dict[str, Any]) -> None:
    kinds = ("lost", "doubled", "early", "wrong", "unanswered", "contradicted", "renamed", "problems")
    wrong = [kind for kind in kinds if report[kind]]
    # What the broker has lost is nobody's fault here, but it is told beside what is.
    assert not wrong, {kind: report[kind] for kind in (*wrong, *_NOT_STORED)}
    assert report["sent"] > 0
    assert report["audit"] == {"taken_in": report["sent"], "findings": {}}
    assert report["exit_status"] == 0


def test_unloads_kills_and_a_lost_checkpoint_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    """With keyed, recurring and retried messages, and commands: what simulations show, once on real processes."""
    schedule: list[Fault] = [UnloadSource(), UnloadDestination(), UnloadControl(), AddPartition(), KillDriver()]
    schedule += [UnloadDestination(), KillBroker(), LoseCheckpoint()]
    report = run(tmp_path, schedule, seed=171, rate=1_000, pause_seconds=0.5, say=lambda _: None)
    check(report)
    assert sum(report["faults"].values()) == len(schedule)


@pytest.mark.chaos
def test_many_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SEED") or time.time())
    kinds = [kind.strip() for kind in os.environ.get("KINDS", "").split(",") if kind.strip()]
    schedule = drawn(random.Random(seed), int(os.environ.get("FAULTS") or 100), kinds)

    def say(told: dict[str, Any]) -> None:
        with capsys.disabled():
            print(json.dumps(told), flush=True)

    say({"seed": seed, "faults": len(schedule), "drawn": Counter(fault.name for fault in schedule)})
    rate = int(os.environ.get("RATE") or 1_000)
    master = _CLUSTER if os.environ.get("CLUSTER") else None
    pause = float(os.environ.get("PAUSE") or 1.2)
    again = random.Random(seed + 2)
    report = run(
        *(tmp_path, schedule, seed, rate, pause, say, master),
        redraw=lambda: drawn(again, 1, kinds)[0],
    )
    check(report)
    assert sum(report["faults"].values()) == len(schedule), report["not_done"]
