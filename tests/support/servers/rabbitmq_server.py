"""A RabbitMQ server, which is Debian's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
import pytest

from tests.support.servers.starting import wait_until_it_answers

# It is in Debian's packages alone, which need root.
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_NO_RABBITMQ = "the import from RabbitMQ needs its server: apt-get install rabbitmq-server"


def need_rabbitmq() -> None:
    """Skips a test where there is no RABBITMQ; fails it if CI is set in the environment."""
    if not RABBITMQ.exists():
        if os.environ.get("CI"):
            pytest.fail(_NO_RABBITMQ)
        pytest.skip(_NO_RABBITMQ)


@contextmanager
def rabbitmq_server(folder: Path) -> Iterator[str]:
    """Runs RABBITMQ, which must be there; yields its URL."""
    sockets = [socket.socket() for _ in range(3)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    port, distribution, names = (one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    (folder / "plugins").write_text("[].")
    environment = {
        **os.environ,
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"test{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(folder),
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([RABBITMQ], env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"amqp://guest:guest@127.0.0.1:{port}/%2F"
    try:
        wait_until_it_answers(
            server,
            folder / "log",
            lambda: pika.BlockingConnection(pika.URLParameters(url)).close(),
            (pika.exceptions.AMQPError, OSError),
            seconds=300,
        )
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)
        subprocess.run(["epmd", "-kill"], env=environment, check=False, capture_output=True)
