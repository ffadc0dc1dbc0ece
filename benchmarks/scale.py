"""Measures the cost of pending messages: memory, time of a batch, lateness, disk, restart, rebuild, cancels, questions.

usage: scale.py [PENDING ...]                        default: 1000000 10000000
       scale.py prepare FOLDER PENDING [--payload N]
       scale.py measure FOLDER

For each number PENDING: that many messages due over a year, from tomorrow on, are imported and the checkpoint rebuilt,
as `delaylake import` does it, and the tables maintained. They have N (20) bytes of payload, half of them text, a key of
one of a million customers, and up to 100 million of them a property. They come as an export sorted by time does: file i
of n has the i-th part of the year, so that files do not overlap and maintenance has nothing to merge. One file is
written while another is imported, and removed after it: the disk holds the tables and two or three files. Where it gets
short, the import ends early.

Then the job runs with 1,000 messages a second in and out; five of the pending messages are cancelled one by one, one is
skipped by its id alone, up to a million due one after another are cancelled at once, and up to 100 million pending ones
all that have a property; the tables are asked questions; the job is killed with -9 and started again. `prepare` and
`measure` do the two halves, hours apart if need be; a `prepare` that was interrupted goes on by the same command, and
after `measure` the folder is no longer as it was prepared. Each result goes to stderr as it comes; prints one JSON
object. The job and its broker, producer and consumer share the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pulsar
from delaylake.commands import Ids

from admin.control.bulk import NAMED, Change, plan
from admin.control.client import ControlClient
from admin.dashboard.histogram import histogram
from benchmarks.on_time import NAMESPACE, WARM_UP_SECONDS, consume, produce
from benchmarks.pending_load import DAY_MILLIS, MOST_WITH_PROPERTY, YEAR_MILLIS, Load
from benchmarks.resources import Memory, Peak, answer, index_bytes, state_bytes, timed, tree_bytes
from broker.client import connect
from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.importing.files import import_file
from checkpoint_from_tables.importing.importer import Importer
from checkpoint_from_tables.new_checkpoint import import_and_rebuild
from checkpoint_from_tables.rebuild.context import Reports
from conf.settings import Settings, load_settings
from tests.support.service.harness import Job, now
from tracker.commands.kinds import CANCEL, SKIP
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import read_segment
from warehouse.queries.listing import PendingFilter
from warehouse.queries.pending_messages import Pending

RATE, SECONDS = 1_000, 80
BULK = 1_000_000
TOPIC = f"{NAMESPACE}/bench"

LEAST_FREE_BYTES = 12 << 30

# What a question may take before it is given up.
MOST_SECONDS, MOST_BYTES = 900, 9 << 30

_SPAWN = multiprocessing.get_context("spawn")


def say(found: dict[str, Any]) -> None:
    print(json.dumps(found), file=sys.stderr, flush=True)


def bring_in_and_rebuild(file: Path, load: Load, folder: Path, results: Any) -> None:
    """Imports the load, of which the files are written meanwhile, and rebuilds; puts what that took into `results`."""
    settings = load_settings(file)
    importer = Importer(settings, TOPIC)
    found: dict[str, Any] = {}
    began, peak = time.perf_counter(), Peak()

    def bring_in(tables: Tables) -> None:
        nonlocal began, peak
        importer.tables = tables
        with ProcessPoolExecutor(1, _SPAWN) as writer:
            files = [writer.submit(load.write, folder, number) for number in range(min(2, load.files))]
            for number in range(load.files):
                file = files.pop(0).result()
                if number + 2 < load.files and shutil.disk_usage(folder).free > LEAST_FREE_BYTES:
                    files.append(writer.submit(load.write, folder, number + 2))
                import_file(importer, file)
                file.unlink()
                if number % 10 == 9:
                    free = shutil.disk_usage(folder).free >> 30
                    say({"imported": asdict(importer.done), "free_gib": free, "seconds": time.perf_counter() - began})
                if not files:
                    break
        found["import"] = {"seconds": round(time.perf_counter() - began, 1), "peak_mib": peak.mebibytes()}
        say(found)
        began, peak = time.perf_counter(), Peak()

    rebuilt = import_and_rebuild(settings, True, bring_in, Reports(on_warning=lambda text: say({"": text})))
    found["rebuild"] = {"seconds": round(time.perf_counter() - began, 1), "peak_mib": peak.mebibytes()}
    done = importer.done
    assert not done.rejected, done
    assert rebuilt["pending"] == done.messages + done.already_there, (rebuilt, done)
    results.put(found | {"pending": rebuilt["pending"]})


def first_release(job: Job, client: pulsar.Client) -> float:
    """Starts the job; returns the seconds until the first message comes to the destination."""
    reader = client.create_reader(f"{TOPIC}-a", pulsar.MessageId.latest)
    began = time.perf_counter()
    starting = threading.Thread(target=job.start)
    starting.start()
    reader.read_next(600_000)
    seconds = time.perf_counter() - began
    starting.join()
    reader.close()
    return seconds


@contextmanager
def service(folder: Path) -> Iterator[tuple[EmbeddedBroker, Job, pulsar.Client]]:
    """Yields a broker whose data are in a folder, a job there that is not started, and a client; they end with it."""
    broker = EmbeddedBroker(folder / "broker")
    broker.start(port=0, http_port=0)
    job = Job(folder, broker.settings, [{"source": TOPIC, "subscriptions": [{"name": "a"}]}])
    client = connect(broker.settings)
    try:
        yield broker, job, client
    finally:
        client.close()
        job.stop()
        broker.stop()


def prepare(folder: Path, pending: int, payload: int) -> dict[str, Any]:
    """Makes a folder, or goes on with one, that `measure` takes, and returns what that took."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "load.json"
    if not file.exists():
        file.write_text(json.dumps(asdict(Load(pending, payload, now() + DAY_MILLIS))))
    load = Load(**json.loads(file.read_text()))
    if (load.pending, load.payload) != (pending, payload):
        raise SystemExit(f"{folder} was begun with {load.pending} messages of {load.payload} bytes")
    with service(folder) as (_, job, _):
        results = _SPAWN.Queue()
        child = _SPAWN.Process(target=bring_in_and_rebuild, args=(job.file, load, folder, results))
        child.start()
        found = answer(child, results, float("inf"), sys.maxsize)
        if "pending" not in found:
            raise SystemExit(f"the import has failed: {found}")
        before = index_bytes(folder)
        seconds, peak, reports = timed("--config", str(job.file), "maintain")
    say({"maintained": reports})
    after, n = index_bytes(folder), found["pending"]
    found |= {
        "payload": payload,
        "maintain": {"seconds": round(seconds, 1), "peak_mib": round(peak / 2**20)},
        "index_bytes_a_row": {name: round(size / n, 2) for name, size in after.items() if size > n / 100},
        "index_bytes_a_row_without_payload": {
            name: round(sum(size for column, size in sizes.items() if column not in ("payload", "key")) / n, 2)
            for name, sizes in (("imported", before), ("maintained", after))
        },
        "warehouse_bytes_a_row": round(tree_bytes(folder / "warehouse") / n, 2),
        "due_from": load.due_from,
    }
    (folder / "prepared.json").write_text(json.dumps(found))
    say(found)
    return found


def measure(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "prepared.json").read_text())
    if found["due_from"] < now() + DAY_MILLIS // 24:
        raise SystemExit("what is pending comes due within the hour: prepare it anew")
    say(found)

    def step(name: str, question: Callable[[], Any]) -> None:
        """Notes what a step finds; where it fails, the others follow all the same."""
        try:
            found[name] = question()
        except Exception as error:
            found[name] = {"failed": repr(error)[:500]}
        say({name: found[name]})

    with service(folder) as (broker, job, client):
        producer = client.create_producer(TOPIC)
        began = time.perf_counter()
        job.start()
        say({"ready_seconds": round(time.perf_counter() - began, 1)})
        step("steady", lambda: steady(job, broker))
        step("state_snapshot_bytes", lambda: state_bytes(folder))
        found["questions"] = {}
        for name, question in QUESTIONS.items():
            found["questions"][name] = ask(question, job.file, found)
            say({name: found["questions"][name]})
        with ControlClient(job.settings, "bench") as control:
            step("cancel_seconds", lambda: cancels(job, control, found))
            step("skip_by_id_seconds", lambda: skip_by_id(job, control, found))
            step("bulk_cancel_by_time", lambda: cancel_all(job, control, window(found, 1 / 4, BULK)))
            if found["pending"] <= MOST_WITH_PROPERTY:
                wanted = PendingFilter(properties={"campaign": "7"}, due_from=now() + YEAR_MILLIS // 2)
                step("bulk_cancel_by_property", lambda: cancel_all(job, control, wanted))
        for delay in (1_000, 100_000):
            producer.send(b"x", properties={"deliverAt": str(now() + delay)})
        time.sleep(1)
        job.kill9()
        job.stop()
        producer.send(b"y", properties={"deliverAt": str(now())})
        step("restart_to_first_release_seconds", lambda: round(first_release(job, client), 1))
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
        "received": len(at),
        "batch_millis_p50": float(np.median([p["batch_millis_p50"] for p in progress])),
        "late_millis": {f"p{p}": round(float(np.percentile(late, p)), 1) for p in (50, 99)},
        "earliest_millis": round(float(-late.min())),
        "memory_mib": round(memory.stop()),
    }


def window(found: dict[str, Any], part: float, n: int) -> PendingFilter:
    """Returns a filter for about n messages, or more, that are due one after another, from a part of the year on."""
    begin = found["due_from"] + int(part * YEAR_MILLIS)
    length = int(1.1 * n / found["pending"] * YEAR_MILLIS) + 1
    return PendingFilter(due_from=begin, due_before=begin + length)


def cancels(job: Job, control: ControlClient, found: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds from publishing the cancel of a message to its outcome."""
    times = []
    for message in Pending(job.settings, TOPIC, window(found, 1 / 2, 1_000)).page(5).messages:
        began = time.perf_counter()
        outcomes = control.send(TOPIC, CANCEL, Ids([message.ref], [message.deliver_at]), [], 120)
        assert [o.result for o in outcomes] == ["APPLIED"]
        times.append(time.perf_counter() - began)
    return {"p50": round(float(np.median(times)), 2), "max": round(max(times), 2)}


def skip_by_id(job: Job, control: ControlClient, found: dict[str, Any]) -> float:
    """Returns the seconds from publishing the skip of a message to its outcome: it does not say when that is due."""
    message = Pending(job.settings, TOPIC, window(found, 2 / 3, 1_000)).page(1).messages[0]
    began = time.perf_counter()
    outcomes = control.send(TOPIC, SKIP, Ids([message.ref]), [], 300)
    assert [o.result for o in outcomes] == ["APPLIED"]
    return round(time.perf_counter() - began, 2)


def cancel_all(job: Job, control: ControlClient, wanted: PendingFilter) -> dict[str, Any]:
    """Cancels all messages that a filter finds, up to a million; returns how many, and the seconds until it is done."""
    began = time.perf_counter()
    question = Pending(job.settings, TOPIC, wanted)
    rows = question.rows(BULK, NAMED.names)
    listed = time.perf_counter() - began
    todo = plan(question.subscriptions, rows, Change(CANCEL))
    assert sum(o.n_messages * o.is_done for o in control.run(TOPIC, todo.calls, 120)) == rows.num_rows
    seconds = time.perf_counter() - began
    return {"messages": rows.num_rows, "seconds": round(seconds, 1), "listing_seconds": round(listed, 1)}


def ask(question: Callable[[Settings, dict[str, Any]], object], file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a question takes and finds, in a process of its own, which is killed where that is too much."""
    results = _SPAWN.Queue()
    child = _SPAWN.Process(target=_ask, args=(question, file, found, results))
    child.start()
    return answer(child, results, MOST_SECONDS, MOST_BYTES)


def _ask(
    question: Callable[[Settings, dict[str, Any]], object], file: Path, found: dict[str, Any], results: Any
) -> None:
    settings = load_settings(file)
    began, peak = time.perf_counter(), Peak()
    value = question(settings, found)
    seconds = round(time.perf_counter() - began, 2)
    results.put({"seconds": seconds, "found": value, "peak_mib": peak.mebibytes()})


def windows_of_a_second(settings: Settings, found: dict[str, Any]) -> dict[str, float]:
    tables = Tables(settings.warehouse)
    version = tables.version("delayed_index")
    times, rows = [], []
    for start in np.random.default_rng(3).integers(found["due_from"], found["due_from"] + YEAR_MILLIS, 20).tolist():
        began = time.perf_counter()
        rows.append(read_segment(tables, version, start, start + 1_000).num_rows)
        times.append((time.perf_counter() - began) * 1_000)
    return {"millis_p50": round(float(np.median(times)), 1), "max": round(max(times), 1), "rows_p50": np.median(rows)}


def histogram_of_a_day(settings: Settings, found: dict[str, Any]) -> int:
    start = found["due_from"] + 100 * DAY_MILLIS
    return int(histogram(settings, TOPIC, None, "day", start, None).counts.sum())


def page(settings: Settings, found: dict[str, Any]) -> int:
    return len(Pending(settings, TOPIC).page(100).messages)


def page_by_key(settings: Settings, found: dict[str, Any]) -> int:
    return len(Pending(settings, TOPIC, PendingFilter(key="customer-77")).page(100).messages)


def count(settings: Settings, found: dict[str, Any]) -> int:
    return Pending(settings, TOPIC).count()


def stats(settings: Settings, found: dict[str, Any]) -> int:
    return int(Pending(settings, TOPIC).stats()["messages"])


# Those that read little first. They come before the cancels, which leave rows that each has to look at.
QUESTIONS: dict[str, Callable[[Settings, dict[str, Any]], object]] = {
    "read_20_windows_of_a_second": windows_of_a_second,
    "histogram_of_a_day": histogram_of_a_day,
    "page_of_100": page,
    "page_by_key": page_by_key,
    "count": count,
    "stats": stats,
}


def both(pending: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), pending, 20)
        return measure(Path(name))


def main() -> None:
    if sys.argv[1:2] == ["prepare"] or sys.argv[1:2] == ["measure"]:
        parser = argparse.ArgumentParser(prog="scale.py")
        commands = parser.add_subparsers(dest="command", required=True)
        preparing = commands.add_parser("prepare")
        preparing.add_argument("folder", type=Path)
        preparing.add_argument("pending", type=int)
        preparing.add_argument("--payload", type=int, default=20)
        commands.add_parser("measure").add_argument("folder", type=Path)
        arguments = parser.parse_args()
        folder = arguments.folder.absolute()
        if arguments.command == "prepare":
            result = prepare(folder, arguments.pending, arguments.payload)
        else:
            result = measure(folder)
        print(json.dumps({"benchmark": "scale", "rate": RATE, arguments.command: result}))
        return
    numbers = [int(n) for n in sys.argv[1:]] or [1_000_000, 10_000_000]
    runs = [both(n) for n in numbers]
    first, last = (run["steady"] for run in (runs[0], runs[-1]))
    ratios = {
        "batch_millis_p50": last["batch_millis_p50"] / first["batch_millis_p50"],
        "late_millis_p99": last["late_millis"]["p99"] / first["late_millis"]["p99"],
        "memory": last["memory_mib"] / first["memory_mib"],
    }
    ratios = {name: round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"benchmark": "scale", "rate": RATE, "runs": runs, "last_to_first": ratios}))


if __name__ == "__main__":
    main()
