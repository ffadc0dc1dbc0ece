"""Keeps a worker process's connections to Pulsar and schemas for its next tasks, because it takes long to make them."""

from __future__ import annotations

import os
from collections import Counter

from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings
from streaming.release.naming import Recipient
from warehouse.message_schemas import DestinationSchemas

# How long a broker is waited for when it is asked for a producer, or for the partitions of a topic.
_REQUEST_SECONDS = 5.0

# A broker that throttles a topic reads nothing more from a connection, also after it has answered all. So destinations
# share none, as far as there are so many. The connections 0 are for what goes to no destination.
_MOST_KEPT = 16

# (process id, connections) by service URL and the connections' number; a fork has another id
_brokers: dict[tuple[str, int], tuple[int, Brokers]] = {}
_numbers: dict[Recipient, int] = {}
_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def brokers(settings: Settings, number: int = 0) -> Brokers:
    """Returns this process's connections of a number, which are kept: a task has no time to make them."""
    key = settings.pulsar.service_url, number
    owner, own = _brokers.get(key, (0, None))
    if own is None or owner != os.getpid():
        own = new_brokers(settings)
        _brokers[key] = (os.getpid(), own)
    return own


def number_of(recipient: Recipient) -> int:
    """Returns the number of the connections that this process keeps for a recipient; the next one for a new one."""
    return _numbers.setdefault(recipient, 1 + len(_numbers) % _MOST_KEPT)


def is_alone(recipient: Recipient) -> bool:
    """Whether no other recipient has the connections that this process keeps for a recipient."""
    return Counter(_numbers.values())[number_of(recipient)] == 1


def new_brokers(settings: Settings) -> Brokers:
    """Returns connections that the caller has to close."""
    return Brokers(settings.pulsar, _REQUEST_SECONDS)


def destination_schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: registering one takes longer than sending."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _schemas:
        _schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _schemas[key]


def forget_brokers(number: int | None = None) -> None:
    """Closes connections, so that the next task makes new ones: what was not answered is dropped.

    Args:
        number: of the connections; None: all.
    """
    found = [_brokers.pop(key) for key in list(_brokers) if number in (None, key[1])]
    for owner, own in found:
        if owner == os.getpid():
            own.close()
