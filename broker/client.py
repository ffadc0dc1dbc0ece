"""Connections to Pulsar: the client for messages and a small one for the admin REST API."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conf.errors import DelayLakeError
from conf.settings import PulsarSettings

if TYPE_CHECKING:
    import pulsar

_log = logging.getLogger(__name__)

# The initial sequence id of producers that live long and let the client count. A partition that a topic gets later may
# be sent to before its producer is connected; once it is, the client would count from its beginning again, and the
# broker drop as many messages as repeated. With a number to begin with it goes on counting; the Python client takes 0
# for none.
FIRST_SEQUENCE_ID = 1

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}  # where a URL names none
_LOOK_SECONDS = 1.0


class PulsarError(DelayLakeError):
    """Pulsar can't be reached, or refused a request."""


class NoAnswerError(PulsarError):
    """A request was not answered in time."""


def connect(settings: PulsarSettings, *, log_file: str = os.devnull, **options: Any) -> pulsar.Client:
    """Makes a client for `settings.service_url`. Nothing is sent yet: the first producer or reader opens a connection.

    The token file is read anew at each connection. Make clients in the process that uses them: one made before a fork
    hangs in the child.

    Args:
        settings: the `pulsar` section.
        log_file: where the client writes its errors (`/dev/stderr` works). Most of them come as exceptions too. The
            client's own default is stdout, and a Python logger makes the process abort when the client is closed.
        options: parameters of `pulsar.Client`, which take precedence over those that are set here.

    Raises:
        PulsarError: the token file or the certificates can't be read.
    """
    import pulsar

    arguments: dict[str, Any] = {"logger": pulsar.FileLogger(pulsar.LoggerLevel.Error, log_file)}
    if settings.token_file is not None:
        arguments["authentication"] = pulsar.AuthenticationToken(token_reader(settings.token_file))
    if settings.trust_certs_file is not None:
        if not settings.trust_certs_file.is_file():
            raise PulsarError(f"no certificates at {settings.trust_certs_file}: set pulsar.trust_certs_file")
        arguments["tls_trust_certs_file_path"] = str(settings.trust_certs_file)
    if settings.service_url.startswith("pulsar+ssl:"):
        arguments["tls_validate_hostname"] = True
    return pulsar.Client(settings.service_url, **(arguments | options))


def listens(settings: PulsarSettings) -> bool:
    """Tells, within a second for each host of `settings.service_url`, whether one takes connections.

    What does may still not answer: `connect` a client to know.
    """
    scheme, _, hosts = settings.service_url.partition("://")
    for host in hosts.split("/")[0].split(","):
        try:
            url = urlsplit(f"//{host}")
            address = (url.hostname or "", url.port or _PORTS[scheme])
            socket.create_connection(address, timeout=_LOOK_SECONDS).close()
        except (OSError, ValueError):
            continue
        return True
    return False


def check_listens(settings: PulsarSettings) -> None:
    """Looks whether there is a broker, before something is begun that needs one at its end.

    Raises:
        NoAnswerError: none takes connections.
    """
    if not listens(settings):
        raise NoAnswerError(f"no broker at {settings.service_url}")


def close_quietly(opened: pulsar.Client | pulsar.Producer | pulsar.Consumer) -> None:
    """Closes a client, a producer or a consumer; that it can't be closed goes to the debug log."""
    try:
        opened.close()
    except Exception as error:
        _log.debug("closing %s: %s", type(opened).__name__, error)


def crypto_key_reader(settings: PulsarSettings) -> pulsar.CryptoKeyReader | None:
    """Makes the reader of the private key that decrypts messages; None: the settings have no key.

    Raises:
        PulsarError: the key's file does not exist.
    """
    import pulsar

    key = settings.crypto_private_key_file
    if key is None:
        return None
    if not key.is_file():
        raise PulsarError(f"no private key at {key}: set pulsar.crypto_private_key_file")
    return pulsar.CryptoKeyReader("", str(key))


def subscribe(
    client: pulsar.Client, topic: str, subscription: str, key_reader: pulsar.CryptoKeyReader | None
) -> pulsar.Consumer:
    """Subscribes the job's consumer to a topic partition: durable, exclusive, from the beginning.

    The consumer acknowledges messages that it can't decrypt, and does not hand them over.

    Args:
        topic: the topic partition.
        key_reader: as `crypto_key_reader` returns it.

    Raises:
        pulsar.PulsarException: the broker does not answer, or another consumer has the subscription.
    """
    import pulsar

    return client.subscribe(
        topic,
        subscription,
        consumer_type=pulsar.ConsumerType.Exclusive,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=2_000,
        max_pending_chunked_message=0,  # any number: with a limit the client drops the oldest of too many
        crypto_key_reader=key_reader,
        # With CONSUME the client writes beyond its memory where an encrypted message is in chunks.
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.DISCARD,
    )


def token_reader(file: Path) -> Callable[[], str]:
    """Makes a function that reads a file's token anew at each call; the last one while the file can't be read.

    Raises:
        PulsarError: the file can't be read now.
    """
    try:
        last = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PulsarError(f"can't read the token at {file}: set pulsar.token_file") from error

    def read() -> str:
        nonlocal last
        # An exception here would end in the client's C++ threads.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            last = file.read_text().strip() or last
        return last

    return read
