"""A broker that takes small entries only, and of one namespace few bytes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.servers.running_broker import running_broker
from tests.support.service.harness import http

LARGEST = 128 << 10  # bytes of an entry
SLOW = "public/slow"  # a namespace that takes 2 MB a second


@contextmanager
def broker_of_small_entries(folder: Path, usual: EmbeddedBroker, largest: int = LARGEST) -> Iterator[EmbeddedBroker]:
    """Starts the broker, and kills it at the end.

    Args:
        folder: of its data.
        usual: a running broker with the usual sizes. Pulsar's C++ client keeps the largest size that a broker told it
            last in a static variable (`ClientConnection::maxMessageSize_`). A test of the same process would send to
            the usual broker with the bounds of this one: a new connection sets them back.
        largest: bytes of an entry.
    """
    try:
        with running_broker(folder, {"maxMessageSize": str(largest)}) as made:
            admin = f"{made.settings.admin_url}/admin/v2/namespaces"
            http.put(f"{admin}/{SLOW}", json={}).raise_for_status()
            rate = {"publishThrottlingRateInMsg": -1, "publishThrottlingRateInByte": 2_000_000}
            http.post(f"{admin}/{SLOW}/publishRate", json=rate).raise_for_status()
            yield made
    finally:
        client = connect(usual.settings)
        client.get_topic_partitions("persistent://public/default/any")
        client.close()
