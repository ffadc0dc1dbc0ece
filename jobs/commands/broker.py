"""`delaylake broker`: starts, stops and shows the embedded Pulsar standalone."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.options import Output, OutputOption, show

if TYPE_CHECKING:
    from broker.standalone import BrokerStatus

app = typer.Typer(help="The embedded Pulsar standalone, for development and demos.", no_args_is_help=True)

DEFAULT_DATA_DIR = Path(".delaylake/broker")

DataDir = Annotated[Path, typer.Option(help="The folder of its data, log and state file.", file_okay=False)]


def _port(name: str, what: str) -> Any:
    return typer.Option(name, min=0, max=65535, help=f"{what}; 0 for any free one.")


class StopAskedError(BaseException):
    """SIGINT or SIGTERM came."""


def ask_to_stop(number: int, frame: object) -> None:
    raise StopAskedError


@app.command()
def start(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    port: Annotated[int, _port("--port", "The port for clients")] = 6650,
    http_port: Annotated[int, _port("--http-port", "The port of the admin REST API")] = 8080,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is ready, and let it run.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start the broker and, without --detach, stay until SIGINT or SIGTERM, then stop it. Data are kept."""
    from broker.standalone import BrokerError, EmbeddedBroker

    broker = EmbeddedBroker(data_dir)
    if detach:
        _show(output, broker.start(port, http_port))
        return
    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)
    try:
        _show(output, broker.start(port, http_port))
        broker.wait()
    except StopAskedError:
        broker.stop()
    else:
        raise BrokerError(f"the broker was stopped from elsewhere, or crashed (see {broker.log_file})")


@app.command()
def stop(data_dir: DataDir = DEFAULT_DATA_DIR, output: OutputOption = Output.TEXT) -> None:
    """Stop the broker, if it runs."""
    from broker.standalone import EmbeddedBroker

    broker = EmbeddedBroker(data_dir)
    ran = broker.stop()
    show(output, {"stopped": ran, "data_dir": str(broker.data_dir)}, "stopped" if ran else "no broker was running")


@app.command()
def status(data_dir: DataDir = DEFAULT_DATA_DIR, output: OutputOption = Output.TEXT) -> None:
    """Show whether the broker runs and where it listens. Exit status 1 if it does not run."""
    from broker.standalone import EmbeddedBroker

    found = EmbeddedBroker(data_dir).status()
    _show(output, found)
    if found.state == "stopped":
        raise typer.Exit(1)


def _show(output: Output, status: BrokerStatus) -> None:
    running = f": {status.service_url}, {status.admin_url}, process {status.pid}" if status.pid else ""
    show(output, asdict(status), f"{status.state}{running}, data in {status.data_dir}")
