"""Looks for topics on which anybody may produce what is taken for the operators' or the job's word."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Iterable

from broker.client import PulsarError, close_quietly, connect, host_and_port, urls_of_hosts
from conf.settings import PulsarSettings, Settings

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5
_MAX_DESTINATIONS = 20  # that are looked at


def warn_of_open_topics(settings: Settings) -> threading.Thread | None:
    """Logs a warning for topics on which anybody may produce; in a thread, as brokers may take seconds to refuse.

    Returns:
        the thread; None: the broker is on this machine alone, and serves nobody else.
    """
    if _is_loopback(settings.pulsar.service_url):
        return None
    thread = threading.Thread(target=_warn, args=(settings,), name="open topics", daemon=True)
    thread.start()
    return thread


def open_topics(settings: PulsarSettings, topics: Iterable[str]) -> list[str]:
    """Returns those among some topics on which a client without credentials may produce."""
    import pulsar

    found: list[str] = []
    try:
        client = connect(settings.model_copy(update={"token_file": None}), operation_timeout_seconds=_ANSWER_SECONDS)
    except PulsarError:
        return []
    try:
        for topic in topics:
            try:
                close_quietly(client.create_producer(topic))
            except (pulsar.AuthenticationError, pulsar.ConnectError, pulsar.Timeout):
                return found  # the broker lets nobody in without credentials
            except pulsar.PulsarException:
                continue
            found.append(topic)
    finally:
        close_quietly(client)
    return found


def _warn(settings: Settings) -> None:
    destinations = [s.destination for route in settings.routes for s in route.subscriptions]
    control = settings.control
    open_ones = set(
        open_topics(settings.pulsar, [control.topic, control.outcome_topic, *destinations[:_MAX_DESTINATIONS]])
    )
    if control.topic in open_ones:
        _log.warning("anybody may produce on %s, and so cancel and move any message: see SECURITY.md", control.topic)
    if control.outcome_topic in open_ones:
        _log.warning("anybody may produce on %s, and so forge outcomes: see SECURITY.md", control.outcome_topic)
    if others := [topic for topic in destinations if topic in open_ones]:
        _log.warning("anybody may produce on destinations, as %s: see SECURITY.md", others[0])


def _is_loopback(service_url: str) -> bool:
    return all(_is_of_this_machine(host_and_port(url)[0]) for url in urls_of_hosts(service_url))


def _is_of_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
