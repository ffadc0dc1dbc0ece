"""Checks in a Spark task whether destinations can be written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from conf.settings import Settings
from streaming.release.task import process_clients
from streaming.release.task.producer_line import REFUSALS


def can_write(settings_json: str, topics: Iterable[str]) -> Iterator[str]:
    """Tries to get a producer for each partition of each topic.

    Yields:
        for each topic the error; an empty text: it can be written.
    """
    settings = Settings(**json.loads(settings_json))
    for topic in topics:
        try:
            client = process_clients.pulsar_client(settings)
            for partition in client.get_topic_partitions(topic):
                client.create_producer(partition).close()
            yield ""
        except Exception as error:
            if not isinstance(error, REFUSALS):
                # The client may hang. After a refusal it is kept, because a new one takes time.
                process_clients.forget_clients()
            yield f"{type(error).__name__}: {error}"
