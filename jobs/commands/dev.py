"""`delaylake dev`: a broker, the job and the API in one terminal, until SIGINT or SIGTERM."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlparse

import typer

from conf.errors import DelayLakeError, printable
from jobs.commands.broker import DEFAULT_DATA_DIR, StopAskedError, ask_to_stop
from jobs.options import Output, OutputOption, global_options, show

if TYPE_CHECKING:
    from broker.standalone import EmbeddedBroker
    from conf.settings import Settings
    from jobs.child_service import ChildService

_LAST_LINES = 10
_POLL_SECONDS = 0.2  # a signal is handled only between two calls
# So that `consume` shows what has arrived before, and that nothing is said of what a rebuild needs.
_BROKER_CONF = {"defaultRetentionTimeInMinutes": "60", "defaultRetentionSizeInMB": "256"}
_LOOPBACK = ("127.0.0.1", "localhost")
_FOLDER = Path(".delaylake/dev")


class DevError(DelayLakeError):
    """What `dev` runs can't be started, or has ended. The lines after the first are the last ones of its log."""

    @property
    def lines(self) -> list[str]:
        """The message as lines."""
        return [printable(line) for line in str(self).splitlines()]


def _ask_to_stop_once(number: int, frame: object) -> None:
    # The second one, while all is being stopped, ends the process: its guard kills what is left.
    signal.signal(number, signal.SIG_DFL)
    ask_to_stop(number, frame)


def dev(
    context: typer.Context,
    ephemeral: Annotated[
        bool,
        typer.Option(
            "--ephemeral", help="On free ports and in a temporary folder, which is removed at the end with all in it."
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="The API's port; by default the setting api.port, with --ephemeral any free one.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a broker, the job and the API until SIGINT or SIGTERM. For development: everything on this machine alone.

    The routes are those of the settings. Without --ephemeral the broker listens where the settings look for it, and
    all data are kept in .delaylake: other commands need no further options. Whatever ends this process, nothing that
    it has started is left running.

    With --output json it prints {"event": "ready", "broker": ..., "admin": ..., "api": ..., "config": ...}. The last
    one is the settings file for other commands.
    """
    from jobs.dev.guard import Guard

    options = global_options(context)
    settings = options.settings
    if not settings.routes:
        raise DevError("no routes in the settings: name at least one source topic under `routes`")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ask_to_stop_once)
    temporary = Path(tempfile.mkdtemp(prefix="delaylake-dev-")) if ephemeral else None
    try:
        with Guard(temporary):
            if temporary is not None:
                _Development(temporary, output).run_ephemeral(settings, port or 0)
            else:
                _Development(_FOLDER, output).run(settings, settings.api.port if port is None else port)
    except StopAskedError:
        return


class _Development:
    """The broker, the job and the API.

    Args:
        folder: for logs.
        output: how to print.
    """

    def __init__(self, folder: Path, output: Output) -> None:
        self._folder = folder
        self._output = output
        self._ended: queue.Queue[tuple[str, Path]] = queue.Queue()

    def run(self, settings: Settings, api_port: int) -> None:
        """Runs them on the settings as they are, until a signal or until one of them ends.

        Raises:
            DevError: one of them has ended, or the settings are not for this machine alone.
            BrokerError: the broker did not start.
            ChildServiceError: job or API did not start.
        """
        from broker.standalone import EmbeddedBroker
        from conf.settings import is_object_storage

        urls = urlparse(settings.pulsar.service_url), urlparse(settings.pulsar.admin_url)
        if is_object_storage(settings.warehouse) or not all(u.hostname in _LOOPBACK and u.port for u in urls):
            raise DevError(
                f"the settings name {settings.pulsar.service_url} and {settings.warehouse}, and `dev` has a broker and "
                "a folder of its own, on this machine: give --ephemeral, or other settings"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as running:
            broker = EmbeddedBroker(DEFAULT_DATA_DIR, _BROKER_CONF)
            self._start_broker(running, broker, urls[0].port or 0, urls[1].port or 0)
            self._serve(running, broker, settings, api_port)

    def run_ephemeral(self, settings: Settings, api_port: int) -> None:
        """Runs them with all data in the folder, and a broker on free ports. Raises as `run` does."""
        from broker.standalone import EmbeddedBroker
        from conf.settings import load_settings
        from jobs.child_service import ignore_user_settings

        temporary = self._folder / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        with ExitStack() as running:
            broker = EmbeddedBroker(self._folder / "broker", _BROKER_CONF)
            self._start_broker(running, broker, 0, 0)
            file = self._folder / "settings.yaml"
            file.write_text(json.dumps(_ephemeral_settings(settings, broker, self._folder)))  # JSON is YAML
            ignore_user_settings()
            self._serve(running, broker, load_settings(file), api_port)

    def _start_broker(self, running: ExitStack, broker: EmbeddedBroker, port: int, http_port: int) -> None:
        self._say("starting a broker, the job and the API ...")
        broker.start(port, http_port)  # where it fails, the guard ends what has started
        running.callback(broker.stop)
        self._watch("the broker", broker.log_file, broker.wait)

    def _serve(self, running: ExitStack, broker: EmbeddedBroker, settings: Settings, api_port: int) -> None:
        """Runs job and API.

        Raises:
            DevError: one of them, or the broker, has ended.
        """
        from jobs.child_service import last_lines

        job = self._start(running, "job", ["run"], settings.file)
        url = self._start(running, "api", ["api", "--port", str(api_port)], settings.file).wait_until_ready()
        while (line := job.wait_until_ready()) != "ready":
            self._say(line)
        address = broker.settings
        ready = {
            "event": "ready",
            "broker": address.service_url,
            "admin": address.admin_url,
            "api": url,
            "config": str(settings.file),
        }
        show(self._output, ready, "\n".join(_ready_lines(ready, settings, is_default=self._folder == _FOLDER)))
        while True:
            try:
                name, log = self._ended.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            raise DevError("\n".join([f"{name} has ended; the last lines of its log:", *last_lines(log, _LAST_LINES)]))

    def _start(self, running: ExitStack, name: str, command: list[str], file: Path | None) -> ChildService:
        from jobs.child_service import ChildService

        log = self._folder / f"{name}.log"
        child = ChildService(command, file, log, lambda line: self._say(f"{name}  {line}"))
        running.callback(child.stop)
        child.start()
        self._watch(f"the {name}", log, child.wait)
        return child

    def _watch(self, name: str, log: Path, wait: Callable[[], Any]) -> None:
        def watch() -> None:
            wait()
            self._ended.put((name, log))

        threading.Thread(target=watch, daemon=True).start()

    def _say(self, line: str) -> None:
        if self._output is Output.TEXT:
            print(printable(line), file=sys.stderr, flush=True)


def _ephemeral_settings(settings: Settings, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """Returns the content of a settings file: the settings, but for where broker and data are."""
    content = settings.model_dump(mode="json", by_alias=True)
    own = {
        "service_url": broker.settings.service_url,
        "admin_url": broker.settings.admin_url,
        "token_file": None,
        "trust_certs_file": None,
    }
    content["pulsar"] |= own
    content["api"]["url"] = None  # commands ask tables and control topic, unless they are told otherwise
    return content | {"warehouse": f"file:{folder}/warehouse", "checkpoint": f"file:{folder}/checkpoint"}


def _ready_lines(ready: dict[str, str], settings: Settings, is_default: bool) -> list[str]:
    topic = settings.routes[0].source
    program = "delaylake" if shutil.which("delaylake") else sys.argv[0]
    return [
        f"broker  {ready['broker']}, admin API {ready['admin']}",
        f"api     {ready['api']}  (dashboard, REST, docs)",
        *(f"route   {r.source} -> {', '.join(s.name for s in r.subscriptions)}" for r in settings.routes),
        "ready   try in another terminal:" + ("" if is_default else f" export DELAYLAKE_CONFIG={ready['config']}"),
        f"          {program} consume {topic}",
        f"          {program} produce {topic} -m hello --deliver-after 10s",
    ]
