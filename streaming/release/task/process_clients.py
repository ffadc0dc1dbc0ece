"""Keeps a worker process's Pulsar clients and schemas for its next tasks, because it takes long to make them."""

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

# How long the client waits for a producer. During that time its thread can't be ended, even by closing the client.
_OPERATION_SECONDS = 5

_clients: dict[str, tuple[int, pulsar.Client]] = {}  # (process id, client) by service URL; a fork has another id
_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def pulsar_client(settings: Settings) -> pulsar.Client:
    """Returns this process's client, which is kept: a task has no time to open one."""
    url = settings.pulsar.service_url
    owner, client = _clients.get(url, (0, None))
    if client is None or owner != os.getpid():
        client = new_client(settings)
        _clients[url] = (os.getpid(), client)
    return client


def new_client(settings: Settings) -> pulsar.Client:
    """Returns a client that the caller has to close."""
    return connect(settings.pulsar, operation_timeout_seconds=_OPERATION_SECONDS)


def destination_schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: registering one takes longer than sending."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _schemas:
        _schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _schemas[key]


def forget_clients(until_unused: Callable[[], None] = lambda: None) -> None:
    """Closes the clients in the background, so that the next task opens new ones: a client that has failed may hang.

    Args:
        until_unused: waits until no thread is in a call of a client: such a call may never return after the close.
    """

    def close() -> None:
        until_unused()
        for client in clients:
            close_quietly(client)

    # In the background, because a connection that does not answer may take long to close.
    if clients := taken():
        threading.Thread(target=close, daemon=True).start()


def taken() -> list[pulsar.Client]:
    """Returns this process's clients, and forgets them."""
    own = [client for owner, client in list(_clients.values()) if owner == os.getpid()]
    _clients.clear()
    return own


@atexit.register
def _close_clients() -> None:
    for client in taken():
        close_quietly(client)
