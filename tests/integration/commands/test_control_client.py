"""The client of the control topic, with a real broker, and answers given by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pulsar
import pytest
from delaylake.commands import Ids
from delaylake.message_ids import Outcome

from admin.control import client as control_client
from admin.control.client import ControlClient
from admin.control.requests import ControlError
from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from conf.settings import ControlSettings, Settings
from jobs.open_topics import open_topics
from status.job_status import JobStatus, write_status
from tests.support.clients.repeated import repeat_soon
from tracker.commands.kinds import SKIP
from tracker.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result

ONE = Ids([MessageRef(1, 2)])


@pytest.fixture
def settings(broker: EmbeddedBroker, topic: str, tmp_path: Path) -> Settings:
    control = ControlSettings(topic=f"{topic}_control", outcome_topic=f"{topic}_outcomes")
    return Settings(pulsar=broker.settings, control=control, warehouse=f"file:{tmp_path}")


def test_commands_are_sent_ahead_of_their_answers_but_not_all(
    settings: Settings, pulsar_client: pulsar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "_MESSAGES_AHEAD", 2_000)
    commands = pulsar_client.subscribe(settings.control.topic, "job")
    outcomes = pulsar_client.create_producer(settings.control.outcome_topic)
    given: list[Outcome] = []

    def command() -> ControlCommand:
        message = commands.receive(60_000)
        commands.acknowledge(message)
        return ControlCommand.FromString(message.data())

    def answer(to: ControlCommand) -> None:
        published = ControlOutcome(request_id=to.request_id, ledger_id=-1, entry_id=-1, batch_index=-1)
        published.result = Result.APPLIED
        outcomes.send(published.SerializeToString(), partition_key=to.request_id)

    with ControlClient(settings, "tester") as client:
        messages = [MessageRef(1, i) for i in range(4_500)]
        sending = threading.Thread(target=lambda: given.extend(client.send("t", SKIP, Ids(messages), ["a"], 90)))
        sending.start()
        sent = [command(), command()]
        with pytest.raises(pulsar.Timeout):
            commands.receive(500)
        for _ in range(3):
            answer(sent[-2])
            sent.append(command())
        answer(sent[-2])
        answer(sent[-1])
        sending.join()
    assert [len(c.skip.entries) for c in sent] == [1_000] * 4 + [500]
    assert [outcome.result for outcome in given] == ["APPLIED"] * 5


def test_an_outcome_of_another_producer_than_the_jobs_is_not_believed(
    settings: Settings, pulsar_client: pulsar.Client
) -> None:
    commands = pulsar_client.subscribe(settings.control.topic, "job")
    status = JobStatus(state="running", updated_at=1, started_at=1, outcome_producer="the-jobs-outcomes")
    write_status(settings.warehouse, status)
    forger = pulsar_client.create_producer(settings.control.outcome_topic)
    job = pulsar_client.create_producer(settings.control.outcome_topic, producer_name="the-jobs-outcomes")
    given: list[Outcome] = []
    with ControlClient(settings, "tester") as client:
        sending = threading.Thread(target=lambda: given.extend(client.send("t", SKIP, ONE, ["a"], 90)))
        sending.start()
        asked = ControlCommand.FromString(commands.receive(60_000).data())
        answer = ControlOutcome(request_id=asked.request_id, subscription="a", ledger_id=1, entry_id=2, batch_index=-1)
        answer.result = Result.APPLIED
        forger.send(answer.SerializeToString(), partition_key=asked.request_id)
        answer.result = Result.TOO_LATE
        job.send(answer.SerializeToString(), partition_key=asked.request_id)
        sending.join()
    assert [outcome.result for outcome in given] == ["TOO_LATE"]


def test_topics_on_which_anybody_may_produce_are_found(settings: Settings) -> None:
    """The broker of the tests asks nobody for credentials."""
    topics = [settings.control.topic, settings.control.outcome_topic]
    assert open_topics(settings.pulsar, topics) == topics


def test_a_command_without_an_answer_is_sent_once_more(
    settings: Settings, pulsar_client: pulsar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_soon(monkeypatch)
    commands = pulsar_client.subscribe(settings.control.topic, "job")
    outcomes = pulsar_client.create_producer(settings.control.outcome_topic)
    given: list[Outcome] = []
    with ControlClient(settings, "tester") as client:
        sending = threading.Thread(target=lambda: given.extend(client.send("t", SKIP, ONE, ["a"], 120)))
        sending.start()
        first, again = (ControlCommand.FromString(commands.receive(60_000).data()) for _ in range(2))
        assert first == again
        told = ControlOutcome(request_id=first.request_id, subscription="a", ledger_id=1, entry_id=2, batch_index=-1)
        told.result = Result.APPLIED
        outcomes.send(told.SerializeToString(), partition_key=first.request_id)
        sending.join()
    assert [outcome.result for outcome in given] == ["APPLIED"]


def test_without_an_answer_the_call_ends_with_the_ids_to_look_for(settings: Settings) -> None:
    with ControlClient(settings, "tester") as client, pytest.raises(ControlError, match="no answer within 1 s"):
        list(client.send("t", SKIP, ONE, ["a"], 1))
