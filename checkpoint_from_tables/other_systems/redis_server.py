"""Reads Redis, or a server with the same protocol, for the sources of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from checkpoint_from_tables.other_systems.item import Item, Source, SourceError
from conf.errors import one_line

_AT_ONCE = 1_000
_TIMEOUT_SECONDS = 30.0


def connect(url: str) -> Any:
    """Returns a client, which connects at its first use.

    Args:
        url: such as redis://:password@host:6379/0, rediss://... or unix://...

    Raises:
        SourceError: redis-py is not installed, or the URL is wrong.
    """
    try:
        import redis
    except ImportError:
        raise SourceError("redis-py is not installed: pip install -e '.[redis]'") from None
    try:
        return redis.Redis.from_url(url, decode_responses=False, socket_timeout=_TIMEOUT_SECONDS)
    except ValueError as error:
        raise SourceError(f"--url: {one_line(error)}") from None


def items_of(source: Source) -> Iterator[Item]:
    """Yields the items of a source that reads Redis.

    Raises:
        SourceError: Redis does not answer, or refuses.
    """
    import redis

    try:
        yield from source.items()
    except (redis.RedisError, OSError) as error:
        raise SourceError(f"Redis can't be read: {one_line(error)}") from None


def names_of(redis: Any, prefix: str, suffix: str, kind: str = "zset") -> list[str]:
    """Returns the parts between a prefix and a suffix of the names of keys, in order.

    Args:
        redis: the client.
        prefix: what the names begin with.
        suffix: what they end with.
        kind: the type of the keys' values.
    """
    escaped = "".join(f"\\{c}" if c in "*?[]\\^" else c for c in prefix)
    found = redis.scan_iter(match=f"{escaped}*{suffix}", count=_AT_ONCE, _type=kind)
    return sorted({key.decode()[len(prefix) : len(key.decode()) - len(suffix)] for key in found if _is_text(key)})


def hashes(
    redis: Any, sorted_set: str, prefix: str, fields: Sequence[str]
) -> Iterator[tuple[bytes, float, dict[str, bytes]]]:
    """Yields the members of a sorted set, each with fields of the hash that it names.

    Args:
        redis: the client.
        sorted_set: its name.
        prefix: of the hash's name, before the member.
        fields: the names of the fields to read.

    Yields:
        (member, score, fields): those fields that the hash has; empty: there is no such hash.
    """
    members = redis.zscan_iter(sorted_set, count=_AT_ONCE)
    while some := list(islice(members, _AT_ONCE)):
        pipeline = redis.pipeline(transaction=False)
        for member, _ in some:
            pipeline.hmget(prefix.encode() + member, *fields)
        for (member, score), values in zip(some, pipeline.execute(), strict=True):
            yield member, score, {f: v for f, v in zip(fields, values, strict=True) if v is not None}


def text(value: bytes | None) -> str | None:
    """Returns bytes as text, with escapes for bytes that are no UTF-8; None for None."""
    return None if value is None else value.decode(errors="backslashreplace")


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
