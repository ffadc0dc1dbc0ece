"""A consumer of a destination: what it fails on comes again, later each time, and at last to the dead letters."""

from __future__ import annotations

from collections.abc import Callable

import pulsar

from delaylake import Client, Invalid, NotFound


def handle(
    lake: Client,
    client: pulsar.Client,
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
        reason = f"{type(error).__name__}: {error}"
        request_id = f"retry-{message_id}-{subscription}-{attempt}"  # one retry, also where this is done twice
        try:
            lake.retry(
                given["delaylake.source"], message_id, subscription=subscription, reason=reason, request_id=request_id
            )
        except (Invalid, NotFound):  # it recurs, or was due at once, so that its payload is not kept
            send_back(client, message, subscription, reason)
    consumer.acknowledge(message)


def send_back(client: pulsar.Client, message: pulsar.Message, subscription: str, reason: str) -> None:
    """Sends a message back to its source topic, for a retry; there it is another message, with an id of its own."""
    given = message.properties()
    retry = {"retryOf": given["delaylake.messageId"], "retrySubscription": subscription, "retryReason": reason}
    producer = client.create_producer(given["delaylake.source"])
    producer.send(
        message.data(),
        properties=given | retry,
        partition_key=message.partition_key() or None,
        ordering_key=message.ordering_key() or None,
        event_timestamp=message.event_timestamp() or None,
    )
    producer.close()
