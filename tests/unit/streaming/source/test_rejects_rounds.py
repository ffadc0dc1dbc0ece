"""How rejects topics get what they lack: in rounds of bounded bytes, each reject once, and further ones after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import MAX_LARGE_BYTES
from streaming.source.rejects_rounds import add_round, is_round_due, spans_of_round
from tests.support.tracker.messages import TOPIC, messages
from tracker.messages import concat, int64, with_columns
from tracker.packing import payload_sizes
from warehouse.delta.tables import Tables
from warehouse.queries.held_rejects import ROUND_BYTES, find_rejects
from warehouse.queries.index_rows import to_rejects

OTHER = f"{TOPIC}2"
MIB = 1 << 20
FREE = Feedback()


class Job:
    """A job whose every tick rejects some messages: to their topic at once, or to the table alone, or again."""

    def __init__(self, folder: Path) -> None:
        self.tables = Tables(f"file:{folder}")
        self.tables.create()
        self.last = Offset(tick=10)
        self.rejected: Counter[tuple[str, int]] = Counter()  # (source topic, entry id)
        self.sent: list[tuple[str, int]] = []
        self.rounds: list[int] = []  # bytes of each

    def step(
        self,
        unwritable: Collection[str] = (),
        n: int = 1,
        n_bytes: int = 10,
        topics: Collection[str] = (TOPIC,),
        feedback: Feedback = FREE,
    ) -> Offset:
        """Makes a batch in which n messages of each topic are rejected, of so many bytes."""
        first, tick = self.last, self.last.tick + 1
        waits = {topic: {"": {"since": 1, "open": []}} for topic in unwritable}
        last = add_round(replace(first, tick=tick, unwritable=waits), first, feedback, self.tables)
        last = Offset.from_json(last.to_json())
        again = [find_rejects(self.tables, last.rejects_version, span) for span in spans_of_round(first, last)]
        if again:
            rows = concat(again)
            self.rounds.append(int(payload_sizes(rows).sum()))
            self.sent += zip(rows["topic"].to_pylist(), int64(rows, "entry_id").tolist(), strict=True)
        for topic in topics:
            entries = [(1, 1_000 * tick + i, 0) for i in range(n)]
            rows = messages(entries, topic=topic, payload=b"x" * n_bytes)
            rows = with_columns(rows, reason=pa.array(["bad"] * n))
            self.tables.append("rejects", to_rejects(rows, tick), {})
            self.rejected.update((topic, entry) for _, entry, _ in entries)
            if topic not in last.to_tick().parked_rejects:
                self.sent += [(topic, entry) for _, entry, _ in entries]
        self.last = last
        return last

    def check(self) -> None:
        """Asserts that each topic for rejects has all of its rejects once, in the order in which they were rejected."""
        for topic in {topic for topic, _ in self.rejected}:
            sent = [entry for one, entry in self.sent if one == topic]
            assert sent == sorted(entry for one, entry in self.rejected if one == topic)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.slow
def test_each_round_has_bounded_bytes_and_further_rejects_come_after_those_that_are_lacked(job: Job) -> None:
    job.step()
    for _ in range(6):
        job.step([TOPIC], n=8, n_bytes=MIB)
    assert not is_round_due(job.last, FREE), "it can't be written yet"
    assert job.last.rejects_since == {TOPIC: 12}
    job.step(n=2, n_bytes=MIB)
    while job.last.rejects_since:
        assert is_round_due(job.last, FREE)
        job.step()
    job.step()
    assert (job.last.rejects_since, job.last.rejects_to, job.last.to_tick().parked_rejects) == ({}, {}, [])
    assert not is_round_due(job.last, FREE)
    job.check()
    assert sum(job.rounds) >= 48 * MIB
    assert max(job.rounds) <= ROUND_BYTES


@pytest.mark.slow
def test_a_topic_that_can_not_be_written_again_in_between_gets_the_rest_later(job: Job) -> None:
    for _ in range(4):
        job.step([TOPIC], n=8, n_bytes=MIB)
    job.step()
    assert job.last.rejects_to[TOPIC]
    n = len(job.sent)
    for _ in range(2):
        job.step([TOPIC], n=8, n_bytes=MIB)
    assert len(job.sent) == n
    assert job.last.rejects_since == {TOPIC: 11}
    while job.last.rejects_since:
        job.step()
    job.check()
    assert max(job.rounds) <= ROUND_BYTES


@pytest.mark.slow
def test_topics_share_the_bytes_of_a_round_and_one_does_not_wait_for_another_that_stays_unwritable(job: Job) -> None:
    topics, stuck = [TOPIC, OTHER], f"{TOPIC}3"
    for _ in range(3):
        job.step([*topics, stuck], n=5, n_bytes=MIB, topics=[*topics, stuck])
    while TOPIC in job.last.rejects_since or OTHER in job.last.rejects_since:
        job.step([stuck], topics=topics)
    assert job.last.to_tick().parked_rejects == [stuck]
    while job.last.rejects_since:
        job.step()
    job.check()
    # The first entry of a further topic is in the round in any case.
    assert max(job.rounds) <= ROUND_BYTES + MIB
    assert len(job.rounds) >= 3


def test_there_is_no_round_while_much_is_on_its_way(job: Job) -> None:
    job.step([TOPIC])
    busy = Feedback(in_flight=9, in_flight_bytes=MAX_LARGE_BYTES - ROUND_BYTES, large_bytes=1)
    assert not is_round_due(replace(job.last, unwritable={}), busy)
    job.step(feedback=busy)
    assert (job.sent, job.last.rejects_since) == ([], {TOPIC: 11})
    assert is_round_due(job.last, FREE)
    job.step()
    job.check()


def test_what_an_earlier_program_recorded_is_sent_at_once_when_its_batch_runs_again(job: Job) -> None:
    for _ in range(2):
        job.step([TOPIC], n=20, n_bytes=MIB)
    version = job.tables.version("rejects")
    # It forgot since when a topic lacks rejects in the batch in which it could be written again.
    last = replace(
        job.last, tick=13, unwritable={}, reinstated=[[TOPIC, ""]], rejects_since={}, rejects_version=version
    )
    [span] = spans_of_round(job.last, last)
    rows = find_rejects(job.tables, last.rejects_version, span)
    assert sorted(int64(rows, "entry_id").tolist()) == sorted(entry for _, entry in job.rejected)
