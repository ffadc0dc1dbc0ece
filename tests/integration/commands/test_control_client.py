"""The client of the control topic, with a real broker, and answers given by hand."""

from __future__ import annotations

import threading

import pulsar
import pytest

from admin.control import client as control_client
from admin.control.client import ControlClient
from admin.control.requests import ControlError, Outcome
from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from conf.settings import ControlSettings, Settings
from tracker.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result


@pytest.fixture
def settings(broker: EmbeddedBroker, topic: str) -> Settings:
    control = ControlSettings(topic=f"{topic}_control", outcome_topic=f"{topic}_outcomes")
    return Settings(pulsar=broker.settings, control=control)


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
        sending = threading.Thread(target=lambda: given.extend(client.skip("t", messages, ["a"], 90)))
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


def test_a_command_without_an_answer_is_sent_once_more(settings: Settings, pulsar_client: pulsar.Client) -> None:
    commands = pulsar_client.subscribe(settings.control.topic, "job")
    outcomes = pulsar_client.create_producer(settings.control.outcome_topic)
    given: list[Outcome] = []
    with ControlClient(settings, "tester") as client:
        sending = threading.Thread(target=lambda: given.extend(client.skip("t", [MessageRef(1, 2)], ["a"], 6)))
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
        list(client.skip("t", [MessageRef(1, 2)], ["a"], 1))
