"""NATS JetStream, whose messages have a schedule in a header; read by a JetStream consumer."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psutil

from benchmarks.burst import SENDING_SECONDS
from benchmarks.peer_systems import (
    PAYLOAD,
    PENDING_FROM_MILLIS,
    PENDING_SPREAD_MILLIS,
    NotInstalledError,
    Peer,
    burst_figures,
    cpu_of,
    folder,
    free_port,
    paced_figures,
    wait_for,
)

STREAM = {"name": "S", "subjects": ["sched.>", "out.>"], "allow_msg_schedules": True, "storage": "file"}
PACKAGES = {"nats-server": "github.com/nats-io/nats-server/v2@v2.15.2", "nats-py": "nats-py==2.16.0"}
MOST_UNCONFIRMED = 20_000


def install() -> None:
    """Fetches server and client, into a folder of their own."""
    go = ["env", f"GOBIN={folder() / 'bin'}", "go", "install", PACKAGES["nats-server"]]
    subprocess.run(go, check=True)
    target = str(folder() / "python")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", target, PACKAGES["nats-py"]], check=True)


def client() -> Any:
    """Returns the module of the client.

    Raises:
        NotInstalledError: it is not there.
    """
    if (own := str(folder() / "python")) not in sys.path:
        sys.path.append(own)
    try:
        return importlib.import_module("nats")
    except ImportError as error:
        raise NotInstalledError("nats-py is not installed") from error


class Nats(Peer):
    """A server with one stream, on disk."""

    def __init__(self) -> None:
        program = shutil.which("nats-server", path=str(folder() / "bin")) or shutil.which("nats-server")
        if program is None:
            raise NotInstalledError("nats-server is not on the PATH")
        client()
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self._url = f"nats://127.0.0.1:{port}"
        self._server = subprocess.Popen(
            [program, "-js", "-sd", self._folder.name, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
        )
        self._runs = 0
        wait_for(port)
        asyncio.run(_make_stream(self._url))

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait()
        self._folder.cleanup()

    def paced(self, rate: int, seconds: float) -> dict[str, Any]:
        begin, arrivals = self._load(int(rate * seconds), rate, 0, 0, time.time() + seconds * 2 + 60)
        return paced_figures(arrivals, begin)

    def burst(self, n: int) -> dict[str, Any]:
        due = int((time.time() + SENDING_SECONDS) * 1000)
        _, arrivals = self._load(n, 0, due, 0, time.time() + 180)
        return burst_figures(arrivals, due)

    def pend(self, n: int) -> None:
        due = int(time.time() * 1000) + PENDING_FROM_MILLIS
        asyncio.run(_send(self._url, "pending", n, 0, due, PENDING_SPREAD_MILLIS))

    def cpu_seconds(self) -> float:
        return cpu_of(self._server.pid)

    def memory_mib(self) -> float:
        return float(psutil.Process(self._server.pid).memory_full_info().pss) / 2**20

    def _load(self, n: int, rate: int, due: int, spread: int, until: float) -> tuple[float, np.ndarray]:
        """Sends and receives in processes of their own; returns when the first was sent, and what came."""
        self._runs += 1
        results: Any = multiprocessing.Queue()
        name = f"run{self._runs}"
        receiver = multiprocessing.Process(target=_receiving, args=(self._url, name, n, until, results))
        receiver.start()
        results.get()
        begin = time.time()
        sender = multiprocessing.Process(target=_sending, args=(self._url, name, n, rate, due, spread))
        sender.start()
        arrivals: np.ndarray = results.get()
        sender.join()
        receiver.join()
        return begin, arrivals


async def _make_stream(url: str) -> None:
    connection = await client().connect(url)
    answer = await connection.request("$JS.API.STREAM.CREATE.S", json.dumps(STREAM).encode(), timeout=30)
    if error := json.loads(answer.data).get("error"):
        raise NotInstalledError(f"nats-server has no schedules: {error}")
    await connection.close()


def _sending(url: str, name: str, n: int, rate: int, due: int, spread: int) -> None:
    asyncio.run(_send(url, name, n, rate, due, spread))


async def _send(url: str, name: str, n: int, rate: int, due: int, spread: int) -> None:
    """Sends n messages, at most `rate` a second if that is not 0; due at `due`, or 5 to 10 s ahead if that is 0."""
    connection = await client().connect(url, pending_size=64 << 20)
    stream, begin = connection.jetstream(publish_async_max_pending=MOST_UNCONFIRMED), time.time()
    for i in range(n):
        while rate and time.time() < begin + i / rate:
            await asyncio.sleep(0.002)
        at = due + random.randint(0, spread) if due else int((time.time() + random.uniform(5, 10)) * 1000)
        when = datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        headers = {"Nats-Schedule": f"@at {when}", "Nats-Schedule-Target": f"out.{name}"}
        await stream.publish_async(f"sched.{name}.{i}", b"%d %b" % (at, PAYLOAD), headers=headers)
    await stream.publish_async_completed()
    await connection.close()


def _receiving(url: str, name: str, n: int, until: float, results: Any) -> None:
    asyncio.run(_receive(url, name, n, until, results))


async def _receive(url: str, name: str, n: int, until: float, results: Any) -> None:
    arrivals: list[tuple[float, float]] = []

    async def take(message: Any) -> None:
        at = time.time() * 1000
        arrivals.append((at, at - int(message.data.split(b" ", 1)[0])))

    connection = await client().connect(url)
    api = importlib.import_module("nats.js.api")
    config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, deliver_policy=api.DeliverPolicy.ALL)
    await connection.jetstream().subscribe(
        f"out.{name}", stream="S", cb=take, config=config, pending_msgs_limit=10**7, pending_bytes_limit=10**9
    )
    results.put("ready")
    while len(arrivals) < n and time.time() < until:
        await asyncio.sleep(0.2)
    await connection.close()
    results.put(np.array(arrivals).reshape(-1, 2))
