"""Checks in a Spark task whether destinations can be written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broker.protocol.sending import is_refusal
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from conf.partitions import partition_name
from conf.settings import rejects_topic, settings_from_json
from streaming.release.task import process_clients
from streaming.release.task.producer_line import reason_of


def can_write(settings_json: str, topics: Iterable[str]) -> Iterator[str]:
    """Tries to get a producer for each partition of each topic.

    Yields:
        for each topic the error; an empty text: it can be written, if perhaps with a schema only.
    """
    settings = settings_from_json(settings_json)
    rejects = {rejects_topic(route.source) for route in settings.routes}
    for topic in topics:
        try:
            brokers = process_clients.brokers(settings)
            n = brokers.partitions(topic)
            for partition in [partition_name(topic, i) for i in range(n)] if n else [topic]:
                try:
                    brokers.produce(partition).close()
                except RefusedError as error:
                    # What is rejected is sent without a schema.
                    if error.error != ServerError.IncompatibleSchema or topic in rejects:
                        raise
            yield ""
        except Exception as error:
            if not is_refusal(error):
                process_clients.forget_brokers()
            yield reason_of(error)
