"""Names and options of producers, and the largest size of a message that can be sent on."""

from __future__ import annotations

import zlib

from warehouse.message_schemas import version_number

# The most messages of a producer batch.
BATCH_MESSAGES = 500

# (source topic, subscription). The subscription "" stands for the source topic's rejects topic; that of dead letters is
# what `tracker.subscriptions.dead_letters_of` returns.
Recipient = tuple[str, str]


def producer_name(app_id: str, source: str, subscription: str | None, shard: int, lane: str, is_batched: bool) -> str:
    """Returns the name of the producer of a shard's messages for a subscription; None: for the rejects topic.

    The name has a hash of the source topic, because subscriptions of the same name may share a destination.
    """
    of_source = f"{app_id}-{zlib.crc32(source.encode()):08x}"
    return f"{of_source}-{subscription or ''}-{shard}-{lane}" + ("-batched" if is_batched else "")


def schema_suffix(topic: str, version: bytes) -> str:
    """Returns the end of a producer's name for messages with a version of a source topic's schema."""
    return f"-schema{version_number(version)}-{zlib.crc32(topic.encode() + version):08x}"


# How the names of lanes begin, by the kind of their releases: see `tracker.in_flight`.
LANE_KINDS = ("short", "planned", "short-in-order", "planned-in-order")
