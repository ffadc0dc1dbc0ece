"""Deals seeds out to processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace

from tests.simulation.world import Plan, Result, simulate


def _run_seed(seed: int) -> Result:
    result = simulate(Plan(seed))
    return result if result.broken else replace(result, history=[])


def run_seeds(seeds: Iterable[int], processes: int) -> Generator[Result, None, None]:
    """Simulates seeds, each as soon as a process has time; yields results as they come."""
    if processes == 1:
        yield from map(_run_seed, seeds)
        return
    left = iter(seeds)
    # Not forked: threads of libraries would be missing in the other process.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Result]] = set()
        try:
            while True:
                while len(running) < 2 * processes and (seed := next(left, None)) is not None:
                    running.add(pool.submit(_run_seed, seed))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
