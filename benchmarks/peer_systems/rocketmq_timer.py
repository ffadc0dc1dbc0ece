"""RocketMQ's timer: a name server and a broker, each a JVM; the load is one, too."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.burst import SENDING_SECONDS
from benchmarks.peer_systems import (
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
from benchmarks.pulsar_trackers import heap_of

_HERE = Path(__file__).parent / "rocketmq"
_OPENED = "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED --add-exports=java.base/sun.nio.ch=ALL-UNNAMED"
_OPENED += " --add-opens=java.base/java.nio=ALL-UNNAMED --add-opens=java.base/jdk.internal.misc=ALL-UNNAMED"
_BROKER = "-Xmx1g -XX:MaxDirectMemorySize=1g " + _OPENED
_LOADING_SECONDS = 1_800


def install() -> None:
    """Fetches the JARs, into a folder of their own."""
    command = ["mvn", "-q", "--batch-mode", "--file", str(_HERE / "pom.xml"), "dependency:copy-dependencies"]
    target = folder() / "rocketmq"
    subprocess.run([*command, "-DincludeScope=runtime", f"-DoutputDirectory={target}"], check=True)


class RocketMq(Peer):
    """A name server and a broker with its timer wheel, on ports of their own."""

    def __init__(self) -> None:
        self._jars = folder() / "rocketmq"
        if not list(self._jars.glob("rocketmq-broker-*.jar")):
            raise NotInstalledError("there are no JARs of RocketMQ")
        if shutil.which("java") is None:
            raise NotInstalledError("there is no java")
        self._folder = tempfile.TemporaryDirectory()
        self._home = Path(self._folder.name)
        (self._home / "conf").mkdir()
        names, listens = (free_port() for _ in range(2))
        self._address, self._runs = f"127.0.0.1:{names}", 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start("namesrv.NamesrvStartup", "-Xmx256m", {"listenPort": names})
        settings = {"brokerIP1": "127.0.0.1", "namesrvAddr": self._address, "listenPort": listens}
        settings |= {"storePathRootDir": self._home / "store", "autoCreateTopicEnable": "true"}
        self._start("broker.BrokerStartup", _BROKER, settings | {"timerWheelEnable": "true"})
        for port in (names, listens):
            wait_for(port)
        time.sleep(5)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._folder.cleanup()

    def paced(self, rate: int, seconds: float) -> dict[str, Any]:
        begin = time.time()
        return paced_figures(self._load(int(rate * seconds), rate, 0, 0, begin + seconds * 2 + 60), begin)

    def burst(self, n: int) -> dict[str, Any]:
        due = int((time.time() + SENDING_SECONDS) * 1000)
        return burst_figures(self._load(n, 0, due, 0, time.time() + 180), due)

    def pend(self, n: int) -> None:
        self._load(n, 0, int(time.time() * 1000) + PENDING_FROM_MILLIS, PENDING_SPREAD_MILLIS, 0)

    def cpu_seconds(self) -> float:
        return cpu_of(*(process.pid for process in self._processes))

    def memory_mib(self) -> float:
        return sum(heap_of(process.pid) for process in self._processes)

    def _start(self, main: str, options: str, settings: dict[str, Any]) -> None:
        file = self._home / "conf" / f"{main}.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = ["java", *options.split(), f"-Duser.home={self._home}", "-cp", f"{self._jars}/*"]
        with open(self._home / f"{main}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen(
                    ["env", f"ROCKETMQ_HOME={self._home}", *command, f"org.apache.rocketmq.{main}", "-c", str(file)],
                    stdout=log,
                    stderr=log,
                    cwd=self._home,
                )
            )

    def _load(self, n: int, rate: int, due: int, spread: int, until: float) -> np.ndarray:
        self._runs += 1
        out = self._home / f"arrivals{self._runs}"
        numbers = [n, rate, due, spread, int(until * 1000)]
        command = ["java", "-cp", f"{self._jars}/*", f"-Duser.home={self._home}", str(_HERE / "Load.java")]
        done = subprocess.run(
            [*command, self._address, f"run{self._runs}", *map(str, numbers), str(out)],
            capture_output=True, text=True, timeout=_LOADING_SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"RocketMQ's load: {done.stderr.strip()[:300]}")
        return np.array([line.split() for line in out.read_text().splitlines()], dtype=np.float64).reshape(-1, 2)
