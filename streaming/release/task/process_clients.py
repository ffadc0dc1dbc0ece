"""Keeps a worker process's connections to Pulsar and schemas for its next tasks, because it takes long to make them."""

from __future__ import annotations

import os

import pulsar

from broker.client import connect
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings
from warehouse.message_schemas import DestinationSchemas

# How long a broker is waited for when it is asked for a producer, or for the partitions of a topic.
_REQUEST_SECONDS = 5.0

_brokers: dict[str, tuple[int, Brokers]] = {}  # (process id, connections) by service URL; a fork has another id
_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def brokers(settings: Settings) -> Brokers:
    """Returns this process's connections, which are kept: a task has no time to make them."""
    url = settings.pulsar.service_url
    owner, own = _brokers.get(url, (0, None))
    if own is None or owner != os.getpid():
        own = new_brokers(settings)
        _brokers[url] = (os.getpid(), own)
    return own


def new_brokers(settings: Settings) -> Brokers:
    """Returns connections that the caller has to close."""
    return Brokers(settings.pulsar, _REQUEST_SECONDS)


def reading_client(settings: Settings) -> pulsar.Client:
    """Returns a client that reads what has arrived; the caller has to close it."""
    return connect(settings.pulsar, operation_timeout_seconds=int(_REQUEST_SECONDS))


def destination_schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: registering one takes longer than sending."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _schemas:
        _schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _schemas[key]


def forget_brokers() -> None:
    """Closes the connections, so that the next task makes new ones: what was not answered is dropped."""
    own = [found for owner, found in list(_brokers.values()) if owner == os.getpid()]
    _brokers.clear()
    for one in own:
        one.close()
