"""Releases that are handed out again, as an earlier run of the job was killed: what the broker has comes once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker.position import START
from broker.protocol.building import OutgoingEntry
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from conf.settings import Settings
from status.alerts import FOREIGN_PRODUCER, Alerts
from streaming.release.attempt import Assignment, Attempt
from streaming.release.driver.releaser import Releaser, Run
from streaming.release.naming import producer_name
from streaming.release.producer_names import read_generations
from streaming.release.sequence_ids import last_sequence_id, sequence_id_of
from streaming.release.task import process_clients, producers
from streaming.release.task.sender import send_releases
from tests.support.servers.fake_destinations import FakeBrokers
from tests.support.service.fake_releaser import PASSED, Recorded, Spark, Tables, batch
from tests.support.service.harness import wait_until
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.packing import pack
from warehouse.schemas import DELIVERIES

pytestmark = pytest.mark.slow

DESTINATION = f"{TOPIC}-a"
N = 6
FORGED = 1 << 60
LARGE_BYTES = 100_000


@dataclass
class Broker(FakeBrokers):
    """A broker that has one topic, with deduplication; one can read what has arrived."""

    is_terminated: bool = False
    stolen_after: int | None = None  # so many messages: then somebody else takes the producer's name, and keeps it busy

    def produce(self, topic: str, name: str = "", schema: Any = None, on_progress: Any = None) -> Any:
        if self.is_terminated:
            raise RefusedError(ServerError.TopicTerminatedError, b"")
        if self.last.get((topic, name)) == FORGED and self.stolen_after is not None:
            self.stolen_after = None  # it is busy only once
            raise RefusedError(ServerError.ProducerBusy, b"")
        return super().produce(topic, name)

    def take(self, topic: str, name: str, entry: OutgoingEntry) -> bool:
        is_new = super().take(topic, name, entry)
        if is_new and len(self.entries) == self.stolen_after:
            self.last[topic, name] = FORGED
        return is_new


class Job:
    """A job on one checkpoint, which sends to the broker."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self.folder, self.broker, self.tables = folder, broker, Tables()
        self.settings = Settings(
            checkpoint=f"file:{folder}",
            pulsar={"max_message_size_bytes": LARGE_BYTES},  # type: ignore[arg-type]
            routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}]}],  # type: ignore[arg-type]
        )
        self.producer = producer_name("app", TOPIC, "a", 0, "planned0", is_batched=False)
        self.large_row = -1  # of each release: it is too large for one entry

    def body(self, tick: int, rows: int = N) -> bytes:
        """The first rows of a release."""
        table = pa.concat_tables(
            messages([(tick, i, 1_000 * tick + i)], payload=bytes(LARGE_BYTES if i == self.large_row else 1), **PASSED)
            for i in range(rows)
        )
        return pack(release_rows(table, sending='{"lanes": 1}'))

    def is_killed_after(self, tick: int, rows: int) -> None:
        """An earlier run has sent the first rows of a release, and written nothing down."""
        attempt = Attempt(generations=read_generations(self.folder))
        what = Assignment("app", 0, tick, True, self.body(tick, rows))
        [sent] = send_releases(self.settings.model_dump_json(), attempt, [what])
        assert not sent.failed

    def runs(self, tick: int, *releases: int, unwritable: Any = None) -> list[str]:
        """A run begins with a tick, and hands out releases; returns the alerts."""
        alerts, feedback = Alerts(), Recorded()
        releaser = Releaser(
            Spark(),  # type: ignore[arg-type]
            self.settings,
            self.tables,  # type: ignore[arg-type]
            Run("app", feedback),  # type: ignore[arg-type]
            lambda rows: None,
            alerts,
        )
        try:
            bodies = [(0, of_tick, True, self.body(of_tick)) for of_tick in releases]
            releaser.submit(batch(tick, bodies, unwritable))
            if self.broker.is_terminated:
                wait_until(lambda: (feedback.last.unwritable or {}).get(TOPIC), 20, "it can't be written")
                self.broker.is_terminated = False
            ticks = itertools.count(tick + 1)

            def is_done() -> bool:
                releaser.submit(batch(next(ticks), [], feedback.last.unwritable or {}))
                return feedback.last.confirmed >= tick and not feedback.last.unwritable

            wait_until(is_done, 12, f"{releaser.failure} {alerts.current()}")
        finally:
            releaser.stop()
        return [trouble.kind for trouble in alerts.current()]

    def arrived(self) -> Counter[str]:
        return Counter(one.properties["delaylake.messageId"] for one in self.broker.arrived(DESTINATION))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    broker = Broker()
    monkeypatch.setattr(process_clients, "brokers", lambda settings, number=0: broker)
    monkeypatch.setattr(process_clients, "new_brokers", lambda settings: broker)
    monkeypatch.setattr(producers, "before_time", lambda *_: START)
    monkeypatch.setattr(process_clients, "forget_brokers", lambda number=None: None)
    return Job(tmp_path, broker)


def all_of(*ticks: int) -> Counter[str]:
    return Counter(f"{tick}:{i}:-1:-1" for tick in ticks for i in range(N))


@pytest.mark.parametrize("rows", [N // 2, N])
def test_a_kill_when_later_releases_of_a_lane_had_been_sent_before_the_first_was_written_down(
    job: Job, rows: int
) -> None:
    """That the broker knows of the later ones is no sign of somebody else."""
    for tick in (1, 2):
        job.is_killed_after(tick, N)
    job.is_killed_after(3, rows)
    assert job.runs(4, 1, 2, 3, 4) == []
    assert job.arrived() == all_of(1, 2, 3, 4)
    assert sorted(tick for tick, *_ in job.tables.delivered) == [tick for tick in range(1, 5) for _ in range(N)]


def test_the_same_where_the_destination_can_not_be_written_for_a_moment(job: Job) -> None:
    for tick, rows in ((1, N), (2, N), (3, N // 2)):
        job.is_killed_after(tick, rows)
    job.broker.is_terminated = True
    assert job.runs(4, 1, 2, 3, 4) == []
    assert job.arrived() == all_of(1, 2, 3, 4)


def test_what_was_written_down_of_a_release_left_open_is_not_sent_again_though_the_broker_has_forgotten_it(
    job: Job,
) -> None:
    """One partition of the destination had taken its messages and the other none. Then the job was away for long."""
    columns = {"topic": TOPIC, "subscription": "a", "ledger_id": 1, "batch_index": -1, "batch_id": 1}
    written = [{**columns, "entry_id": i, "position": f"1:{i}:-1:-1"} for i in (0, 2)]
    job.tables.append("deliveries", pa.Table.from_pylist(written, schema=DELIVERIES), {})
    left_open = {TOPIC: {"a": {"since": 1, "open": [[1, True]]}}}
    assert job.runs(2, 1, 2, unwritable=left_open) == []
    assert job.arrived() == all_of(1, 2) - Counter(str(row["position"]) for row in written)
    assert sorted(entry for tick, _, entry in job.tables.delivered if tick == 1) == [*range(N)]


@pytest.mark.parametrize("rows", [[2], [N, 2], [N, N]])
def test_somebody_publishes_with_an_id_of_a_tick_that_was_sent_but_of_no_message(job: Job, rows: list[int]) -> None:
    """As whoever has seen the job's ids would, to have what is to be sent again taken for repetitions."""
    for tick, n in enumerate(rows, 1):
        job.is_killed_after(tick, n)
    job.broker.last[DESTINATION, job.producer] = last_sequence_id(len(rows))
    assert job.runs(3, 1, 2, 3) == [FOREIGN_PRODUCER]
    assert job.arrived() == all_of(1, 2, 3)


def test_somebody_takes_the_name_while_several_releases_of_a_lane_are_not_written_down(job: Job) -> None:
    job.is_killed_after(1, N)
    job.is_killed_after(2, N // 2)
    job.broker.last[DESTINATION, job.producer] = FORGED
    assert job.runs(3, 1, 2, 3) == [FOREIGN_PRODUCER]
    assert job.arrived() == all_of(1, 2, 3)


def test_somebody_takes_the_name_while_a_release_is_sent_and_keeps_it_busy(job: Job) -> None:
    """The broker takes the last messages for repetitions, and to ask whether they are fails for another reason."""
    job.broker.stolen_after = N // 2
    assert job.runs(1, 1) == [FOREIGN_PRODUCER]
    assert job.arrived() == all_of(1)


@pytest.mark.parametrize("large_row", [1, 2, N - 1])
def test_a_message_of_which_the_broker_has_some_chunks_and_counts_it_as_published_is_sent_under_another_name(
    job: Job, large_row: int
) -> None:
    """The job and the broker were killed between its chunks."""
    job.large_row = large_row
    job.is_killed_after(1, N)
    job.is_killed_after(2, large_row)
    job.broker.last[DESTINATION, job.producer] = sequence_id_of(2, large_row)
    assert job.runs(3, 1, 2, 3) == []
    assert job.arrived() == all_of(1, 2, 3)
    assert {key: one.number for key, one in read_generations(job.folder).items()} == {(DESTINATION, job.producer): 1}
    job.is_killed_after(4, large_row)
    job.broker.last[DESTINATION, f"{job.producer}-1"] = sequence_id_of(4, large_row)
    assert job.runs(5, 4, 5) == []
    assert job.arrived() == all_of(1, 2, 3, 4, 5)


def test_a_large_message_that_has_arrived_last_keeps_its_producers_name(job: Job) -> None:
    job.large_row = 2
    job.is_killed_after(1, N)
    job.is_killed_after(2, 3)
    assert job.runs(3, 1, 2, 3) == []
    assert job.arrived() == all_of(1, 2, 3)
    assert read_generations(job.folder) == {}
