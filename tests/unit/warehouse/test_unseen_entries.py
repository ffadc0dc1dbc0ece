"""What is named of a gap of which the broker has trimmed ledgers: a broker made by hand, which keeps indexes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from broker.entries.continuity import Gap
from broker.position import Position, SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from warehouse.unseen_entries import find_not_seen

SOURCE = SourceTopic("persistent://public/default/t", "persistent://public/default/t", -1)


class Broker:
    """One that has these ledgers, with batches of two messages."""

    def __init__(self, ledgers: dict[int, int]) -> None:
        self._ledgers = ledgers

    def internal_stats(self, topic: str) -> TopicLedgers:
        return TopicLedgers(self._ledgers, {}, {}, (max(self._ledgers), 0))

    def entry_metadata(self, topic: str, ledger: int, entry: int) -> BrokerEntry | None:
        is_there = entry < self._ledgers.get(ledger, 0)
        return BrokerEntry(2, 1_000, "p", None, {}, is_encrypted=False, is_no_message=False) if is_there else None

    def entry(self, topic: str, ledger: int, entry: int) -> Any:
        return {}, b"x"


def named(ledgers: dict[int, int], gap: Gap) -> list[tuple[str, str]]:
    """The positions that are named, each with its reason."""
    found = find_not_seen(cast("AdminClient", Broker(ledgers)), SOURCE, gap, lambda _: None).rows
    return list(zip(found["position"].to_pylist(), found["reason"].to_pylist(), strict=True))


@pytest.mark.parametrize(("before_index", "counted"), [(26, "10"), (1_016, "1,000"), (16, "")])
def test_what_was_trimmed_before_entries_that_are_there_is_counted(before_index: int, counted: str) -> None:
    found = named({10: 2, 13: 4}, Gap(Position(7, 3), Position(13, 1), 9, before_index))
    assert [position for position, _ in found][-3:] == ["10:0:-1:-1", "10:1:-1:-1", "13:0:-1:-1"]
    rest = [f"not seen: {counted} messages by their indexes; the broker no longer has it"] if counted else []
    assert [reason for position, reason in found if position == "7:4:-1:-1"] == rest


def test_a_topic_that_was_made_again_counts_from_its_beginning() -> None:
    [(position, reason)] = named({16: 3}, Gap(Position(7, 3), Position(16, 0), 99, 8))
    assert position == "7:4:-1:-1"
    assert reason.startswith("not seen: 8 messages by their indexes")
    assert named({16: 3}, Gap(Position(7, 3), Position(16, 0), 99, 0)) == []


def test_entries_that_are_all_there_are_not_counted_once_more() -> None:
    found = named({7: 6, 10: 4}, Gap(Position(7, 3), Position(10, 1), 9, 30))
    assert [position for position, _ in found] == ["7:4:-1:-1", "7:5:-1:-1", "10:0:-1:-1"]
