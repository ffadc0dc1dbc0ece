"""`delaylake produce` on a real broker."""

from __future__ import annotations

import json
import re

import pulsar

from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.conftest import Run

READ_TIMEOUT_MILLIS = 10_000


def read(client: pulsar.Client, topic: str, count: int) -> list[pulsar.Message]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    messages = [reader.read_next(READ_TIMEOUT_MILLIS) for _ in range(count)]
    assert not reader.has_message_available()
    reader.close()
    return messages


def shown_id(message: pulsar.Message) -> str:
    id = message.message_id()
    return f"{id.ledger_id()}:{id.entry_id()}:{id.partition()}:{id.batch_index()}"


def routed(environment: dict[str, str], topic: str) -> dict[str, str]:
    """The environment with a route for the topic."""
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    return environment | {"DELAYLAKE_ROUTES": json.dumps(routes)}


def test_each_message_is_sent_with_its_key_properties_and_delay(
    delaylake_here: Run, broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str
) -> None:
    options = ["--deliver-after", "1.5m", "--key", "k", "--property", "a=b=c", "--property", "empty="]
    done = delaylake_here(
        "produce", topic, "-m", "one", "-m", "zwei ✓", *options, env=routed(broker_environment, topic)
    )
    assert (done.returncode, done.stderr) == (0, "")
    messages = read(pulsar_client, topic, 2)
    assert [message.data().decode() for message in messages] == ["one", "zwei ✓"]
    assert done.stdout.splitlines() == [shown_id(message) for message in messages]
    for message in messages:
        assert message.partition_key() == "k"
        assert message.properties() == {"a": "b=c", "empty": "", "deliverAfter": "90000"}


def test_a_time_becomes_millis_since_the_epoch(
    delaylake_here: Run, broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str
) -> None:
    for text in ("2030-01-31T13:00:00+01:00", "1896091200000"):
        assert delaylake_here("produce", topic, "-m", "x", "--deliver-at", text, env=broker_environment).returncode == 0
    assert [message.properties() for message in read(pulsar_client, topic, 2)] == [{"deliverAt": "1896091200000"}] * 2


def test_many_are_an_entry_each_and_come_in_order(
    delaylake_here: Run, broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str
) -> None:
    done = delaylake_here("produce", topic, "-n", "2500", "--output", "json", env=routed(broker_environment, topic))
    assert (done.returncode, done.stderr) == (0, "")
    ids = json.loads(done.stdout)
    messages = read(pulsar_client, topic, 2500)
    assert [message.data().decode() for message in messages] == [f"message-{number}" for number in range(1, 2501)]
    assert ids == [shown_id(message) for message in messages]
    assert len({id.rsplit(":", 2)[0] for id in ids}) == 2500
    assert messages[0].properties() == {}


def test_who_sends_where_nobody_delivers_is_warned(
    delaylake_here: Run, broker_environment: dict[str, str], topic: str
) -> None:
    done = delaylake_here("produce", topic, "-m", "x", env=routed(broker_environment, f"{topic}_other"))
    assert done.returncode == 0
    assert done.stderr == f"warning: no route in the settings is for {topic}: nobody delivers what is sent there\n"


def test_the_texts_are_sent_over_and_over(
    delaylake_here: Run, broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str
) -> None:
    assert delaylake_here("produce", topic, "-m", "a", "-m", "b", "-n", "5", env=broker_environment).returncode == 0
    assert b"".join(message.data() for message in read(pulsar_client, topic, 5)) == b"ababa"


def test_a_batch_shares_its_entry(delaylake_here: Run, broker_environment: dict[str, str], topic: str) -> None:
    done = delaylake_here("produce", topic, "-n", "3", "--batch", env=broker_environment)
    ids = [line.split(":") for line in done.stdout.splitlines()]
    assert [id[3] for id in ids] == ["0", "1", "2"]
    assert len({id[1] for id in ids}) == 1


def test_an_id_names_the_partition(
    delaylake_here: Run, broker: EmbeddedBroker, broker_environment: dict[str, str], topic: str
) -> None:
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(topic, 2)
    done = delaylake_here("produce", topic, "-n", "4", env=broker_environment)
    assert sorted(line.split(":")[2] for line in done.stdout.splitlines()) == ["0", "0", "1", "1"]


def test_a_topic_that_cannot_be_is_one_line(delaylake_here: Run, broker_environment: dict[str, str]) -> None:
    for topic in ("persistent://public/nowhere/x", "persistent://public"):
        done = delaylake_here("produce", topic, "-m", "x", env=broker_environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(rf"error: can't send to {topic} .*\n", done.stderr)


def test_a_broker_that_is_not_there_is_one_line(delaylake_here: Run) -> None:
    done = delaylake_here("produce", "x", "-m", "x", env={"DELAYLAKE_PULSAR__SERVICE_URL": "pulsar://127.0.0.1:1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: can't send to x by pulsar://127.0.0.1:1: .*is the broker up.*\n", done.stderr)
