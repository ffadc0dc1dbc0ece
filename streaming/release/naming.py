"""Names and options of producers, and the largest size of a message that can be sent on."""

from __future__ import annotations

import zlib
from typing import Any

from conf.settings import MOST_LANES, Settings
from warehouse.message_schemas import version_number

# Room for what a delivered message has beside what came, without the names of topic and subscription: the delaylake
# properties, a schema's version, Pulsar's metadata, which counts to the broker's limit, too, and 150 bytes that broker
# and bookie put around it.
OWN_BYTES = 2_048

# The most messages of a producer batch. The client is told of far more, so that it never cuts a batch itself.
BATCH_MESSAGES = 500

# (source topic, subscription); the subscription "" stands for the source topic's rejects topic, and what
# `tracker.dead_letter_targets.dead_letters_of` gives for its dead letters.
Target = tuple[str, str]


def max_size_bytes(settings: Settings, topic: str) -> int:
    """Returns how many bytes payload, keys and properties of a source topic's message may have in all to be sent on."""
    route = settings.route(topic)
    longest = max((len(s.name.encode()) for s in route.subscriptions), default=0) if route is not None else 0
    return settings.pulsar.max_message_size_bytes - OWN_BYTES - len(topic.encode()) - longest


def producer_name(app_id: str, source: str, subscription: str | None, shard: int, lane: str, is_batched: bool) -> str:
    """Returns the name under which a shard's messages for a subscription, or for the rejects topic (None), are sent.

    A hash of the source topic is in it: subscriptions of the same name, of several, may go to one destination.
    """
    of_source = f"{app_id}-{zlib.crc32(source.encode()):08x}"
    return f"{of_source}-{subscription or ''}-{shard}-{lane}" + ("-batched" if is_batched else "")


def schema_suffix(topic: str, version: bytes) -> str:
    """Returns the end of a producer's name for messages that have a version of a source topic's schema."""
    return f"-schema{version_number(version)}-{zlib.crc32(topic.encode() + version):08x}"


# What lanes are called, by the kind of their releases: see `tracker.in_flight`.
LANE_KINDS = ("short", "planned", "short-in-order", "planned-in-order")


def lane_names() -> list[str]:
    """Returns the names of all lanes that there can be, for any number of lanes in the settings."""
    return [f"{kind}{number}" for kind in LANE_KINDS for number in range(MOST_LANES)]


# The options of a producer that never blocks, drops nothing by itself, and whose batches only flush_async cuts.
PRODUCER_OPTIONS: dict[str, Any] = {
    "batching_max_messages": 10 * BATCH_MESSAGES,
    "batching_max_allowed_size_in_bytes": 4 * 1024 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
    "max_pending_messages": 0,  # any number: a release is in memory as a whole
    "send_timeout_millis": 0,
}
