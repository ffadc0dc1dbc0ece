"""Measures the cost of pending messages: memory, time of a batch, lateness, disk, restart, rebuild, a cancel.

usage: scale.py [PENDING ...]        default: 1000000 10000000

For each number PENDING: that many messages due over a year are imported (20 bytes each), the tables maintained, the
checkpoint rebuilt. Then the job runs with 1,000 messages a second in and out; five of the pending messages are
cancelled one by one, and up to a million of those due in the last three quarters of the year at once; the job is killed
with -9 and started again. Prints one JSON object. The job and its broker, producer and consumer share the machine.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pulsar
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from admin.control.bulk import NAMED, Action, Change, plan
from admin.control.client import ControlClient
from admin.control.requests import Cancel
from benchmarks.on_time import NAMESPACE, WARM_UP_SECONDS, consume, produce
from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM
from tests.harness import Job, now
from warehouse.queries.listing import PendingFilter
from warehouse.queries.waiting import Pending

FILE_ROWS = 1_000_000
YEAR_MILLIS = 365 * 86_400_000
RATE, SECONDS = 1_000, 80
BULK = 1_000_000
TOPIC = f"{NAMESPACE}/bench"


def write(folder: Path, rows: int) -> list[Path]:
    """Writes Parquet files with `rows` messages that are due within a year, in any order; returns the files."""
    chance = np.random.default_rng(1)
    files = []
    begin = now() + 15 * 60_000
    for number in range(-(-rows // FILE_ROWS)):
        n = min(FILE_ROWS, rows - number * FILE_ROWS)
        due = begin + chance.integers(0, YEAR_MILLIS, n)
        payload = pa.Array.from_buffers(pa.binary(20), n, [None, pa.py_buffer(chance.bytes(20 * n))])
        files.append(folder / f"pending-{number}.parquet")
        pq.write_table(pa.table({"deliver_at": due, "payload": payload.cast(pa.binary())}), files[-1])
    return files


def timed(*arguments: str) -> tuple[float, int, dict[str, Any]]:
    """Runs `delaylake`; returns its seconds, its peak resident memory in bytes, and the JSON that it printed."""
    began, most = time.perf_counter(), 0
    process = subprocess.Popen([str(PROGRAM), *arguments, "--output", "json"], stdout=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            most = max(most, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return time.perf_counter() - began, most, json.loads(printed)


def index_bytes(folder: Path) -> tuple[int, int]:
    """Returns the compressed size of delayed_index without, and with, the payload, bytes."""
    table = DeltaTable(str(folder / "warehouse" / "delayed_index"))
    whole = without = 0
    for path in table.file_uris():
        metadata = pq.read_metadata(path)
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            for column in (group.column(i) for i in range(group.num_columns)):
                whole += column.total_compressed_size
                without += 0 if column.path_in_schema == "payload" else column.total_compressed_size
    return without, whole


class Memory(threading.Thread):
    """Watches the proportional set size of the job's processes; `stop` returns the median of the later half, MiB."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._stopping = threading.Event()
        self.mebibytes: list[float] = []

    def run(self) -> None:
        assert self._job.process is not None
        while not self._stopping.wait(2):
            total = 0
            for process in [psutil.Process(self._job.process.pid), *self._job.children()]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.mebibytes.append(total / 2**20)

    def stop(self) -> float:
        self._stopping.set()
        self.join()
        return float(np.median(self.mebibytes[len(self.mebibytes) // 2 :]))


def state_bytes(folder: Path) -> int:
    """Returns the size of the newest snapshots of all shards' state, bytes."""
    newest: dict[Path, Path] = {}
    for file in (folder / "checkpoint" / "query" / "state").rglob("*.zip"):
        last = newest.get(file.parent)
        if last is None or int(file.stem.split("_")[0]) > int(last.stem.split("_")[0]):
            newest[file.parent] = file
    return sum(file.stat().st_size for file in newest.values())


def first_release(job: Job, client: pulsar.Client) -> float:
    """Starts the job; returns the seconds until the first message comes to the destination."""
    reader = client.create_reader(f"{TOPIC}-a", pulsar.MessageId.latest)
    began = time.perf_counter()
    starting = threading.Thread(target=job.start)
    starting.start()
    reader.read_next(120_000)
    seconds = time.perf_counter() - began
    starting.join()
    reader.close()
    return seconds


@contextmanager
def service() -> Iterator[tuple[EmbeddedBroker, Job, pulsar.Client]]:
    """Yields a broker, a job on it that is not started, and a client; they end with the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = EmbeddedBroker(folder / "broker")
        broker.start(port=0, http_port=0)
        job = Job(folder, broker.settings, [{"source": TOPIC, "subscriptions": [{"name": "a"}]}])
        client = connect(broker.settings)
        try:
            yield broker, job, client
        finally:
            client.close()
            job.stop()
            broker.kill()


def measure(pending: int) -> dict[str, Any]:
    found: dict[str, Any] = {"pending": pending}
    with service() as (broker, job, client):
        folder = job.folder
        files = write(folder, pending)
        config = ["--config", str(job.file)]
        import_seconds, import_bytes, _ = timed(*config, "import", TOPIC, *map(str, files))
        for file in files:
            file.unlink()
        before = index_bytes(folder)[0]
        maintain_seconds, maintain_bytes, _ = timed(*config, "maintain")
        rebuild_seconds, rebuild_bytes, rebuilt = timed(*config, "rebuild", "--discard-checkpoint")
        assert rebuilt["pending"] == pending
        found |= {
            "import": {"seconds": round(import_seconds, 1), "peak_mib": round(import_bytes / 2**20)},
            "maintain": {"seconds": round(maintain_seconds, 1), "peak_mib": round(maintain_bytes / 2**20)},
            "rebuild": {"seconds": round(rebuild_seconds, 1), "peak_mib": round(rebuild_bytes / 2**20)},
            "index_bytes_a_row_without_payload": {
                "imported": round(before / pending, 2),
                "maintained": round(index_bytes(folder)[0] / pending, 2),
            },
        }
        job.start()
        found |= steady(job, broker)
        found["state_snapshot_bytes"] = state_bytes(folder)
        with ControlClient(job.settings, "bench") as control:
            found |= cancels(job, control)
        producer = client.create_producer(TOPIC)
        for delay in (1_000, 100_000):
            producer.send(b"x", properties={"deliverAt": str(now() + delay)})
        time.sleep(1)
        job.kill9()
        job.stop()
        producer.send(b"y", properties={"deliverAt": str(now())})
        found["restart_to_first_release_seconds"] = round(first_release(job, client), 1)
    return found


def steady(job: Job, broker: EmbeddedBroker) -> dict[str, Any]:
    """Returns lateness at the consumer, time of a batch and memory under load, after the warm-up."""
    results: Any = multiprocessing.Queue()
    until = time.time() + 2 * SECONDS + 60
    consumer = multiprocessing.Process(
        target=consume, args=(broker.settings, f"{TOPIC}-a", RATE * SECONDS, until, results)
    )
    consumer.start()
    results.get()
    begin, seen = time.time(), len(job.progress)
    memory = Memory(job)
    memory.start()
    producer = multiprocessing.Process(target=produce, args=(broker.settings, TOPIC, RATE, SECONDS, False))
    producer.start()
    producer.join()
    late, at = results.get()
    consumer.join()
    late = late[at > (begin + WARM_UP_SECONDS) * 1000]
    progress = job.progress[seen + WARM_UP_SECONDS : seen + SECONDS]
    return {
        "batch_millis_p50": float(np.median([p["batch_millis_p50"] for p in progress])),
        "late_millis": {f"p{p}": round(float(np.percentile(late, p)), 1) for p in (50, 99)},
        "earliest_millis": round(float(-late.min())),
        "memory_mib": round(memory.stop()),
    }


def cancels(job: Job, control: ControlClient) -> dict[str, Any]:
    """Returns the seconds from publishing cancels to their outcomes: of single messages, and of many by due time."""
    times = []
    wanted = PendingFilter(due_from=now() + YEAR_MILLIS // 2)
    for message in Pending(job.settings, TOPIC, wanted).page(5).messages:
        began = time.perf_counter()
        outcomes = control.cancel(TOPIC, [Cancel(message.ref, message.deliver_at)], [], 60)
        assert [o.result for o in outcomes] == ["APPLIED"]
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    question = Pending(job.settings, TOPIC, PendingFilter(due_from=now() + YEAR_MILLIS // 4))
    rows = question.rows(BULK, NAMED.names)
    todo = plan(question.subscriptions, rows, Change(Action.CANCEL))
    assert sum(o.n_messages * o.is_done for o in control.run(TOPIC, todo.calls, 120)) == rows.num_rows
    seconds = time.perf_counter() - began
    return {
        "cancel_seconds": {"p50": round(float(np.median(times)), 2), "max": round(max(times), 2)},
        "bulk_cancel_by_time": {"messages": rows.num_rows, "seconds": round(seconds, 1)},
    }


def main() -> None:
    numbers = [int(n) for n in sys.argv[1:]] or [1_000_000, 10_000_000]
    runs = [measure(n) for n in numbers]
    first, last = runs[0], runs[-1]
    ratios = {
        "batch_millis_p50": last["batch_millis_p50"] / first["batch_millis_p50"],
        "late_millis_p99": last["late_millis"]["p99"] / first["late_millis"]["p99"],
        "memory": last["memory_mib"] / first["memory_mib"],
    }
    ratios = {name: round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"benchmark": "scale", "rate": RATE, "runs": runs, "last_to_first": ratios}))


if __name__ == "__main__":
    main()
