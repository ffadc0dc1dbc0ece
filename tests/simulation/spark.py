"""Spark as the service uses it: batches with offsets and commits, state, and tasks that may run twice.

It promises what `MicroBatchExecution` does (Structured Streaming's guide, "Fault Tolerance Semantics"): the end of a
batch is in the offset log before the batch runs; a batch whose end is there and whose commit is not runs again, from
the same state; the source hears that a batch is committed when the next one's end is in the log. A task that is lost
or fails runs again; one that the driver takes for lost may go on all the same. So a part of a batch is read again, or a
shard runs again, from the same state, and nothing else of the batch does (`DAGScheduler.handleTaskCompletion`).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from streaming.operator.processor import Operator
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.source.reader import SourceReader
from tests.simulation.faults import Faults
from tests.simulation.scheduler import Future, Process, Scheduler, Task, wait

_OUTPUT = to_arrow_schema(OUTPUT_SCHEMA)
_COUNTS_AS_LOST_SECONDS = (0.1, 3.0, 12.0)  # after which the driver starts the task of an executor again
_SOON_BACK = 0.3  # of the executors that are cut off
_MOST_FAILURES = 4  # of a task: `spark.task.maxFailures`
_SNAPSHOT_BATCHES = 10  # each tenth batch has its whole state, the others what they change


class LostTaskError(Exception):
    """The driver has lost a task."""


class StateDamagedError(Exception):
    """Spark does not find its state as it has written it."""


class ConcurrentUpdateError(Exception):
    """Another query has written the offset, or the commit, of this batch: CONCURRENT_STREAM_LOG_UPDATE."""


class State:
    """Spark's map state of a shard."""

    def __init__(self, values: dict[tuple[Any, ...], tuple[bytes]]) -> None:
        self.values = dict(values)
        self.getValue = self.values.get
        self.updateValue = self.values.__setitem__

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self.values.pop(key, None)


class Batch:
    """The output of a batch, as `foreachBatch` gets it. The operator runs when it is asked for."""

    def __init__(self, run: Callable[[], list[Any]]) -> None:
        self._run = run

    def toArrow(self) -> pa.Table:
        rows = [row.asDict() for row in self._run()]
        return pa.Table.from_pylist(rows, schema=_OUTPUT)


class Query:
    """A streaming query on a checkpoint's folder.

    Args:
        folder: of the query.
        reader: the source.
        operator: makes the operator on a state.
        keys: Spark's key of each shard's rows.
        sink: the function for `foreachBatch`.
        point: called before and after each side effect.
        faults: that fall on tasks.
        name: no other query has it.
        before_rename: called with the path of an offset just before it is there: the file system may hang then.
        on_done: called when the sink is done with a batch, with the rows of each shard that were its input.
    """

    def __init__(
        self,
        folder: Path,
        reader: SourceReader,
        operator: Callable[[State], Operator],
        keys: list[int],
        sink: Callable[[Any, int], None],
        point: Callable[[str], None],
        faults: Faults,
        name: str = "query",
        before_rename: Callable[[Path], None] = lambda file: None,
        on_done: Callable[[dict[int, list[Any]]], None] = lambda rows: None,
    ) -> None:
        self._folder, self._name, self._before_rename, self._on_done = folder, name, before_rename, on_done
        self._reader, self._operator, self._keys, self._sink = reader, operator, keys, sink
        self._point, self._faults = point, faults
        self._states: dict[int, dict[tuple[Any, ...], tuple[bytes]]] = {}  # of the last batch, by key
        self._loaded = -1  # the batch after which these are
        for name in ("offsets", "commits", "state"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Runs batch after batch, until the source has none."""
        last = max((int(file.name) for file in (self._folder / "offsets").iterdir() if file.name.isdigit()), default=-1)
        start = self._read_offset(last - 1) if last > 0 else self._reader.initial_offset()
        if last >= 0:
            end = self._read_offset(last)
            if self._last_commit() < last:
                self._run_batch(last, start, end)
            start = end
        while True:
            end = self._reader.next_offset(start)
            if end == start:
                return
            last += 1
            self._write("offsets", str(last), b"v1\n" + json.dumps(end).encode())
            if last:
                self._reader.commit(start)
            self._run_batch(last, start, end)
            start = end

    def _last_commit(self) -> int:
        """Reads the newest commit, as Spark does when a query begins; it ends where it can't."""
        last = max((int(file.name) for file in (self._folder / "commits").iterdir() if file.name.isdigit()), default=-1)
        if last >= 0:
            json.loads((self._folder / "commits" / str(last)).read_text().splitlines()[-1])
        return last

    def _read_offset(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "offsets" / str(number)).read_text().splitlines()[-1])
        return found

    def _write(self, part: str, name: str, content: bytes) -> None:
        """Writes a file beside its place, and moves it there; does not force it to the disk.

        Spark never writes an offset or a commit over another one (`HDFSMetadataLog.add`); it does so with state.
        """
        self._point(f"{part}: before")
        file = self._folder / part / name
        if part != "state" and file.exists():
            raise ConcurrentUpdateError(f"{part} {name}")
        temporary = file.with_name(f"{name}.{self._name}.part")
        temporary.write_bytes(content)
        if part == "offsets":
            self._before_rename(file)
        temporary.replace(file)
        self._point(f"{part}: after")

    def _run_batch(self, number: int, start: dict[str, Any], end: dict[str, Any]) -> None:
        # Of parts that tasks read the driver knows only what it has planned.
        parts = pickle.loads(pickle.dumps(self._reader.partitions(start, end)))  # what travels to the tasks
        self._point("planned")
        rows: dict[int, list[Any]] = {}

        def run() -> list[Any]:
            rows.update(self._read(parts))
            if self._faults.is_now("parts read again"):  # the executor was lost that had what was read
                self._point("read")
                assert self._read(parts) == rows, f"batch {number} has other input when it is read again"
            return [row for key in self._keys for row in self._run_shard(number, key, rows[key])]

        self._sink(Batch(run), number)
        self._on_done(rows)
        self._point("sink done")
        self._loaded = number
        self._write("commits", str(number), b"v1\n{}")
        for part in ("offsets", "commits", "state"):
            for file in (self._folder / part).iterdir():
                if int(file.name.partition(".")[0].partition("-")[0]) < number - 20:
                    file.unlink()

    def _read(self, parts: list[Any]) -> dict[int, list[Any]]:
        """Reads the input of a batch; returns the rows of each shard."""
        rows: dict[int, list[Any]] = {key: [] for key in self._keys}
        for part in parts:
            for batch in self._reader.read(part):
                for key, kind, body in zip(*(batch[name].to_pylist() for name in batch.schema.names), strict=True):
                    rows[key].append(SimpleNamespace(kind=kind, body=body))
        return rows

    def _run_shard(self, number: int, key: int, rows: list[Any]) -> list[Any]:
        before = self._state(number - 1, key)
        state = State(before)
        output = list(self._operator(state).apply(key, iter(rows)))
        if self._faults.is_now("shard runs again"):  # the task, or its result, was lost
            again = State(before)
            repeated = list(self._operator(again).apply(key, iter(rows)))
            assert again.values == state.values, f"batch {number} has left another state when it ran again"
            assert _told(repeated) == _told(output), f"batch {number} has other rows when it ran again"
        before_digest = _digest(before) if number % _SNAPSHOT_BATCHES else ""
        self._write("state", f"{number}-{key}", pickle.dumps((before_digest, state.values)))
        self._states[key] = state.values
        return output

    def _state(self, number: int, key: int) -> dict[tuple[Any, ...], tuple[bytes]]:
        if number < 0:
            return {}
        if self._loaded == number:
            return self._states[key]
        before_digest, found = self._stored_state(number, key)
        # Spark reads the changes of each batch since the last snapshot, whoever has written them.
        while before_digest:
            number -= 1
            wanted = before_digest
            try:
                before_digest, before = self._stored_state(number, key)
            except StateDamagedError:
                break  # as if the next one were a snapshot
            assert _digest(before) == wanted, f"the state of batch {number} is not the one that the next one changed"
        return found

    def _stored_state(self, number: int, key: int) -> tuple[str, dict[tuple[Any, ...], tuple[bytes]]]:
        try:
            found: tuple[str, dict[tuple[Any, ...], tuple[bytes]]] = pickle.loads(
                (self._folder / "state" / f"{number}-{key}").read_bytes()
            )
        except (FileNotFoundError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise StateDamagedError(f"the state of batch {number}: {error}") from error
        return found


def _digest(state: dict[tuple[Any, ...], tuple[bytes]]) -> str:
    return hashlib.blake2b(repr(sorted(state.items(), key=repr)).encode(), digest_size=8).hexdigest()


def _told(rows: list[Any]) -> list[Any]:
    """What the rows of a shard say, but for how long it took."""
    told = []
    for row in rows:
        body = json.loads(row.body) if row.kind == "status" else row.body
        if isinstance(body, dict):
            body["counts"].pop("operator_millis", None)
        told.append((row.shard, row.kind, row.tick, body))
    return told


class Context:
    """Stands in for `SparkSession` and `SparkContext` where releases are sent: tasks run one after another.

    A task that fails, or whose process ends, runs again, alone, up to four times (`spark.task.maxFailures`): its
    `TaskContext.attemptNumber` says how often it has failed. Then the job fails, with the last error's text. On a
    cluster the driver may lose an executor, and starts its task again on another one. What comes from an executor
    before it counts as lost is the task's result. What comes later is dropped (`TaskSchedulerImpl.statusUpdate`:
    "its executor has been marked as failed").

    Args:
        scheduler: of the simulation.
        faults: that fall on tasks.
        begin_executor: makes a process for a task that the driver loses, and that goes on.
        begin_worker: makes one that is killed.
        begin_on_cluster: makes one on another machine, for an attempt of a task, which is cut off, or not; None: the
            master is local.
        attempts: gets the number of each attempt that runs, by its thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        faults: Faults,
        begin_executor: Callable[[], Process],
        begin_worker: Callable[[], Process],
        begin_on_cluster: Callable[[int, bool], Process] | None,
        attempts: dict[Task | None, int],
    ) -> None:
        self.sparkContext = self
        self._scheduler, self._faults, self._begin_executor = scheduler, faults, begin_executor
        self._begin_worker, self._begin_on_cluster, self._attempts = begin_worker, begin_on_cluster, attempts

    def setLocalProperty(self, name: str, value: str) -> None:
        pass

    def cancelAllJobs(self) -> None:
        pass

    def parallelize(self, items: Iterable[Any], tasks: int) -> Tasks:
        return Tasks(self, list(items), tasks)

    def run(self, work: Callable[[Iterable[Any]], Iterator[Any]], items: list[Any]) -> list[Any]:
        """Runs a task; raises where the driver loses it, and where it has failed too often."""
        if self._faults.is_now("task lost before"):
            raise LostTaskError("a task was lost before it did anything")
        if self._faults.is_now("task goes on"):
            executor = self._begin_executor()
            self._scheduler.start(executor, "task", partial(_run_unheard, work, items))
            self._scheduler.wait(self._scheduler.random.choice([0.0, 0.1, 3.0]))
            raise LostTaskError("a task was lost, and goes on")
        result = self._run_attempts(work, items)
        if self._faults.is_now("task lost after"):
            raise LostTaskError("a task was lost after it had done all")
        return result

    def _run_attempts(self, work: Callable[[Iterable[Any]], Iterator[Any]], items: list[Any]) -> list[Any]:
        why = ""
        for attempt in range(_MOST_FAILURES):
            try:
                return self._run_attempt(attempt, work, items)
            except Exception:
                why = traceback.format_exc()
        raise LostTaskError(f"a task failed {_MOST_FAILURES} times, last: {why}")

    def _run_attempt(self, attempt: int, work: Callable[[Iterable[Any]], Iterator[Any]], items: list[Any]) -> list[Any]:
        if self._begin_on_cluster is not None:
            is_cut_off = self._faults.is_now("executor cut off")
            if is_cut_off or attempt:
                executor = self._begin_on_cluster(attempt, is_cut_off)
                return self._run_in(executor, attempt, is_cut_off, work, items)
        elif self._faults.is_now("worker killed"):
            return self._run_in(self._begin_worker(), attempt, False, work, items)
        return self._run_as(attempt, work, items)

    def _run_in(
        self,
        process: Process,
        attempt: int,
        is_cut_off: bool,
        work: Callable[[Iterable[Any]], Iterator[Any]],
        items: list[Any],
    ) -> list[Any]:
        """Runs an attempt in another process, until that ends, or counts as lost."""
        result: Future[list[Any]] = Future()
        is_soon_back, seconds = True, 1.0
        if is_cut_off:
            seconds = self._scheduler.random.choice(_COUNTS_AS_LOST_SECONDS)
            is_soon_back = self._scheduler.random.random() < _SOON_BACK
        self._scheduler.start(process, "task", partial(self._run_for, result, attempt, work, items))
        while True:
            if is_soon_back:
                wait([result], seconds)
            else:
                self._scheduler.wait(seconds)
            if is_soon_back and result.done():
                return result.result()
            if is_cut_off or process.is_dead:
                raise LostTaskError("an executor was lost")

    def _run_for(
        self,
        result: Future[list[Any]],
        attempt: int,
        work: Callable[[Iterable[Any]], Iterator[Any]],
        items: list[Any],
    ) -> None:
        try:
            result.set_result(self._run_as(attempt, work, items))
        except Exception as error:
            result.set_exception(error)

    def _run_as(self, attempt: int, work: Callable[[Iterable[Any]], Iterator[Any]], items: list[Any]) -> list[Any]:
        task = self._scheduler.current
        self._attempts[task] = attempt
        try:
            return list(work(iter(items)))
        finally:
            del self._attempts[task]


def _run_unheard(work: Callable[[Iterable[Any]], Iterator[Any]], items: list[Any]) -> None:
    try:
        list(work(iter(items)))
    except Exception:
        return  # nobody hears of it


class Tasks:
    """An RDD."""

    def __init__(self, context: Context, items: list[Any], n: int) -> None:
        self._context, self._items, self._n = context, items, n
        self._work: Callable[[Iterable[Any]], Iterator[Any]] = iter

    def mapPartitions(self, work: Callable[[Iterable[Any]], Iterator[Any]]) -> Tasks:
        self._work = work
        return self

    def collect(self) -> list[Any]:
        size = -(-len(self._items) // self._n) or 1
        parts = [self._items[i : i + size] for i in range(0, len(self._items), size)]
        return [row for part in parts for row in self._context.run(self._work, part)]
