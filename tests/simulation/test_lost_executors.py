"""Tasks whose executors are lost: the simulator's stand-in does as Spark does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.simulation.cluster_script import JOBS, ROOT, TASKS, may_go_on, work
from tests.simulation.faults import USUAL_RATES, Faults
from tests.simulation.scheduler import Process, wait_seconds
from tests.simulation.spark import Context, LostTaskError
from tests.simulation.world import Plan, World, in_simulation
from tests.support.service.harness import wait_until

_WAIT_SECONDS = 300.0
_MOST_ATTEMPTS = 4

Told = tuple[list[str], Any]  # what tasks have told, sorted, and the results


class _OnSpark:
    """The jobs of the script, on Spark."""

    def __init__(self, folder: Path, master: str) -> None:
        self._folder, self._log = folder, folder / "log"
        command = [sys.executable, "-m", "tests.simulation.cluster_script", str(folder), master]
        with self._log.open("ab") as log:
            self.driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def wait(self, name: str) -> Any:
        """Waits for a file of the script, and reads it."""
        file = self._folder / name
        wait_until(lambda: file.exists() or self.driver.poll() is not None, _WAIT_SECONDS, f"the file {name}")
        assert file.exists(), self._log.read_text()[-5_000:]
        return json.loads(file.read_text())

    def processes(self, job: str, task: str, attempt: int) -> tuple[psutil.Process, psutil.Process]:
        """Waits for an attempt; returns its Python worker and its executor."""
        worker, executor = self.wait(f"{job} {task} {attempt}")
        return psutil.Process(worker), psutil.Process(executor)

    def told(self, job: str) -> Told:
        result = self.wait(f"{job} result")
        return _told(self._folder, job), _outcome(result)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.driver.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self.driver.kill()
        self.driver.wait()


def _told(folder: Path, job: str) -> list[str]:
    return sorted(line for line in (folder / "told").read_text().splitlines() if line.startswith(f"{job}:"))


def _outcome(result: Any) -> Any:
    """The results of a job's tasks, or which errors its failure names."""
    if isinstance(result, str):
        return [f"ValueError: attempt {n} fails" in result for n in range(_MOST_ATTEMPTS)]
    return [tuple(one) for one in result]


def _let_all_but_first_go_on(folder: Path) -> None:
    for job in JOBS:
        for task in TASKS:
            for attempt in range(_MOST_ATTEMPTS):
                if job == "fails" or (task, attempt) != ("first", 0):
                    may_go_on(folder, job, task, attempt).touch()


class _Falls(Faults):
    """One kind of fault falls, on its first opportunity."""

    def __init__(self, kind: str) -> None:
        super().__init__(0, {})
        self._kind = kind

    def is_now(self, kind: str) -> bool:
        self.opportunities[kind] += 1
        return kind == self._kind and self.opportunities[kind] == 1


def _in_memory(folder: Path, seed: int, job: str, kind: str, is_on_cluster: bool, goes_on_after: float | None) -> Told:
    """Runs a job on what stands in for Spark, with a fault of a kind.

    Args:
        goes_on_after: how long the first attempt of the first task lasts, seconds; None: for ever.
    """
    folder.mkdir()
    _let_all_but_first_go_on(folder)
    rates = {**USUAL_RATES, "seeds with a cluster": float(is_on_cluster)}
    world = World(Plan(seed, rates=rates))
    world.pause = lambda process: None  # type: ignore[method-assign]  # executors that stand still do so in the script
    results: list[Any] = []

    def run() -> None:
        begin = world.begin_on_cluster if is_on_cluster else None
        context = Context(
            world.scheduler, _Falls(kind), world.begin_executor, world.begin_worker, begin, world.task_attempts
        )
        attempt = lambda: world.task_context().attemptNumber()  # noqa: E731
        try:
            results.append(
                context.parallelize(TASKS, 2).mapPartitions(partial(work, folder, job, attempt, wait_seconds)).collect()
            )
        except LostTaskError as error:
            results.append(str(error))

    with in_simulation(world):
        try:
            world.scheduler.start(Process("driver"), "main", run)
            if goes_on_after is not None:
                world.scheduler.after(goes_on_after, may_go_on(folder, job, "first", 0).touch)
            world.scheduler.run(lambda: bool(results) and world.scheduler.now > 20.0)
        finally:
            for process in world.executors:
                world.scheduler.kill(process)
            world.disk.remove()
    return _told(folder, job), _outcome(results[0])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_OnSpark]:
    folder = tmp_path / "real"
    folder.mkdir()
    _let_all_but_first_go_on(folder)
    on_spark = _OnSpark(folder, "local-cluster[2,1,1024]")
    yield on_spark
    on_spark.end()


@pytest.mark.long
def test_tasks_of_a_cluster_run_again_in_memory_as_on_spark(tmp_path: Path, cluster: _OnSpark) -> None:
    _, executor = cluster.processes("killed", "first", 0)
    executor.kill()
    killed = cluster.told("killed")
    assert killed[1] == [("first", 1), ("second", 0)], "no task but the lost one has run again"

    _, executor = cluster.processes("stopped", "first", 0)
    executor.suspend()  # its Python worker goes on
    may_go_on(tmp_path / "real", "stopped", "first", 0).touch()
    wait_until(lambda: "stopped: first 0 ends" in _told(tmp_path / "real", "stopped"), _WAIT_SECONDS, "its end")
    cluster.processes("stopped", "first", 1)
    with contextlib.suppress(psutil.NoSuchProcess):
        executor.resume()
    stopped = cluster.told("stopped")
    assert stopped[1] == [("first", 1), ("second", 0)], "what came from the lost executor is not taken"

    may_go_on(tmp_path / "real", "soon back", "first", 0).touch()
    soon_back = cluster.told("soon back")
    fails = cluster.told("fails")
    assert fails[1] == [False, False, False, True]

    in_memory = partial(_in_memory, is_on_cluster=True)
    assert in_memory(tmp_path / "killed", 0, "killed", "executor cut off", goes_on_after=None) == killed
    told, which = in_memory(tmp_path / "fails", 0, "fails", "", goes_on_after=None)
    assert which == fails[1]
    assert told == [one for one in fails[0] if " first " in one], "in memory the second task comes after the first"
    found = [
        in_memory(tmp_path / f"{seed}", seed, "stopped", "executor cut off", goes_on_after=0.05) for seed in range(12)
    ]
    of_soon_back = [one.replace("soon back", "stopped") for one in soon_back[0]], soon_back[1]
    assert all(one in (stopped, of_soon_back) for one in found)
    assert stopped in found
    assert of_soon_back in found

    # Of the driver's end an executor hears at once, unless it stands still: then its Python worker goes on.
    worker, executor = cluster.processes("outlived", "first", 0)
    os.kill(cluster.driver.pid, signal.SIGKILL)
    cluster.driver.wait()
    wait_until(lambda: not worker.is_running() and not executor.is_running(), _WAIT_SECONDS, "the executor's end")


def test_a_killed_workers_task_runs_again_alone_in_memory_as_on_spark(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    _let_all_but_first_go_on(folder)
    on_spark = _OnSpark(folder, "local[2]")
    try:
        on_spark.processes("killed", "first", 0)[0].kill()
        killed = on_spark.told("killed")
    finally:
        on_spark.end()
    assert killed[1] == [("first", 1), ("second", 0)]
    assert _in_memory(tmp_path / "fake", 0, "killed", "worker killed", False, goes_on_after=None) == killed
