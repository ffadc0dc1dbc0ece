"""Deals seeds out to processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace

from tests.simulation.faults import rates_of_seed
from tests.simulation.world import Plan, Result, simulate

_MORE_SECONDS = 60.0  # the last messages are due within these


def plan_of(seed: int, rates: str) -> Plan:
    """Returns what is simulated for a seed.

    Args:
        rates: `usual`; `many`: some kinds of fault fall far more often, other ones in each seed; or `dense`: so do
            they, what stands still does so for a shorter time, and faults go on falling after the last message.
    """
    if rates == "usual":
        return Plan(seed)
    plan = Plan(seed, rates=rates_of_seed(seed))
    return replace(plan, more_seconds=_MORE_SECONDS, is_brief=True) if rates == "dense" else plan


def _run_plan(plan: Plan) -> Result:
    result = simulate(plan)
    return result if result.broken else replace(result, history=[])


def run_plans(plans: Iterable[Plan], processes: int) -> Generator[Result, None, None]:
    """Simulates plans, each as soon as a process has time; yields results as they come."""
    if processes == 1:
        yield from map(_run_plan, plans)
        return
    left = iter(plans)
    # Not forked: threads of libraries would be missing in the other process.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Result]] = set()
        try:
            while True:
                while len(running) < 2 * processes and (plan := next(left, None)) is not None:
                    running.add(pool.submit(_run_plan, plan))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
