"""The embedded broker: a real Pulsar standalone in a separate process, for development, demos and tests."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from broker.client import PulsarError
from broker.jvm.class_archive import archive_options, make_archive
from broker.jvm.jars import CONF, JarSet, jars
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError
from conf.settings import PulsarSettings

HOST = "127.0.0.1"

# The oldest version of the JDK for Spark 4.
OLDEST_JAVA = 17

# How long a start or a stop may take, in seconds, before it counts as failed.
START_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 20.0

# BookKeeper's setting, and its default: with a larger share of the disk in use it takes no writes.
_DISK_SETTING, _DISK_SHARE = "diskUsageThreshold", 0.95

_CLAIM_SECONDS = 1.0  # how long a start waits for a port
POLL_SECONDS = 0.05

# Below the ports of outgoing connections, which could take the port while the broker restarts.
FREE_PORTS = range(20_000, 32_000)

# As in Pulsar's own start script, but with the quick compiler only (on 2 cores: up in 4.2 s rather than 5.6 s, 50,000
# sends a second rather than 40,000, also when warm), and with a collector that does not pause: the serial one would for
# 40 to 100 ms every few seconds at 3,000 messages a second.
JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-Xmx512m",
    "-XX:MaxDirectMemorySize=512m",
    "-XX:+IgnoreUnrecognizedVMOptions",  # few JDKs are without it
    "-XX:+UseZGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djute.maxbuffer=10485760",
    "-Djava.net.preferIPv4Stack=true",
    "-Dio.netty.tryReflectionSetAccessible=true",
    # A path, and not a name in the class path: a class path with a folder can't have an archive.
    f"-Dlog4j2.configurationFile={CONF / 'broker' / 'log4j2.xml'}",
    "-Dlog4j2.is.webapp=false",
    "-Dlog4j.shutdownHookEnabled=false",
    "-Dbookkeeper.metadata.bookie.drivers=org.apache.pulsar.metadata.bookkeeper.PulsarMetadataBookieDriver",
    "-Dbookkeeper.metadata.client.drivers=org.apache.pulsar.metadata.bookkeeper.PulsarMetadataClientDriver",
    "--add-opens=java.base/java.io=ALL-UNNAMED",
    "--add-opens=java.base/java.util.zip=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-opens=java.base/sun.net=ALL-UNNAMED",
    "--add-opens=java.management/sun.management=ALL-UNNAMED",
)


class BrokerError(DelayLakeError):
    """The embedded broker can't be started or stopped."""


@dataclass(frozen=True)
class BrokerStatus:
    """The state of a broker: `stopped` (without URLs), `starting` (its process runs) or `ready`."""

    state: str
    data_dir: str
    pid: int | None = None
    service_url: str | None = None
    admin_url: str | None = None


@dataclass(frozen=True)
class _Process:
    """The content of the state file.

    Attributes:
        pid: the id of the broker's process.
        started_at: the start time of the process, seconds since the epoch: its id may be used again by another one.
        port: port of the service URL.
        http_port: port of the admin URL.
    """

    pid: int
    started_at: float
    port: int
    http_port: int

    @property
    def settings(self) -> PulsarSettings:
        return PulsarSettings(service_url=f"pulsar://{HOST}:{self.port}", admin_url=f"http://{HOST}:{self.http_port}")


class EmbeddedBroker:
    """The Pulsar standalone with its data in `data_dir`.

    The broker outlives the Python process that starts it; others find it by `data_dir/broker.json`. Data are kept
    between starts, also after a crash. Not for production: one node, one copy, no authentication, local clients only.

    Args:
        data_dir: the folder of its data, created at the first start.
        conf: settings of Pulsar besides those of conf/broker/standalone.conf.
        jar_set: its JARs; another set than the default may be another version of Pulsar.

    Example:
        >>> broker = EmbeddedBroker(Path(".delaylake/broker"))
        >>> broker.start(port=0, http_port=0).service_url
        'pulsar://127.0.0.1:40213'
        >>> broker.stop()
    """

    def __init__(self, data_dir: Path, conf: Mapping[str, str] | None = None, jar_set: JarSet = "broker") -> None:
        self._conf = conf or {}
        self._jar_set = jar_set
        self.data_dir = data_dir.absolute()
        self.log_file = self.data_dir / "broker.log"
        self._state_file = self.data_dir / "broker.json"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> PulsarSettings:
        """The `pulsar` section of the settings for this broker.

        Raises:
            BrokerError: the broker does not run.
        """
        process = self._running()
        if process is None:
            raise BrokerError(f"no broker runs on {self.data_dir}: start it with delaylake broker start")
        return process.settings

    def start(self, port: int = 6650, http_port: int = 8080, wait: bool = True) -> BrokerStatus:
        """Starts the broker.

        Args:
            port: port of the service URL, on 127.0.0.1; 0: any free one.
            http_port: port of the admin URL; 0: any free one.
            wait: whether to return only when the broker takes messages, and not when its process runs.

        Raises:
            BrokerError: it runs already, a port is taken, there is no JDK, the disk is too full for BookKeeper, or the
                broker ended or did not get ready.
            JarsError: its JARs are not there and can't be fetched.
        """
        java = _java()
        folder = jars(self._jar_set)
        for_archive = [option for option in JVM_OPTIONS if not option.startswith("-D")]
        options = [*JVM_OPTIONS, *archive_options("broker", Path(java), folder.glob("*.jar"), for_archive)]
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(self.data_dir / "broker.lock", timeout=0):
                process = self._launch([java, *options, "-cp", f"{folder}/*"], port, http_port)
        except Timeout as error:
            raise BrokerError(f"another start of the broker on {self.data_dir} is under way") from error
        except OSError as error:
            raise BrokerError(f"can't write to {self.data_dir}: {error.strerror}") from error
        if wait:
            self._wait_until_ready(process)
        make_archive(process.pid)
        return self.status()

    def stop(self) -> bool:
        """Stops the broker, if it runs, by SIGTERM, or by SIGKILL if that takes too long; returns whether it ran.

        Raises:
            BrokerError: its process belongs to another user.
        """
        process = self._running()
        if process is not None:
            self._signal(process.pid, signal.SIGTERM)
            if not self._wait_until_gone(process.pid):
                self._signal(process.pid, signal.SIGKILL)
                self._wait_until_gone(process.pid)
        self._state_file.unlink(missing_ok=True)
        return process is not None

    def kill(self) -> None:
        """Kills the broker with SIGKILL, if it runs, as a crash would. The state file stays."""
        process = self._running()
        if process is not None:
            self._signal(process.pid, signal.SIGKILL)
            self._wait_until_gone(process.pid)

    def status(self) -> BrokerStatus:
        """Returns the broker's state, process id and URLs now."""
        process = self._running()
        if process is None:
            return BrokerStatus("stopped", str(self.data_dir))
        settings = process.settings
        with AdminClient(settings) as admin:
            state = "ready" if _is_ready(admin) else "starting"
        return BrokerStatus(state, str(self.data_dir), process.pid, settings.service_url, settings.admin_url)

    def wait(self) -> None:
        """Waits until the broker's process has ended."""
        process = self._running()
        while process is not None and _is_alive(process.pid):
            self._reap()
            time.sleep(POLL_SECONDS)

    def _launch(self, jvm: Sequence[str], port: int, http_port: int) -> _Process:
        running = self._running()
        if running is not None:
            raise BrokerError(
                f"the broker already runs on {self.data_dir} (process {running.pid}, {running.settings.service_url})"
            )
        self._check_disk()
        port = _claim("--port", port)
        http_port = _claim("--http-port", http_port)
        conf = self.data_dir / "standalone.conf"
        base = (CONF / "broker" / "standalone.conf").read_text()
        own = {**self._conf, "brokerServicePort": port, "webServicePort": http_port}
        conf.write_text("\n".join([base, *(f"{name}={value}" for name, value in own.items()), ""]))
        arguments = ["-c", str(conf), "-a", HOST, "-nss", "-nfw", "--bookkeeper-port", str(_claim("bookie", 0))]
        folders = [
            "--bookkeeper-dir",
            str(self.data_dir / "bookkeeper"),
            "--metadata-dir",
            str(self.data_dir / "metadata"),
        ]
        temporary = self.data_dir / "tmp"  # libraries that the JVM unpacks, also of brokers that were killed
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                [
                    *jvm,
                    f"-Djava.io.tmpdir={temporary}",
                    "org.apache.pulsar.PulsarStandaloneStarter",
                    *arguments,
                    *folders,
                ],
                cwd=self.data_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return self._record(self._child.pid, port, http_port)
        except BaseException:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            raise

    def _check_disk(self) -> None:
        """Checks that BookKeeper will take writes: else the broker starts, never gets ready, and does not say why."""
        disk, most = shutil.disk_usage(self.data_dir), float(self._conf.get(_DISK_SETTING, _DISK_SHARE))
        used = 1 - disk.free / disk.total
        if used > most:
            raise BrokerError(
                f"the disk of {self.data_dir} is {used:.1%} full, and with more than {most:.0%} BookKeeper takes no "
                f"writes ({_DISK_SETTING}): make room, or choose a folder on another disk"
            )

    def _record(self, pid: int, port: int, http_port: int) -> _Process:
        process = _Process(pid, psutil.Process(pid).create_time(), port, http_port)
        partial = self._state_file.with_suffix(".json.partial")
        partial.write_text(json.dumps(asdict(process)))
        partial.replace(self._state_file)
        return process

    def _wait_until_ready(self, process: _Process) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        with AdminClient(process.settings) as admin:
            while not _is_ready(admin):
                self._reap()
                if not _is_alive(process.pid):
                    raise BrokerError(f"the broker ended at its start: {self._last_words()} (see {self.log_file})")
                if time.monotonic() > deadline:
                    self.stop()
                    raise BrokerError(
                        f"the broker was not ready within {START_TIMEOUT_SECONDS:.0f} s: {self._last_words()} "
                        f"(see {self.log_file})"
                    )
                time.sleep(POLL_SECONDS)

    def _running(self) -> _Process | None:
        self._reap()
        try:
            process = _Process(**json.loads(self._state_file.read_text()))
            started_at = psutil.Process(process.pid).create_time()
        except (OSError, ValueError, TypeError, psutil.Error):
            return None
        ours = abs(started_at - process.started_at) < 1 and _is_alive(process.pid)
        return process if ours else None

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    def _signal(self, pid: int, number: signal.Signals) -> None:
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise BrokerError(f"the broker's process {pid} belongs to another user") from error

    def _wait_until_gone(self, pid: int) -> bool:
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while _is_alive(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        if self._child is not None:
            self._child.wait(STOP_TIMEOUT_SECONDS)  # a process looks dead as soon as its first thread has ended
            self._child = None
        return True

    def _last_words(self) -> str:
        """Returns the log's last line that names an error, else its last line."""
        try:
            lines = [line.strip() for line in self.log_file.read_text(errors="replace").splitlines()[-400:]]
        except OSError:
            return "it left no log"
        lines = [line for line in lines if line and not line.startswith(("at ", "... "))]
        errors = [line for line in lines if re.search(r"\b(ERROR|Caused by|\w*Exception|Error)\b", line)]
        return (errors or lines or ["its log is empty"])[-1]


def _is_ready(admin: AdminClient) -> bool:
    """Whether the broker takes messages. Its health says so too early: before the namespace has been created."""
    try:
        return "public/default" in admin.namespaces("public") and admin.health()
    except PulsarError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _claim(name: str, port: int) -> int:
    """Returns the port, or a free one for 0. Connections of a past broker (TIME_WAIT) do not count.

    Args:
        name: the option that sets the port, for the error.
        port: the wanted port.


    Raises:
        BrokerError: the port is in use.
    """
    if port == 0:
        return next(p for p in iter(lambda: random.choice(FREE_PORTS), None) if _is_free(p))
    # The threads of a killed process may hold its sockets for a moment longer.
    deadline = time.monotonic() + _CLAIM_SECONDS
    while not _is_free(port) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if not _is_free(port):
        raise BrokerError(f"port {port} is in use: choose another with {name}, or 0 for any free one")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        where = f"under JAVA_HOME ({home})" if home else "on the PATH"
        raise BrokerError(f"no java {where}: install a JDK {OLDEST_JAVA} or newer")
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', shown)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise BrokerError(
            f"{java} is {shown.splitlines()[0] if shown else 'broken'}: install a JDK {OLDEST_JAVA} or newer"
        )
    return java
