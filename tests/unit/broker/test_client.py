"""A look whether a broker is there, before a client is connected to it."""

from __future__ import annotations

import socket

import pytest

from broker.client import PulsarError, host_and_port, is_listening, urls_of_hosts
from conf.settings import PulsarSettings


@pytest.mark.parametrize(("url", "is_there"), [("{open}", True), ("{shut}", False), ("{shut},{open}/", True)])
def test_one_of_several_hosts_is_enough(url: str, is_there: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
        open_, shut = (f"127.0.0.1:{one.getsockname()[1]}" for one in (server, free))
        free.close()
        settings = PulsarSettings(service_url="pulsar://" + url.format(open=open_, shut=shut))
        assert is_listening(settings) is is_there


@pytest.mark.parametrize("url", ["pulsar://127.0.0.1:port", "pulsar://[::1", "pulsar://nobody.invalid"])
def test_a_host_that_is_none_does_not_listen(url: str) -> None:
    assert not is_listening(PulsarSettings(service_url=url))


def test_each_host_of_a_url_has_its_port_or_the_schemes() -> None:
    assert [host_and_port(url) for url in urls_of_hosts("pulsar://a:1,b/")] == [("a", 1), ("b", 6650)]
    assert [host_and_port(url) for url in urls_of_hosts("pulsar+ssl://[::1],c:2/x")] == [("::1", 6651), ("c", 2)]
    for url in ("pulsar://a:port", "pulsar://[::1", "http://a"):
        with pytest.raises(PulsarError, match="no address of a broker"):
            host_and_port(url)
