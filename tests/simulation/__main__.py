"""Runs simulations: `python -m tests.simulation --seed 0 --faults 20000 --minutes 1`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.simulation.processes import plan_of, run_plans
from tests.simulation.progress import Progress
from tests.simulation.reports import Summary
from tests.simulation.shrinking import shrink
from tests.simulation.world import Plan, Result, simulate


def _show_shortest(plan: Plan) -> None:
    result = simulate(plan)
    found = shrink(plan, result) if result.broken else result
    print(f"seed {plan.seed}: {found.broken}; the shortest history found, with {len(found.fallen)} faults:")
    print("\n".join(found.history), flush=True)


def _show_progress(result: Result) -> None:
    text = f"seed {result.seed}: {len(result.fallen)} faults, {result.seconds:.1f} s"
    print(f"{text}: {result.broken}" if result.broken else text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1_000_000, help="so many at most")
    parser.add_argument("--faults", type=int, default=20_000, help="until so many have fallen")
    parser.add_argument("--minutes", type=float, default=60.0, help="or so long")
    parser.add_argument("--processes", type=int, default=1, help="which share the seeds")
    parser.add_argument("--rates", choices=["usual", "many", "dense"], default="usual", help="how often faults fall")
    parser.add_argument("--progress", type=Path, help="a file of results: seeds that it has are not run again")
    parser.add_argument("--history", action="store_true", help="prints the whole history of the first seed instead")
    parser.add_argument("--keep-going", action="store_true", help="also after a seed that fails")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    return parser.parse_args()


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of what is simulated
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    chosen = _arguments()
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    if chosen.history:
        print("\n".join(simulate(plan_of(chosen.seed, chosen.rates)).history))
        return 0
    summary, ends_at = Summary(), time.monotonic() + 60 * chosen.minutes
    progress = Progress(chosen.progress, chosen.rates)
    known = {result.seed: result for result in progress.results if result.seed in seeds}
    for result in known.values():
        summary.add(result)

    def is_enough() -> bool:
        has_failed = bool(summary.broken) and not chosen.keep_going
        return has_failed or summary.faults.total() >= chosen.faults or time.monotonic() > ends_at

    left = () if is_enough() else (seed for seed in seeds if seed not in known)
    results = run_plans((plan_of(seed, chosen.rates) for seed in left), chosen.processes)
    for result in results:
        progress.add(result)
        summary.add(result)
        _show_progress(result)
        if is_enough():
            break
    results.close()
    if summary.broken and not chosen.keep_going:
        _show_shortest(plan_of(next(iter(summary.broken)), chosen.rates))
    print(summary.to_json() if chosen.output == "json" else summary.to_text())
    return 1 if summary.broken else 0


if __name__ == "__main__":
    sys.exit(main())
