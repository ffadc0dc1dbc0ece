"""Hosts of a small network on this machine: namespaces with a bridge between them, which only root can make."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_NETWORK = "10.254.77"


class Host:
    """A host with an address and a loopback of its own."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, *command: str) -> list[str]:
        """Returns the command that runs another one there."""
        return ["ip", "netns", "exec", self.name, *command]


class Network:
    """This machine, and hosts beside it.

    Attributes:
        name: of the bridge between them.
        address: this machine's, for the hosts.
    """

    address = f"{_NETWORK}.1"

    def __init__(self, name: str, hosts: list[Host]) -> None:
        self.name = name
        self.hosts = hosts
        self._forwards: list[subprocess.Popen[bytes]] = []

    def forward(self, port: int) -> None:
        """Lets each host reach a port of this machine's loopback under the same port of its own loopback."""
        to_here = f"TCP-LISTEN:{port},bind={self.address},fork,reuseaddr", f"TCP:127.0.0.1:{port}"
        self._forwards.append(subprocess.Popen(["socat", *to_here]))
        for host in self.hosts:
            there = f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr", f"TCP:{self.address}:{port}"
            self._forwards.append(subprocess.Popen(host.command("socat", *there)))

    def stop(self) -> None:
        for process in self._forwards:
            process.terminate()
            process.wait()


@contextmanager
def network(n: int) -> Iterator[Network]:
    """Makes a network of this machine and n hosts; skips the test where that can't be."""
    name = f"dl{os.getpid() % 100_000}"
    hosts = [Host(f"{name}h{i}", f"{_NETWORK}.{i + 2}") for i in range(n)]
    if subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=False, capture_output=True).returncode:
        pytest.skip("no network can be made here: that needs root")
    made = Network(name, hosts)
    try:
        _ip("address", "add", f"{made.address}/24", "dev", name)
        _ip("link", "set", name, "up")
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", f"{host.name}v", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", f"{host.name}v", "master", name, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        made.stop()
        for host in hosts:
            # A namespace is deleted later, and its link's name may be wanted again at once.
            subprocess.run(["ip", "link", "delete", f"{host.name}v"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
        _ip("link", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
