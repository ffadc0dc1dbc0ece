"""Keeps a worker process's Pulsar clients and schemas for its next tasks, because it takes long to make them."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable

import pulsar

from broker.client import close_quietly, connect
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings
from streaming.release.naming import Target
from warehouse.message_schemas import DestinationSchemas

# How long the client waits for a producer. During that time its thread can't be ended, even by closing the client.
_OPERATION_SECONDS = 5

# A broker that throttles a topic reads nothing more from a connection, also after it has answered all. So destinations
# share none, as far as there are so many. The connection 0 is for what goes to no destination.
_MOST_KEPT = 16

# (process id, client) by service URL and the connection's number; a fork has another id
_clients: dict[tuple[str, int], tuple[int, pulsar.Client]] = {}
_numbers: dict[Target, int] = {}
_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def pulsar_client(settings: Settings, number: int = 0) -> pulsar.Client:
    """Returns this process's client of a number, which is kept: a task has no time to open one."""
    key = settings.pulsar.service_url, number
    owner, client = _clients.get(key, (0, None))
    if client is None or owner != os.getpid():
        client = new_client(settings)
        _clients[key] = (os.getpid(), client)
    return client


def number_of(target: Target) -> int:
    """Returns the number of the client that this process keeps for a target; the next one for one that is new."""
    return _numbers.setdefault(target, 1 + len(_numbers) % _MOST_KEPT)


def is_alone(target: Target) -> bool:
    """Whether no other target has the client that this process keeps for a target."""
    return Counter(_numbers.values())[number_of(target)] == 1


def new_client(settings: Settings) -> pulsar.Client:
    """Returns a client that the caller has to close."""
    return connect(settings.pulsar, operation_timeout_seconds=_OPERATION_SECONDS)


def destination_schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: registering one takes longer than sending."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _schemas:
        _schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _schemas[key]


def forget_clients(until_unused: Callable[[], None] = lambda: None, number: int | None = None) -> None:
    """Closes the clients in the background, so that the next task opens new ones: a client that has failed may hang.

    Args:
        until_unused: waits until no thread is in a call of a client: such a call may never return after the close.
        number: of the client; None: all.
    """

    def close() -> None:
        until_unused()
        for client in clients:
            close_quietly(client)

    # In the background, because a connection that does not answer may take long to close.
    if clients := taken(number):
        threading.Thread(target=close, daemon=True).start()


def taken(number: int | None = None) -> list[pulsar.Client]:
    """Returns this process's clients of a number, None: all, and forgets them."""
    found = [_clients.pop(key) for key in list(_clients) if number in (None, key[1])]
    return [client for owner, client in found if owner == os.getpid()]


@atexit.register
def _close_clients() -> None:
    for client in taken():
        close_quietly(client)
