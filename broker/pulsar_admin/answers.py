"""Reads the answers of Pulsar's admin REST API about topics and their entries."""

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
    publish_time: int | None  # ms since the epoch; None: unknown, before the epoch, or beyond the year 9999
    producer_name: str | None
    key: str | None
    properties: dict[str, str]
    is_encrypted: bool
    is_no_message: bool  # a marker, of an aborted transaction, or not the last chunk of a chunked message
    sequence_id: int | None = None  # for a batch that of its first message; None: unknown
    deliver_at: int | None = None  # Pulsar's own delivery time, ms since the epoch; None: Pulsar does not delay it


@dataclass(frozen=True)
class TopicLedgers:
    """A topic partition as the broker has stored it.

    Attributes:
        ledgers: the number of entries of each ledger that is not trimmed.
        acknowledged: the mark-delete position of each subscription, (ledger, entry).
        next_read: the position of the entry that the broker sends next to each subscription's consumers.
        end: the position of the last entry.
        last_made_at: when the last ledger was created, ms since the epoch; None: unknown.
        added: the number of entries that the broker has added since it opened the topic.
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
        ledgers[max(ledgers)] = int(stats["currentLedgerEntries"])  # the list says 0 for an open ledger
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
        for each range the positions before its first entry and of its last one, (ledger, entry), ascending.
    """
    return sorted(
        # A bracket instead of a parenthesis: the entry belongs to the range.
        ((int(first), int(entry) - (bracket == "[")), (int(last), int(end) - (close == ")")))
        for bracket, first, entry, last, end, close in _RANGE.findall(text)
    )


def millis(text: str) -> int | None:
    """Returns a time of the broker's in ms since the epoch; None: it can't be read, or is before the epoch."""
    try:
        millis = round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return millis if millis >= 0 else None


def _position(text: str) -> tuple[int, int]:
    ledger_id, entry_id = text.split(":")
    return int(ledger_id), int(entry_id)
