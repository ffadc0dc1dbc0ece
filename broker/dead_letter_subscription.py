"""The subscription for which the broker keeps dead letters until they are re-driven."""

from __future__ import annotations

import logging
import time

import pulsar

from broker.client import PulsarError
from broker.protocol.brokers import Brokers
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError

_log = logging.getLogger(__name__)

SUBSCRIPTION = "delaylake-redrive"

_BUSY_SECONDS = 0.1  # between two attempts, while another consumer has the subscription


def ensure_subscription(brokers: Brokers, topic: str) -> None:
    """Makes the subscription of a topic partition of dead letters, so that the broker keeps these; logs a failure.

    Without any subscription the broker would delete the messages, and later the topic.
    """
    try:
        brokers.subscribe(topic, SUBSCRIPTION, max_bytes=1, max_messages=1).close()
    except PulsarError as error:
        if not isinstance(error, RefusedError) or error.error != ServerError.ConsumerBusy:
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
