"""Checks in a Spark task whether destinations can be written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pulsar

from conf.settings import Settings, rejects_topic
from streaming.release.task import process_clients
from streaming.release.task.producer_line import REFUSALS


def can_write(settings_json: str, topics: Iterable[str]) -> Iterator[str]:
    """Tries to get a producer for each partition of each topic.

    Yields:
        for each topic the error; an empty text: it can be written, if perhaps with a schema only.
    """
    settings = Settings(**json.loads(settings_json))
    rejects = {rejects_topic(route.source) for route in settings.routes}
    for topic in topics:
        try:
            client = process_clients.pulsar_client(settings)
            for partition in client.get_topic_partitions(topic):
                try:
                    client.create_producer(partition).close()
                except pulsar.IncompatibleSchema:
                    if topic in rejects:  # what is rejected is sent without a schema
                        raise
            yield ""
        except Exception as error:
            if not isinstance(error, REFUSALS):
                # The client may hang. After a refusal it is kept, because a new one takes time.
                process_clients.forget_clients()
            yield f"{type(error).__name__}: {error}"
