"""Runs the job as a user runs it, and collects what comes to the destinations."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pulsar
import pyarrow as pa
import yaml
from deltalake import DeltaTable, QueryBuilder

from conf.settings import PulsarSettings, Settings, load_settings
from jobs.demo.consumers import SteadyClock
from tests.conftest import PROGRAM, RUN_SECONDS, run_here

START_SECONDS = 100

# A machine may be many times slower for a while: what only fails later costs nothing.
PATIENCE = 5

http = httpx.Client(timeout=90)
atexit.register(http.close)

# A job's start on two cores that three of them share, in seconds.
_USUAL_START_SECONDS = 24


_started: weakref.WeakSet[Job] = weakref.WeakSet()  # jobs that were not stopped: a wait in vain reports on them


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Waits until a condition gives something true, and returns that.

    Args:
        seconds: what it may take on a machine with two busy cores. A slower one gets PATIENCE times as long.
    """
    seconds *= PATIENCE
    begin = asked = time.monotonic()
    while asked < begin + seconds:
        if value := condition():
            return value
        # Some conditions take longer to look at than what is waited for takes to come.
        took = time.monotonic() - asked
        time.sleep(max(0.2, min(3 * took, 5)))
        asked = time.monotonic()
    reports = "\n\n".join(job.report() for job in list(_started))
    raise AssertionError(f"not within {seconds:.0f} s: {what}\n{reports}")


def now() -> int:
    return time.time_ns() // 1_000_000


class Job:
    """`delaylake run` in a process group of its own, on settings, tables and a checkpoint in a folder."""

    def __init__(self, folder: Path, pulsar_settings: PulsarSettings, routes: list[dict[str, Any]], **sections: Any):
        self.folder = folder
        self.file = folder / "settings.yaml"
        control = f"{routes[0]['source']}_control"
        content = {
            "pulsar": {"service_url": pulsar_settings.service_url, "admin_url": pulsar_settings.admin_url},
            "control": {"topic": control, "outcome_topic": f"{control}_outcomes"},
            "warehouse": f"file:{folder}/warehouse",
            "checkpoint": f"file:{folder}/checkpoint",
            "routes": routes,
            "api": {"answer_timeout_millis": 60_000},
            **sections,
        }
        self.file.write_text(yaml.safe_dump(content))
        self.process: subprocess.Popen[str] | None = None
        self.progress: list[dict[str, Any]] = []
        self._routes = routes
        self._pulsar_settings = pulsar_settings
        self.pace = 1.0  # how much slower this machine is than usual: what tests the time left gives it so much more

    @property
    def settings(self) -> Settings:
        return load_settings(self.file)

    @property
    def log(self) -> str:
        return "\n".join(f.read_text(errors="replace")[-6000:] for f in (self.folder / "job.log",) if f.exists())

    def start(self, program: Sequence[str] = (str(PROGRAM),), is_standby: bool = False) -> Job:
        """Starts the job, and waits until it is ready, or could take over."""
        started = time.monotonic()
        _started.add(self)
        with open(self.folder / "job.log", "a") as log:
            self.process = subprocess.Popen(
                [*program, "--config", str(self.file), "run", "--output", "json", "--report-every", "1"]
                + ["--standby"] * is_standby,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.ready = is_ready = threading.Event()
        stands_by = threading.Event()
        process = self.process

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if not line.startswith("{"):
                        continue  # spark-submit has the log here, too
                    event = json.loads(line)
                    if event["event"] == "ready":
                        is_ready.set()
                    elif event["event"] == "standby":
                        stands_by.set()
                    else:
                        self.progress.append(event)

        threading.Thread(target=read, daemon=True).start()
        wait_until(
            lambda: is_ready.is_set() or stands_by.is_set() or process.poll() is not None,
            START_SECONDS,
            f"ready\n{self.log}",
        )
        assert process.poll() is None, self.log
        self.pace = max(1.0, (time.monotonic() - started) / _USUAL_START_SECONDS)
        return self

    def command(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs another command on its settings, in this process."""
        return run_here("--config", str(self.file), *arguments, stdin=stdin)

    def rebuild(self) -> None:
        """Runs `delaylake rebuild`, instead of any checkpoint."""
        command = [str(PROGRAM), "--config", str(self.file), "rebuild", "--discard-checkpoint"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert done.returncode == 0, done.stderr
        print(done.stderr, flush=True)  # its warnings

    def kill9(self) -> None:
        """Kills the driver alone, as the kernel would."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def jvm(self) -> psutil.Process:
        """Spark's JVM."""
        return next(one for one in self.children() if one.name() == "java")

    def source_process(self) -> psutil.Process:
        """The process of the source, without which the query fails."""
        alive = [one for one in self.jvm().children() if one.status() != psutil.STATUS_ZOMBIE]  # some only planned
        return next(one for one in alive if "python_streaming_source_runner" in one.cmdline()[-1])

    def terminate(self) -> int:
        """Sends SIGTERM, and returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=RUN_SECONDS)

    def stop(self) -> None:
        """Ends whatever is left of it."""
        _started.discard(self)
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and has not ended."""
        return self.process is not None and self.process.poll() is None

    def report(self) -> str:
        """Returns what the job, its processes and the broker say now, for the message of a test that fails."""
        assert self.process is not None
        end = self.process.poll()
        said = [f"The job of {self.folder} {'runs' if end is None else f'has ended with {end}'}."]
        parts: dict[str, Callable[[], str]] = {
            "stacks are in the logs of": self._print_stacks,
            "progress": lambda: json.dumps(self.progress[-1:]),
            "status": lambda: self.command("status", "--output", "json").stdout[-8_000:],
            "topics": lambda: "\n".join(self._topic_stats()),
            "job.log": lambda: (self.folder / "job.log").read_text(errors="replace")[-20_000:],
            "spark.log": lambda: (self.folder / "checkpoint" / "spark.log").read_text(errors="replace")[-20_000:],
        }
        for title, look in parts.items():
            try:
                said.append(f"--- {title}: {look()}")
            except Exception as error:  # what else there is to say is said
                said.append(f"--- {title}: {type(error).__name__}: {error}")
        return "\n".join(said)

    def _print_stacks(self) -> str:
        """Lets its Python processes print what each of their threads does; returns which do."""
        assert self.process is not None
        asked = []
        for process in [psutil.Process(self.process.pid), *self.children()]:
            with contextlib.suppress(psutil.Error, OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
                if caught >> (signal.SIGUSR1 - 1) & 1 and process.name() != "java":
                    process.send_signal(signal.SIGUSR1)
                    asked.append(process.pid)
        time.sleep(2)  # until they have: nothing says when
        return str(asked)

    def _topic_stats(self) -> Iterator[str]:
        """Yields a line for each topic of the routes: what the broker counts of it."""
        sources = [route["source"] for route in self._routes]
        names = [f"{route['source']}-{s['name']}" for route in self._routes for s in route["subscriptions"]]
        with httpx.Client(base_url=self._pulsar_settings.admin_url, timeout=10) as admin:
            for topic in (*sources, *names):
                answer = admin.get(f"/admin/v2/{topic.replace('://', '/')}/stats")
                stats = answer.json() if answer.status_code == 200 else {}
                counts = ("msgBacklog", "msgOutCounter", "unackedMessages")
                subscriptions = {
                    name: {count: one.get(count) for count in counts}
                    | {"permits": [consumer.get("availablePermits") for consumer in one["consumers"]]}
                    for name, one in stats.get("subscriptions", {}).items()
                }
                yield f"{topic}: {answer.status_code}, came {stats.get('msgInCounter')}, {subscriptions}"

    def rows(self, table: str, sql: str = "SELECT * FROM {table}") -> list[dict[str, Any]]:
        """Rows of a table, by delta-rs."""
        builder = QueryBuilder().register(table, DeltaTable(str(self.folder / "warehouse" / table)))
        return pa.table(builder.execute(sql.format(table=table)).read_all()).to_pylist()


class Api:
    """`delaylake api` as a process, on a settings file and any free port."""

    def __init__(self, file: Path) -> None:
        self._log = open(file.with_name("api.log"), "a+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(PROGRAM), "--config", str(file), "api", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.log

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def stop(self) -> int:
        """Ends it with SIGTERM; returns the exit status."""
        self.process.terminate()
        return self._end()

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def _end(self) -> int:
        status = self.process.wait(timeout=RUN_SECONDS)
        self._log.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@dataclass(frozen=True)
class Received:
    payload: bytes
    key: str
    ordering_key: str
    event_time: int
    properties: dict[str, str]
    published_at: int
    received_at: int
    is_null: bool
    topic: str


class Collector:
    """Consumes topics in threads, from their beginning.

    What a broker that crashed sends again, because it lost an acknowledgement, counts once: it is the same message.
    """

    def __init__(self, client: pulsar.Client) -> None:
        self._client = client
        self._clock = SteadyClock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.received: dict[str, list[Received]] = defaultdict(list)

    def collect(self, topic: str) -> Collector:
        consumer = self._client.subscribe(
            topic, "collector", initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=2000
        )
        thread = threading.Thread(target=self._run, args=(consumer, topic), daemon=True)
        thread.start()
        self._threads.append(thread)
        return self

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self, consumer: pulsar.Consumer, topic: str) -> None:
        seen = set()
        while not self._stopped.is_set():
            try:
                message = consumer.receive(300)
            except pulsar.Timeout:
                continue
            except pulsar.PulsarException as error:
                if not self._stopped.is_set():
                    print(f"{topic} is not collected any more: {error!r}", flush=True)
                return
            try:
                consumer.acknowledge(message)
            except pulsar.PulsarException as error:  # it comes again, and counts once
                print(f"{topic}: {error!r}", flush=True)
            position = str(message.message_id()), message.topic_name()
            if position in seen:
                continue
            seen.add(position)
            self.received[topic].append(
                Received(
                    message.data(),
                    message.partition_key(),
                    message.ordering_key(),
                    message.event_timestamp(),
                    message.properties(),
                    message.publish_timestamp(),
                    self._clock.now(),
                    message.has_null_value(),
                    message.topic_name(),
                )
            )
        consumer.close()


class NotExactlyOnceError(AssertionError):
    """Messages were lost, came twice or too early. `make test-long` runs no such test once more: see the Makefile."""


def check_exactly_once(sent: dict[str, int], received: list[Received]) -> None:
    """Checks that each payload came once, and none before its time.

    Args:
        sent: by payload, when it is due, ms since the epoch.

    Raises:
        NotExactlyOnceError: it did not.
    """
    counts: dict[str, int] = defaultdict(int)
    for message in received:
        counts[message.payload.decode()] += 1
    lost = [payload for payload in sent if not counts[payload]]
    doubled = [payload for payload, n in counts.items() if n > 1]
    early = [
        m.payload.decode() for m in received if min(m.published_at, m.received_at) < sent.get(m.payload.decode(), 0)
    ]
    unexpected = [payload for payload in counts if counts[payload] and payload not in sent]
    wrong = {"lost": lost, "doubled": doubled, "early": early, "unexpected": unexpected}
    if any(wrong.values()):
        raise NotExactlyOnceError({what: (len(found), found[:5]) for what, found in wrong.items()})
