"""Items: jobs, tasks or messages that wait in another system, as an import reads them."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

from conf.errors import DelayLakeError
from tracker.due_time import MAX_TIME_MILLIS

# Numbers below this are taken for a time, ms since the epoch; whether it can be delivered then is checked later.
_MOST_MILLIS = 1 << 60


class SourceError(DelayLakeError):
    """Another system can't be read. The message is one line, without the password of its URL."""


@dataclass(frozen=True)
class Item:
    """A job, task or message that waits in another system.

    Attributes:
        id: unique among the items of all systems, and the same in each import.
        due: ms since the epoch; None: at once.
        payload: as the consumer is to get it; of an unreadable item, its whole content.
        key: of the message; None: it has none.
        properties: of the message.
        reason: why the item can't be taken; None: it can.
    """

    id: str
    due: int | None
    payload: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None


class Source(Protocol):
    """Reads the items of another system, and changes nothing there.

    Attributes:
        left: the number of items that are left out, by reason; complete when all items have been read.
    """

    left: Counter[str]

    def items(self) -> Iterator[Item]:
        """Yields the items; it may yield one twice.

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
    """Makes an item, or a rejected one if its values can't be stored.

    Args:
        id: as of `Item`.
        due: ms since the epoch; None: at once.
        payload: as of `Item`.
        properties: values that are None or empty are left out; numbers become text.
        key: as of `Item`.
    """
    texts = {name: str(value) for name, value in properties.items() if value is not None and value != ""}
    if due is not None and not (math.isfinite(due) and abs(due) < _MOST_MILLIS):
        return rejected_item(id, f"{due} is no time", payload)
    try:
        "".join([id, key or "", *texts.values()]).encode()
    except UnicodeEncodeError:
        return rejected_item(id, "its id, key or properties are no Unicode text", payload)
    # The later ms, so never early; further digits may come from the calculation.
    return Item(id, None if due is None else math.ceil(round(due, 3)), payload, key or None, texts)


def rejected_item(id: str, reason: str, payload: bytes | None) -> Item:
    """Makes an item that can't be taken; the import writes it to `rejects`, with the reason."""
    return Item(id.encode(errors="backslashreplace").decode(), None, payload, reason=reason)


def unreadable(system: str, content: bytes, reason: str) -> Item:
    """Makes a rejected item of content without an id; a hash of the content is its id."""
    return rejected_item(f"{system}:sha256:{hashlib.sha256(content).hexdigest()}", reason, content)


def json_object(content: bytes | str) -> dict[str, Any] | None:
    """Reads a JSON object; None: the content is no JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def end_millis(millis: float | None) -> int | None:
    """Returns the property `expireAt` of an item's end, ms since the epoch; None: it has none that can be stored."""
    return round(millis) if millis is not None and 0 <= millis <= MAX_TIME_MILLIS else None


def iso_millis(text: str) -> float | None:
    """Reads a time in ISO 8601 as ms since the epoch; without a zone it is UTC. None: the text is no time."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000
    except (ValueError, OverflowError):
        return None
