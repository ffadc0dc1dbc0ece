"""Whether a topic is the one that was read, by the ledgers that the broker has of it."""

from __future__ import annotations

import pytest

from broker.clusters.new_cluster import never_had
from broker.position import Position
from broker.pulsar_admin.answers import TopicLedgers

READ = Position(50, 3)


@pytest.mark.parametrize(
    ("ledgers", "is_new"),
    [
        ({50: 4}, False),
        ({50: 3}, True),
        ({48: 9, 50: 4, 60: 1}, False),
        ({60: 1}, False),  # all that was read is acknowledged and gone, or the topic was deleted and made anew
        ({}, False),
        ({10: 7, 11: 2}, True),
        ({10: 7, 11: 2, 60: 3}, True),  # a new cluster that has got farther than the old one had
    ],
)
def test_a_topic_that_never_had_what_was_read_is_of_a_new_cluster(ledgers: dict[int, int], is_new: bool) -> None:
    assert never_had(TopicLedgers(ledgers, {}, {}, (60, 0)), READ) is is_new


def test_a_ledger_that_was_read_without_entries_goes_before_older_ones() -> None:
    assert not never_had(TopicLedgers({10: 7, 60: 3}, {}, {}, (60, 2)), Position(50, -1))
