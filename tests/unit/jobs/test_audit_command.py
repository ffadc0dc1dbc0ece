"""What `delaylake audit` prints."""

from __future__ import annotations

from jobs.commands.audit import _json
from warehouse.audit.accounts import Audit
from warehouse.audit.broker_comparison import ComparedTopic, Comparison


def test_the_numbers_of_a_topic_have_the_names_that_scripts_know() -> None:
    topics = [ComparedTopic("t", 0, entries=3, durable=2, not_durable=1)]
    found = _json(Audit(counts=[], taken_in=0, rejected=0, findings={}, comparison=Comparison(topics=topics)))
    [topic] = found["comparison"]["topics"]
    names = ("topic", "partition", "entries", "booked", "not_booked", "no_message", "not_seen", "not_known", "trimmed")
    assert tuple(topic) == names
    assert (topic["booked"], topic["not_booked"]) == (2, 1)
    assert found["ok"]
