"""Runs simulations: `python -m tests.simulation --seed 0 --faults 20000 --minutes 1`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.faults import Fault
from tests.simulation.shrinking import shrink
from tests.simulation.world import Plan, Result, simulate

_SHOWN = 80  # the last lines of a history


@dataclass
class Summary:
    """What came of many seeds."""

    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    starts: int = 0
    cpu_seconds: float = 0.0
    rebuilds: int = 0
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        kinds = Counter(kind for kind, _ in result.fallen)
        self.seeds += 1
        self.faults += kinds
        self.points += result.points
        self.pairs.update(f"{one} + {other}" for one in kinds for other in kinds if one < other)
        self.messages += result.messages
        self.starts += result.starts
        self.rebuilds += result.rebuilds
        self.cpu_seconds += result.seconds
        if result.broken:
            self.broken[result.seed] = result.broken

    def to_json(self) -> str:
        total = {"faults": self.faults.total(), "points": self.points.total()}
        return json.dumps(vars(self) | {"total": total}, indent=1, default=dict)


def show(result: Result, left_out: frozenset[Fault] = frozenset()) -> None:
    print(f"seed {result.seed}: {result.broken}; the shortest history found, with {len(result.fallen)} faults:")
    print("\n".join(result.history))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1_000_000, help="so many at most")
    parser.add_argument("--faults", type=int, default=20_000, help="until so many have fallen")
    parser.add_argument("--minutes", type=float, default=60.0, help="or so long")
    parser.add_argument("--history", action="store_true", help="prints the whole history of each seed")
    parser.add_argument("--keep-going", action="store_true", help="also after a seed that fails")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of what is simulated
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    summary, ends_at = Summary(), time.monotonic() + 60 * chosen.minutes
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        result = simulate(Plan(seed))
        summary.add(result)
        print(f"seed {seed}: {len(result.fallen)} faults, {result.seconds:.1f} s", file=sys.stderr, flush=True)
        if chosen.history:
            print("\n".join(result.history))
        if result.broken:
            print(f"seed {seed}: {result.broken}", flush=True)
            if not chosen.keep_going:
                show(shrink(Plan(seed), result))
                break
        if summary.faults.total() >= chosen.faults or time.monotonic() > ends_at:
            break
    print(summary.to_json())
    return 1 if summary.broken else 0


if __name__ == "__main__":
    sys.exit(main())
