"""The Pulsar clients and schemas of a worker process: kept for its next tasks, because each takes long to make."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

import pulsar

from broker.client import close_quietly, connect
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings
from warehouse.message_schemas import DestinationSchemas

# How long the client waits for a producer. While it does its thread can't be ended, even by closing the client.
_OPERATION_SECONDS = 5

_clients: dict[str, tuple[int, pulsar.Client]] = {}  # by service URL (process id, its client): a fork has another id
_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def pulsar_client(settings: Settings) -> pulsar.Client:
    """Returns this process's client. It is kept, because to open one takes longer than a task has time for."""
    url = settings.pulsar.service_url
    owner, client = _clients.get(url, (0, None))
    if client is None or owner != os.getpid():
        client = connect(settings.pulsar, operation_timeout_seconds=_OPERATION_SECONDS)
        _clients[url] = (os.getpid(), client)
    return client


def destination_schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: to register one takes longer than to send."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _schemas:
        _schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _schemas[key]


def forget_clients(until_unused: Callable[[], None] = lambda: None) -> None:
    """Has the next task open a client anew: one that has failed may hang.

    Args:
        until_unused: waits until no thread is in a call of the client: once that is closed it may never return.
    """

    def close() -> None:
        until_unused()
        for client in clients:
            close_quietly(client)

    # In the background: a connection that does not answer may take long to close.
    if clients := _taken():
        threading.Thread(target=close, daemon=True).start()


def _taken() -> list[pulsar.Client]:
    """Returns this process's clients, which are kept no longer."""
    own = [client for owner, client in list(_clients.values()) if owner == os.getpid()]
    _clients.clear()
    return own


@atexit.register
def _close_clients() -> None:
    for client in _taken():
        close_quietly(client)
