"""Partitions as Pulsar has them. `orders-partition-5` is a name of one of `orders`, `orders-partition-05` is not."""

from __future__ import annotations

import re

# A regular expression, also for SQL. Pulsar takes only the number as it writes it.
PARTITION_SUFFIX = "-partition-(0|[1-9][0-9]{0,9})$"
_SUFFIX = re.compile(PARTITION_SUFFIX.removesuffix("$") + r"\Z")
_MAX_PARTITION = 2**31 - 1


def partition_name(topic: str, partition: int) -> str:
    """Returns the full name of a topic's partition, or the topic's own for -1: it is not partitioned."""
    return topic if partition < 0 else f"{topic}-partition-{partition}"


def split_partition(name: str) -> tuple[str, int]:
    """Returns the topic of a partition's full name, and the partition's number; of a topic its name, and -1."""
    found = _SUFFIX.search(name)
    number = int(found[1]) if found else -1
    return (name[: found.start()], number) if found and number <= _MAX_PARTITION else (name, -1)


def without_partition(name: str) -> str:
    """Returns the topic of a partition's full name, or a topic's name unchanged."""
    return split_partition(name)[0]


def java_string_hash(text: str) -> int:
    """Returns Java's String.hashCode of a text, a key, without its sign, 0 to 2^31 - 1: Pulsar's JavaStringHash."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(units), 2):
        value = (31 * value + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
