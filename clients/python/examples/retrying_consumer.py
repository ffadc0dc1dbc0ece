"""A consumer of a destination: what it fails on comes again, later each time, and at last to the dead letters."""

from __future__ import annotations

from collections.abc import Callable

import pulsar

from delaylake import Client


def handle(
    lake: Client,
    consumer: pulsar.Consumer,
    message: pulsar.Message,
    subscription: str,
    work: Callable[[pulsar.Message], None],
) -> None:
    """Works on a message, and acknowledges it when that is done, or when the service has the retry."""
    try:
        work(message)
    except Exception as error:
        given = message.properties()
        message_id, attempt = given["delaylake.messageId"], given.get("delaylake.attempt", "0")
        lake.retry(
            given["delaylake.source"],
            message_id,
            subscription=subscription,
            reason=f"{type(error).__name__}: {error}",
            request_id=f"retry-{message_id}-{subscription}-{attempt}",  # one retry, also where this is done twice
        )
    consumer.acknowledge(message)
