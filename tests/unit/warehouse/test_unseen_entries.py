"""What is named of a gap of which the broker has trimmed ledgers: a broker made by hand, which keeps indexes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from broker.client import NoAnswerError
from broker.entries.continuity import Gap
from broker.position import Position, SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from warehouse.unseen_entries import NotDurableError, find_not_seen

SOURCE = SourceTopic("persistent://public/default/t", "persistent://public/default/t", -1)


class Broker:
    """One that has these ledgers, with batches of two messages, and does not describe some of the entries."""

    def __init__(self, ledgers: dict[int, int], not_described: frozenset[Position] = frozenset()) -> None:
        self._ledgers, self._not_described = ledgers, not_described

    def internal_stats(self, topic: str) -> TopicLedgers:
        return TopicLedgers(self._ledgers, {}, {}, (max(self._ledgers), 0))

    def entry_metadata(self, topic: str, ledger: int, entry: int) -> BrokerEntry | None:
        if Position(ledger, entry) in self._not_described:
            raise NoAnswerError("500")
        is_there = entry < self._ledgers.get(ledger, 0)
        return BrokerEntry(2, 1_000, "p", None, {}, is_encrypted=False, is_no_message=False) if is_there else None

    def entry(self, topic: str, ledger: int, entry: int) -> Any:
        return {}, b"x"

    def message_index(self, topic: str, ledger: int, entry: int) -> int:
        return 20 + 2 * entry + 1


def named(ledgers: dict[int, int], gap: Gap, *not_described: Position) -> list[tuple[str, str]]:
    """The positions that are named, each with its reason."""
    broker = cast("AdminClient", Broker(ledgers, frozenset(not_described)))
    found = find_not_seen(broker, SOURCE, gap, lambda _: None).rows
    return list(zip(found["position"].to_pylist(), found["reason"].to_pylist(), strict=True))


@pytest.mark.parametrize(("before_index", "counted"), [(26, "10"), (1_016, "1,000"), (16, "")])
def test_what_was_trimmed_before_entries_that_are_there_is_counted(before_index: int, counted: str) -> None:
    found = named({10: 2, 13: 4}, Gap(Position(7, 3), Position(13, 1), 9, before_index))
    assert [position for position, _ in found][-3:] == ["10:0:-1:-1", "10:1:-1:-1", "13:0:-1:-1"]
    rest = [f"not seen: {counted} messages by their indexes; the broker no longer has it"] if counted else []
    assert [reason for position, reason in found if position == "7:4:-1:-1"] == rest


@pytest.mark.parametrize(("before_index", "counted"), [(26, "up to 11"), (16, "up to 1"), (15, "")])
def test_beside_an_entry_that_the_broker_does_not_describe_it_is_told_how_many_there_may_be(
    before_index: int, counted: str
) -> None:
    found = named({10: 2, 13: 4}, Gap(Position(7, 3), Position(13, 1), 9, before_index), Position(10, 1))
    assert dict(found)["10:1:-1:-1"].startswith("not seen: the broker does not describe it")
    rest = [f"not seen: {counted} messages by their indexes; the broker no longer has it"] if counted else []
    assert [reason for position, reason in found if position == "7:4:-1:-1"] == rest


def test_at_the_end_of_a_topic_the_last_entry_says_how_many_were_trimmed_before() -> None:
    found = named({13: 4}, Gap(Position(7, 3), Position(13, 4), 9))
    assert found[0] == ("7:4:-1:-1", "not seen: 10 messages by their indexes; the broker no longer has it")
    assert [position for position, _ in found[1:]] == [f"13:{n}:-1:-1" for n in range(4)]
    assert len(named({13: 4}, Gap(Position(7, 3), Position(13, 4), 9), Position(13, 3))) == 4, "it is not described"


def test_a_gap_at_the_end_stays_open_until_the_entry_before_is_durable_and_keeps_the_index_that_ends_it() -> None:
    def not_durable(position: Position) -> int | None:
        raise NotDurableError(f"{position} is not durable yet")

    broker = cast("AdminClient", Broker({13: 4}))
    with pytest.raises(NotDurableError) as caught:
        find_not_seen(broker, SOURCE, Gap(Position(7, 3), Position(13, 4)), not_durable)
    assert caught.value.gap == Gap(Position(7, 3), Position(13, 4), None, 28)
    trimmed = cast("AdminClient", Broker({14: 0}))
    found = find_not_seen(trimmed, SOURCE, caught.value.gap, lambda _: 9).rows
    assert [reason for reason in found["reason"].to_pylist() if "by their indexes" in reason] == [
        "not seen: up to 14 messages by their indexes; the broker no longer has it"
    ]


def test_what_is_there_at_the_end_is_named_also_where_the_entry_before_was_never_seen() -> None:
    assert len(named({13: 4}, Gap(Position(7, 3), Position(13, 4)))) == 4


def test_a_topic_that_was_made_again_counts_from_its_beginning() -> None:
    [(position, reason)] = named({16: 3}, Gap(Position(7, 3), Position(16, 0), 99, 8))
    assert position == "7:4:-1:-1"
    assert reason.startswith("not seen: 8 messages by their indexes")
    assert named({16: 3}, Gap(Position(7, 3), Position(16, 0), 99, 0)) == []


def test_entries_that_are_all_there_are_not_counted_once_more() -> None:
    found = named({7: 6, 10: 4}, Gap(Position(7, 3), Position(10, 1), 9, 30))
    assert [position for position, _ in found] == ["7:4:-1:-1", "7:5:-1:-1", "10:0:-1:-1"]
