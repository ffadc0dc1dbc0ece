"""The subscription that keeps dead letters until they are re-driven."""

from __future__ import annotations

import logging
import time

import pulsar

from broker.client import close_quietly

_log = logging.getLogger(__name__)

SUBSCRIPTION = "delaylake-redrive"

_BUSY_SECONDS = 0.1  # between two attempts, while another consumer has the subscription


def keep(client: pulsar.Client, topic: str) -> None:
    """Makes the subscription of a topic partition of dead letters, so that the broker keeps these.

    Without any subscription the broker deletes messages, and at last the topic. Where it can't be made the log says so.
    """
    try:
        close_quietly(
            client.subscribe(
                topic, SUBSCRIPTION, initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=1
            )
        )
    except pulsar.ConsumerBusy:
        pass  # so there is one
    except pulsar.PulsarException as error:
        _log.warning("%s: dead letters are not kept for a re-drive: %s", topic, error)


def subscribe(client: pulsar.Client, topic: str, seconds: float) -> pulsar.Consumer:
    """Subscribes to the dead letters of a topic partition that have not been acknowledged, from the first on.

    Args:
        seconds: how long another consumer that has the subscription is waited for.

    Raises:
        pulsar.ConsumerBusy: another one has it still.
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
