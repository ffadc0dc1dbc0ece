"""The subscription for which the broker keeps dead letters until they are re-driven."""

from __future__ import annotations

import logging
import time

import pulsar

from broker.client import close_quietly

_log = logging.getLogger(__name__)

SUBSCRIPTION = "delaylake-redrive"

_BUSY_SECONDS = 0.1  # between two attempts, while another consumer has the subscription


def ensure_subscription(client: pulsar.Client, topic: str) -> None:
    """Makes the subscription of a topic partition of dead letters, so that the broker keeps these; logs a failure.

    Without any subscription the broker would delete the messages, and later the topic.
    """
    try:
        close_quietly(
            client.subscribe(
                topic, SUBSCRIPTION, initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=1
            )
        )
    except pulsar.ConsumerBusy:
        pass  # the subscription exists, and has a consumer
    except pulsar.PulsarException as error:
        _log.warning("%s: dead letters are not kept for a re-drive: %s", topic, error)


def subscribe(client: pulsar.Client, topic: str, seconds: float) -> pulsar.Consumer:
    """Subscribes to the unacknowledged dead letters of a topic partition.

    Args:
        client: a client of Pulsar.
        topic: the topic partition.
        seconds: how long to wait for another consumer to leave the subscription.

    Raises:
        pulsar.ConsumerBusy: another consumer still has the subscription.
        pulsar.PulsarException: the broker does not answer, or refuses.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return client.subscribe(
                topic,
                SUBSCRIPTION,
                consumer_type=pulsar.ConsumerType.Exclusive,
                initial_position=pulsar.InitialPosition.Earliest,
            )
        except pulsar.ConsumerBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_SECONDS)
