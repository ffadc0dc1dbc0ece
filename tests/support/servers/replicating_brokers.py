"""Two real clusters that replicate a namespace to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from broker.standalone import EmbeddedBroker
from tests.support.servers.running_broker import running_broker

NAMES = ("east", "west")
NAMESPACE = "geo/ns"


@contextmanager
def replicating_brokers(folder: Path) -> Iterator[list[EmbeddedBroker]]:
    """Starts a broker for each of NAMES, of a cluster of that name, and kills them at the end.

    Args:
        folder: of their data.
    """
    with ExitStack() as stack:
        brokers = {name: stack.enter_context(running_broker(folder / name, {"clusterName": name})) for name in NAMES}
        for broker in brokers.values():
            with httpx.Client(base_url=f"{broker.settings.admin_url}/admin/v2/", timeout=90) as http:
                for name, other in brokers.items():
                    at = {"serviceUrl": other.settings.admin_url, "brokerServiceUrl": other.settings.service_url}
                    http.put(f"clusters/{name}", json=at)  # it may be there, with another address
                    assert http.post(f"clusters/{name}", json=at).is_success
                tenant = NAMESPACE.partition("/")[0]
                assert http.put(f"tenants/{tenant}", json={"adminRoles": [], "allowedClusters": [*NAMES]}).is_success
                assert http.put(f"namespaces/{NAMESPACE}", json={"replication_clusters": [*NAMES]}).is_success
        yield [*brokers.values()]
