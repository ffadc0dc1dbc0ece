"""Jobs on a Spark cluster whose executors are lost: what their tasks tell, in which attempt.

As a program, `python -m tests.simulation.cluster_script FOLDER MASTER`, it runs on Spark until it is killed. What
stands in for Spark runs `work`, too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pyspark import TaskContext

from conf.settings import Settings
from streaming.session import create_session

JOBS = ("killed", "stopped", "soon back", "fails", "outlived")
TASKS = ("first", "second")
ROOT = Path(__file__).parents[2]


def tell(folder: Path, what: str) -> None:
    with (folder / "told").open("a") as file:
        file.write(what + "\n")


def may_go_on(folder: Path, job: str, task: str, attempt: int) -> Path:
    """Returns the file for which an attempt of a task waits."""
    return folder / f"{job} {task} {attempt} goes on"


def work(
    folder: Path, job: str, attempt: Callable[[], int], wait: Callable[[float], object], items: Iterable[str]
) -> Iterator[tuple[str, int]]:
    """What a task does: it begins, waits until it may go on, and ends."""
    task, number = " ".join(items), attempt()
    tell(folder, f"{job}: {task} {number} begins")
    if (job, task) == ("fails", "first"):
        raise ValueError(f"attempt {number} fails")
    while not may_go_on(folder, job, task, number).exists():
        wait(0.02)
    tell(folder, f"{job}: {task} {number} ends")
    yield task, number


def _work_on_spark(folder: Path, job: str, items: Iterable[str]) -> Iterator[tuple[str, int]]:
    tasks, context = list(items), TaskContext.get()
    assert context is not None
    worker = psutil.Process()
    executor = worker.parent().parent()  # type: ignore[union-attr]  # its daemon's parent
    processes = folder / f"{job} {tasks[0]} {context.attemptNumber()}"
    part = processes.with_name(f"{processes.name} part")  # the other task writes one, too
    part.write_text(json.dumps([worker.pid, executor.pid]))  # type: ignore[union-attr]
    part.rename(processes)
    yield from work(folder, job, context.attemptNumber, time.sleep, tasks)


def main(folder: Path, master: str) -> None:
    conf = {
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeout": "4s",
        "spark.network.timeoutInterval": "1s",
        "spark.storage.blockManagerHeartbeatTimeoutMs": "4s",
    }
    spark = create_session(Settings(spark={"master": master, "conf": conf}), "cluster script")  # type: ignore[arg-type]
    jvm: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    print(jvm.pid, flush=True)
    for job in JOBS:
        try:
            tasks = spark.sparkContext.parallelize(TASKS, 2)
            result: Any = tasks.mapPartitions(partial(_work_on_spark, folder, job)).collect()
        except Exception as error:
            result = str(error)
        (folder / f"{job} part").write_text(json.dumps(result))
        (folder / f"{job} part").rename(folder / f"{job} result")


if __name__ == "__main__":
    from tests.simulation import cluster_script

    cluster_script.main(Path(sys.argv[1]), sys.argv[2])
