"""Dead letters are told by where they were sent, and where their subscription's messages go; in Python and in SQL."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from status.dead_letters import destinations_of, is_dead_letter, is_dead_letter_sql
from status.status_writer import StatusWriter
from warehouse.schemas import DELIVERIES

CASES = [
    ("t-a", "t-a", False),
    ("t-a-dlq", "t-a", True),
    ("t-a-dlq-partition-11", "t-a", True),
    ("t-dlq-a", "t-dlq-a", False),
    ("t-dlq", "t-dlq", False),
    ("t-dlq-partition-1", "t-dlq", False),
    ("t-dlq-dlq", "t-dlq", True),
    ("t-dlq-dlq-partition-1", "t-dlq", True),
    ("t-dlq", None, True),
    ("t-dlq-partition-one", "t", False),
    ("t-dlq", "t2", True),  # the destination has been edited since
]


@pytest.mark.parametrize(("sent_to", "destination", "is_dead"), CASES)
def test_a_dead_letter_goes_to_a_topic_that_is_not_its_subscriptions_own(
    sent_to: str, destination: str | None, is_dead: bool
) -> None:
    assert is_dead_letter(sent_to, destination) is is_dead
    values = f"('{sent_to}', {'NULL' if destination is None else repr(destination)}), (NULL, 't')"
    sql = f"SELECT {is_dead_letter_sql('s', 'd')} AS is_dead FROM (VALUES {values}) AS v (s, d) ORDER BY s"
    found = pa.table(QueryBuilder().execute(sql).read_all())
    assert found["is_dead"].to_pylist() == [is_dead, None]


def test_the_job_counts_them_by_the_destination_of_their_own_topic_and_subscription(tmp_path: Path) -> None:
    known = {"t": {"subscriptions": [["a", "Shared", "x-dlq", False], ["b", "Shared", "x", True, "{}"]]}}
    assert destinations_of(known) == {("t", "a"): "x-dlq", ("t", "b"): "x"}
    sent = [("t", "a", "x-dlq"), ("t", "b", "x-dlq"), ("t", "b", "x-dlq"), ("u", "a", "x"), ("t", "a", "x-dlq-dlq")]
    rows = [
        {"topic": topic, "subscription": name, "destination": to, "attempt": 1, "deliver_at": 1, "sent_at": 1}
        for topic, name, to in sent
    ]
    with StatusWriter(str(tmp_path), 1) as job:
        job.routes(known)
        job.deliveries(pa.Table.from_pylist([row | {"short_notice": False} for row in rows], schema=DELIVERIES))
        assert job.status().dead_letters == 3
