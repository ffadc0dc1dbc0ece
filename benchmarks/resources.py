"""What processes and folders take: seconds, memory, bytes on disk."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.conftest import PROGRAM
from tests.support.service.harness import Job


def timed(*arguments: str) -> tuple[float, int, Any]:
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


def index_bytes(folder: Path) -> dict[str, int]:
    """Returns the compressed size of the columns of delayed_index, bytes."""
    table = DeltaTable(str(folder / "warehouse" / "delayed_index"))
    sizes: dict[str, int] = {}
    for path in table.file_uris():
        metadata = pq.read_metadata(path)
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            for column in (group.column(i) for i in range(group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                sizes[name] = sizes.get(name, 0) + column.total_compressed_size
    return sizes


def tree_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Peak:
    """The peak resident memory of this process since this was made, MiB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024


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


def answer(child: Any, results: Any, most_seconds: float, most_bytes: int) -> dict[str, Any]:
    """Returns what a process puts into `results`, or why it was killed or ended without."""
    began = time.monotonic()
    watched = psutil.Process(child.pid)
    while True:
        try:
            found: dict[str, Any] = results.get(timeout=0.5)
            child.join()
            return found
        except queue.Empty:
            pass
        if not child.is_alive():
            return {"failed": f"exit status {child.exitcode}"}
        seconds = time.monotonic() - began
        try:
            resident = watched.memory_info().rss
        except psutil.Error:
            continue
        if seconds > most_seconds or resident > most_bytes:
            child.kill()
            child.join()
            return {"given up after seconds": round(seconds), "mib": resident >> 20}
