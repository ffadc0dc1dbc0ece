"""Connections to Pulsar: what the settings say of them, and clients and consumers made from them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conf.errors import DelayLakeError
from conf.settings import PulsarSettings

if TYPE_CHECKING:
    import pulsar

_log = logging.getLogger(__name__)

# The initial sequence id of long-lived producers that let the client count. Without one the client counts from 0 again
# when a partition that was added to the topic is connected, and the broker drops as many messages as repeated. The
# Python client takes 0 for none.
FIRST_SEQUENCE_ID = 1

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}  # the default ports of URLs
_LOOK_SECONDS = 1.0


class PulsarError(DelayLakeError):
    """Pulsar can't be reached, or refused a request."""


class SchemaRefusedError(PulsarError):
    """A topic does not take a schema."""


class NoAnswerError(PulsarError):
    """A request was not answered in time."""


def connect(settings: PulsarSettings, *, log_file: str = os.devnull, **options: Any) -> pulsar.Client:
    """Makes a client for `settings.service_url`; the first producer or reader opens the connection.

    The token file is read anew at each connection. Make clients in the process that uses them: one made before a fork
    hangs in the child.

    Args:
        settings: the `pulsar` section.
        log_file: the file for the client's errors (`/dev/stderr` works); most of them are raised, too. The client would
            write to stdout by default, and with a Python logger the process would abort when the client is closed.
        options: parameters of `pulsar.Client`, which take precedence over those set here.

    Raises:
        PulsarError: the token file or the certificates can't be read.
    """
    import pulsar

    arguments: dict[str, Any] = {"logger": pulsar.FileLogger(pulsar.LoggerLevel.Error, log_file)}
    if settings.token_file is not None:
        arguments["authentication"] = pulsar.AuthenticationToken(token_reader(settings.token_file))
    if settings.trust_certs_file is not None:
        if not settings.trust_certs_file.is_file():
            raise _no_certificates(settings)
        arguments["tls_trust_certs_file_path"] = str(settings.trust_certs_file)
    if is_encrypted(settings.service_url):
        arguments["tls_validate_hostname"] = True
    return pulsar.Client(settings.service_url, **(arguments | options))


def urls_of_hosts(service_url: str) -> list[str]:
    """Returns a URL for each host of a service URL, which may name several: pulsar://a:6650,b:6650."""
    scheme, _, rest = service_url.partition("://")
    return [f"{scheme}://{host}" for host in rest.split("/")[0].split(",")]


def host_and_port(url: str) -> tuple[str, int]:
    """Returns the host and the port of a URL with one host.

    Raises:
        PulsarError: it is no URL of a broker.
    """
    scheme, _, host = url.partition("://")
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "", parts.port or _PORTS[scheme]
    except (KeyError, ValueError) as error:
        raise PulsarError(f"{url} is no address of a broker") from error


def is_encrypted(url: str) -> bool:
    """Whether connections to a URL use TLS."""
    return url.startswith("pulsar+ssl:")


def trusted_certificates(settings: PulsarSettings) -> ssl.SSLContext:
    """Returns the certificates that are trusted: those of `trust_certs_file`, or the machine's.

    Raises:
        PulsarError: there are none in the file, or it can't be read.
    """
    try:
        return ssl.create_default_context(cafile=settings.trust_certs_file)
    except OSError as error:
        raise _no_certificates(settings) from error


def _no_certificates(settings: PulsarSettings) -> PulsarError:
    return PulsarError(f"no certificates at {settings.trust_certs_file}: set pulsar.trust_certs_file")


def is_listening(settings: PulsarSettings) -> bool:
    """Whether a host of `settings.service_url` accepts connections; takes a second for each host at most.

    A host that accepts connections may still not answer: `connect` a client to know.
    """
    for url in urls_of_hosts(settings.service_url):
        try:
            socket.create_connection(host_and_port(url), timeout=_LOOK_SECONDS).close()
        except (OSError, PulsarError):
            continue
        return True
    return False


def check_listening(settings: PulsarSettings) -> None:
    """Checks that there is a broker, before work begins that needs one at its end.

    Raises:
        NoAnswerError: no host accepts connections.
    """
    if not is_listening(settings):
        raise NoAnswerError(f"no broker at {settings.service_url}")


def close_quietly(opened: pulsar.Client | pulsar.Producer | pulsar.Consumer) -> None:
    """Closes a client, a producer or a consumer; logs an error of that at level DEBUG."""
    try:
        opened.close()
    except Exception as error:
        _log.debug("closing %s: %s", type(opened).__name__, error)


def token_reader(file: Path) -> Callable[[], str]:
    """Makes a function that reads the token in a file at each call, or returns the last one if that fails.

    Raises:
        PulsarError: the file can't be read now.
    """
    try:
        last = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PulsarError(f"can't read the token at {file}: set pulsar.token_file") from error

    def read() -> str:
        nonlocal last
        # The function is called in the client's C++ threads, where it must not raise.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            last = file.read_text().strip() or last
        return last

    return read
