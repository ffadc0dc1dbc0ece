"""The service under a simulated clock, with faults of a seed: all that docs/guarantees.md says holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.faults import USUAL_RATES
from tests.simulation.planted import NOT_FOUND, PLANTED, RATES
from tests.simulation.shrinking import shrink
from tests.simulation.world import Plan, simulate

ROOT = Path(__file__).parents[2]
_CPU_SECONDS = 60.0  # in which a planted fault is found


def run(*arguments: str) -> str:
    """Runs simulations in a process of their own: the order of sets there is always the same."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


@pytest.mark.parametrize(("first", "seeds"), [(0, 6), pytest.param(6, 24, marks=pytest.mark.chaos)])
def test_the_guarantees_hold_whatever_fails(first: int, seeds: int) -> None:
    summary = json.loads(run("--seed", f"{first}", "--seeds", f"{seeds}", "--output", "json"))
    assert summary["seeds"] == seeds
    assert not summary["broken"]
    assert summary["total"]["faults"] > 12 * seeds
    assert summary["messages"] > 150 * seeds


def test_dense_faults_fall_where_a_job_is_soon_back_and_after_the_last_message() -> None:
    arguments = ("--seed", "5", "--seeds", "1", "--rates", "dense", "--faults", "1000000")
    summary = json.loads(run(*arguments, "--output", "json"))
    assert summary["total"]["faults"] > 100
    assert len(summary["faults"]) >= 10, "kinds of faults"
    assert not summary["broken"]


@pytest.mark.long
def test_the_guarantees_hold_where_faults_are_dense() -> None:
    arguments = ("--seed", "1000", "--seeds", "100", "--rates", "dense", "--faults", "1000000", "--processes", "2")
    summary = json.loads(run(*arguments, "--output", "json"))
    assert summary["seeds"] == 100
    assert not summary["broken"]
    assert summary["total"]["faults"] > 15_000


def test_a_seed_has_one_history() -> None:
    one, other = (run("--seed", "8", "--history") for _ in range(2))
    assert one == other
    assert one.count(" starts\n") > 1
    assert one.count(" gets ") > 100


def find(name: str) -> str:
    """Plants a fault; returns the line that says how it was found, empty: it was not."""
    spent, seed = 0.0, 0
    with PLANTED[name]():
        while spent < _CPU_SECONDS:
            result = simulate(Plan(seed, seconds=30.0, rates={**USUAL_RATES, **RATES.get(name, {})}))
            spent, seed = spent + result.seconds, seed + 1
            if result.broken:
                return f"{name} | {seed} | {spent:.1f} | {result.broken}"
    return ""


@pytest.mark.chaos
def test_what_breaks_is_shown_without_what_has_nothing_to_do_with_it() -> None:
    with PLANTED["cancels are not kept"]():
        found = next(result for seed in range(40) if (result := simulate(Plan(seed, seconds=30.0))).broken)
        shortest = shrink(Plan(found.seed, seconds=30.0), found)
    assert shortest.broken
    assert len(shortest.fallen) <= 3
    assert len(shortest.done) <= 8
    assert len(shortest.history) < 80


@pytest.mark.chaos
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in NOT_FOUND])
def test_a_planted_fault_is_found(name: str) -> None:
    found = find(name)
    print(found)
    assert found, f"not found in {_CPU_SECONDS:.0f} s of CPU: {name}"
