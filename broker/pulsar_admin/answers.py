"""Topics and their entries, as Pulsar's admin REST API tells of them, in Python."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_RANGE = re.compile(r"([(\[])(-?\d+):(-?\d+)\.\.(-?\d+):(-?\d+)([)\]])")  # (7:1..7:4], of entries


@dataclass(frozen=True)
class BrokerEntry:
    """The metadata of an entry of a topic, as the admin API returns it: without the payload."""

    batch_size: int
    publish_time: int | None  # ms since the epoch; None: not told, before the epoch, or beyond the year 9999
    producer_name: str | None
    key: str | None
    properties: dict[str, str]
    is_encrypted: bool
    is_first_chunk: bool  # the first chunk of a chunked message
    is_no_message: bool  # a marker, of a transaction that was aborted, or not the last chunk of a chunked message
    sequence_id: int | None = None  # of a batch, that of its first message; None: not told
    deliver_at: int | None = None  # until when Pulsar itself delays it, ms since the epoch; None: it does not


@dataclass(frozen=True)
class TopicLedgers:
    """A topic partition as the broker has stored it.

    Attributes:
        ledgers: how many entries each ledger has that is not trimmed.
        acknowledged: for each subscription its mark-delete position, (ledger, entry).
        next_read: for each subscription the position of the entry that its consumers are sent next.
        end: the position of the last entry.
        last_made_at: when the last ledger was made, ms since the epoch; None: not told.
        added: how many entries the broker has added since it opened the topic.
    """

    ledgers: dict[int, int]
    acknowledged: dict[str, tuple[int, int]]
    next_read: dict[str, tuple[int, int]]
    end: tuple[int, int]
    last_made_at: int | None = None
    added: int = 0


def broker_entry(headers: httpx.Headers) -> BrokerEntry:
    """Reads the headers with which the broker answers for an entry."""

    def number(name: str, default: int) -> int:
        return int(headers.get(f"X-Pulsar-{name}", default))

    return BrokerEntry(
        batch_size=number("num-batch-message", 1),
        publish_time=millis(headers.get("X-Pulsar-publish-time", "")),
        producer_name=headers.get("X-Pulsar-producer-name"),
        key=headers.get("X-Pulsar-partition-key"),
        properties=json.loads(headers.get("X-Pulsar-property", "{}")),
        is_encrypted=headers.get("X-Pulsar-is-encrypted") == "true",
        is_first_chunk=headers.get("X-Pulsar-chunk-id") == "0",
        is_no_message=(
            "X-Pulsar-marker-type" in headers
            or headers.get("X-Pulsar-txn-aborted") == "true"
            or number("chunk-id", 0) < number("num-chunks-from-msg", 1) - 1
        ),
        sequence_id=number("sequence-id", -1) if "X-Pulsar-sequence-id" in headers else None,
        deliver_at=millis(headers.get("X-Pulsar-deliver-at-time", "")),
    )


def topic_ledgers(stats: dict[str, Any]) -> TopicLedgers:
    """Reads the internal stats of a topic partition."""
    ledgers = {int(ledger["ledgerId"]): int(ledger["entries"]) for ledger in stats["ledgers"]}
    if ledgers:
        ledgers[max(ledgers)] = int(stats["currentLedgerEntries"])  # of an open ledger the list says 0
    cursors = stats["cursors"].items()
    return TopicLedgers(
        ledgers=ledgers,
        acknowledged={name: _position(cursor["markDeletePosition"]) for name, cursor in cursors},
        next_read={name: _position(cursor["readPosition"]) for name, cursor in cursors},
        end=_position(stats["lastConfirmedEntry"]),
        last_made_at=millis(stats.get("lastLedgerCreatedTimestamp") or ""),
        added=int(stats.get("entriesAddedCounter", 0)),
    )


def entry_ranges(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Reads ranges of entries, as `[(7:1..7:4]]`.

    Returns:
        of each the position before the first entry, and that of the last, (ledger, entry); ascending.
    """
    return sorted(
        # Of a range that begins with a bracket, not a parenthesis, the first entry is one of it.
        ((int(first), int(entry) - (bracket == "[")), (int(last), int(end) - (close == ")")))
        for bracket, first, entry, last, end, close in _RANGE.findall(text)
    )


def millis(text: str) -> int | None:
    """Reads a time as the broker writes it, in ms since the epoch; None: it can't be read, or is before the epoch."""
    try:
        millis = round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return millis if millis >= 0 else None


def _position(text: str) -> tuple[int, int]:
    ledger_id, entry_id = text.split(":")
    return int(ledger_id), int(entry_id)
