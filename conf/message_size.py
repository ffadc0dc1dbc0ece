"""The size that a message may have so that it can be delivered."""

from __future__ import annotations

from conf.settings import Settings

# Bytes of a delivered message beyond those of the source message, and without the names of topic and subscription: the
# delaylake properties, a schema version, Pulsar's metadata, which counts towards the broker's limit, and 150 bytes that
# broker and bookie add.
OWN_BYTES = 2_048

BATCH_BYTES = 100_000  # the most characters of a producer batch, each of up to 4 bytes; a larger message is sent alone

FIELD_BYTES = 12  # of a property in Pulsar's metadata, beside its name and value


def max_size_bytes(settings: Settings, topic: str) -> int:
    """Returns the most bytes of payload, keys and properties together with which a message is sent as one entry."""
    return settings.pulsar.max_message_size_bytes - _own_bytes(settings, topic)


def max_delivered_bytes(settings: Settings, topic: str) -> int:
    """Returns the most bytes of payload, keys and properties together with which a message can be delivered."""
    pulsar = settings.pulsar
    return max(pulsar.max_message_size_bytes, pulsar.max_chunked_message_bytes) - _own_bytes(settings, topic)


def batch_millis(settings: Settings) -> int:
    """Returns the time that a producer batch spans, ms; 0: there are none, which brokers may refuse."""
    takes_batches = settings.pulsar.max_message_size_bytes >= 4 * BATCH_BYTES
    return settings.release.batch_millis if takes_batches else 0


def _own_bytes(settings: Settings, topic: str) -> int:
    route = settings.route(topic)
    longest = max((len(s.name.encode()) for s in route.subscriptions), default=0) if route is not None else 0
    return OWN_BYTES + len(topic.encode()) + longest
