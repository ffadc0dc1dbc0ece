"""What benchmarks/peers.py compares, behind one interface: a server that is started, loaded and looked at."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from benchmarks.burst import drained
from benchmarks.on_time import late_millis
from broker.jvm.jars import cache_folder
from tests.support.service.harness import wait_until

PENDING_FROM_MILLIS, PENDING_SPREAD_MILLIS = 1_800_000, 86_400_000  # what is pending is due within a day
PAYLOAD = b"x" * 86


class NotInstalledError(Exception):
    """The system is not on this machine; the message says what is missing."""


class Peer(ABC):
    """A system that delivers messages later. `with` it runs; its topics are made as they are used."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def paced(self, rate: int, seconds: float) -> dict[str, Any]:
        """Sends messages due 5 to 10 s ahead, so many a second; returns `received` and `late_millis`."""

    @abstractmethod
    def burst(self, n: int) -> dict[str, Any]:
        """Sends messages due at one instant; returns `received` and `drained_per_second`."""

    @abstractmethod
    def pend(self, n: int) -> None:
        """Sends messages due within a day, and waits until the system has them."""

    @abstractmethod
    def cpu_seconds(self) -> float:
        """Returns the CPU time that its processes have used, without the load's."""

    @abstractmethod
    def memory_mib(self) -> float:
        """Returns what its processes hold in memory: of a JVM the heap after a full collection, else the PSS."""


def folder() -> Path:
    """Returns where `peers.py --install` puts the systems."""
    return cache_folder() / "peers"


def cpu_of(*pids: int) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def paced_figures(arrivals: np.ndarray, begin: float) -> dict[str, Any]:
    """Returns the figures of a paced load.

    Args:
        arrivals: float64 [messages, 2]: when a message came, ms since the epoch, and how late, ms.
        begin: when the first one was sent, seconds since the epoch.
    """
    at, late = arrivals.T
    return {"received": len(at), "late_millis": late_millis(late, at, begin), "earliest_millis": round(-late.min())}


def burst_figures(arrivals: np.ndarray, due: int) -> dict[str, Any]:
    """Returns the figures of messages due at one instant, ms since the epoch; arrivals as above."""
    at, late = arrivals.T
    return drained(late, at, due)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    """Waits until a server answers."""

    def answers() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, 60, f"a server on port {port}")
