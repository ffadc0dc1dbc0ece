"""What another system keeps for later, as an import reads it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol

from conf.errors import DelayLakeError

# What is taken for a time, in ms since the epoch; which of these can be delivered is checked with all messages.
_MOST_MILLIS = 1 << 60


class SourceError(DelayLakeError):
    """Another system can't be read. The message is one line, without the password of its URL."""


@dataclass(frozen=True)
class Item:
    """A job, task or message that waits in another system.

    Attributes:
        id: names it among all items of all systems, also in a later import.
        due: ms since the epoch; None: at once.
        payload: as the consumer is to get it; of what can't be read, all that there is.
        reason: why it can't be taken; None: it can.
    """

    id: str
    due: int | None
    payload: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None


class Source(Protocol):
    """Reads what waits in another system, and changes nothing there.

    Attributes:
        left: how many items are not to be taken, by the reason; complete when all items have been read.
    """

    left: Counter[str]

    def items(self) -> Iterator[Item]:
        """Yields the items; the same one twice, perhaps.

        Raises:
            SourceError: the system can't be read.
        """
        ...


def item(
    id: str,
    due: float | None,
    payload: bytes | None,
    properties: Mapping[str, object] = MappingProxyType({}),
    key: str | None = None,
) -> Item:
    """Makes an item, or, where its values can't be kept, one with the reason.

    Args:
        due: ms since the epoch; None: at once.
        properties: those that are None or empty are left out; numbers become text.
    """
    texts = {name: str(value) for name, value in properties.items() if value is not None and value != ""}
    if due is not None and not (math.isfinite(due) and abs(due) < _MOST_MILLIS):
        return bad(id, f"{due} is no time", payload)
    try:
        "".join([id, key or "", *texts.values()]).encode()
    except UnicodeEncodeError:
        return bad(id, "its id, key or properties are no Unicode text", payload)
    return Item(id, None if due is None else round(due), payload, key or None, texts)


def bad(id: str, reason: str, payload: bytes | None) -> Item:
    """Makes an item that can't be taken; it is kept aside with the reason."""
    return Item(id.encode(errors="backslashreplace").decode(), None, payload, reason=reason)


def unreadable(system: str, content: bytes, reason: str) -> Item:
    """Makes an item of content that names no id: the content is its id."""
    return bad(f"{system}:sha256:{hashlib.sha256(content).hexdigest()}", reason, content)


def json_object(content: bytes | str) -> dict[str, Any] | None:
    """Reads a JSON object; None: the content is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def iso_millis(text: str) -> float | None:
    """Reads a time in ISO 8601, in UTC where it names no zone, as ms since the epoch; None: it is no time."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000
    except (ValueError, OverflowError):
        return None
