"""`delaylake consume` on a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pulsar

from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM, Run
from tests.support.service.harness import now, wait_until


def delivered(due: int, message_id: str = "7:0:-1:-1") -> dict[str, str]:
    """The properties that the job gives a message."""
    return {"delaylake.deliverAt": str(due), "delaylake.messageId": message_id, "color": "red"}


def routed(environment: dict[str, str], topic: str) -> dict[str, str]:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b", "destination": f"{topic}_elsewhere"}]}]
    return environment | {"DELAYLAKE_ROUTES": json.dumps(routes)}


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_the_subscriptions_of_a_source_get_is_printed(
    delaylake_here: Run, broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str
) -> None:
    environment, due = routed(broker_environment, topic), now() - 1_000
    for destination in (f"{topic}-a", f"{topic}_elsewhere"):
        # A subscription keeps what is sent before somebody reads.
        pulsar_client.subscribe(destination, "keeps").close()
        producer = pulsar_client.create_producer(destination)
        producer.send(b"text \x1b[31m", properties=delivered(due), partition_key="k")
        producer.send(b"\xff\x00", properties={"delaylake.deliverAt": "x"})
    both = lines(delaylake_here("consume", topic, "-n", "4", "--since", "1h", "--output", "json", env=environment))
    assert sorted(m["subscription"] for m in both) == ["a", "a", "b", "b"]
    one = lines(
        delaylake_here("consume", topic, "-s", "b", "-n", "2", "--since", "1h", "--output", "json", env=environment)
    )
    assert one == [m for m in both if m["subscription"] == "b"]
    text, binary = one
    assert text["latenessMillis"] == text["arrivedAt"] - due >= 1_000
    del text["arrivedAt"], text["latenessMillis"], binary["arrivedAt"]
    shared = {"topic": f"{topic}_elsewhere", "subscription": "b"}
    assert text == shared | {
        "messageId": "7:0:-1:-1",
        "deliverAt": due,
        "key": "k",
        "properties": delivered(due),
        "payload": "text \x1b[31m",
    }
    unknown = {"messageId": None, "deliverAt": None, "latenessMillis": None, "key": None}
    assert binary == shared | unknown | {"properties": {"delaylake.deliverAt": "x"}, "payloadBase64": "/wA="}
    shown = delaylake_here("consume", topic, "-s", "a", "-n", "2", "--since", "1h", env=environment).stdout.splitlines()
    assert shown[0].split()[-6:] == ["ms", "a", "7:0:-1:-1", "k", "text", "\\x1b[31m"]
    assert shown[1].split()[1:] == ["-", "a", "-", "-", "base64:/wA="]
    wrong = delaylake_here("consume", topic, "-s", "c", env=environment)
    assert wrong.returncode == 2
    assert f"{topic} has no subscription c: there are a, b" in wrong.stderr


def test_of_another_topic_a_subscription_of_pulsar_goes_on_where_it_was(
    delaylake_here: Run,
    broker: EmbeddedBroker,
    broker_environment: dict[str, str],
    pulsar_client: pulsar.Client,
    topic: str,
) -> None:
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(topic, 3)
    for name in ("s", "keeps"):
        pulsar_client.subscribe(topic, name, initial_position=pulsar.InitialPosition.Earliest).close()
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    for i in range(6):
        producer.send(str(i).encode(), partition_key=str(i))
    seen: list[str] = []
    for n in (2, 4):
        command = ("consume", topic, "-s", "s", "-n", str(n), "--output", "json")
        seen += [m["payload"] for m in lines(delaylake_here(*command, env=broker_environment))]
    assert sorted(seen) == [*"012345"]
    command = ("consume", topic, "-n", "6", "--since", "1h", "--output", "json")
    everything = lines(delaylake_here(*command, env=broker_environment))
    assert sorted(m["payload"] for m in everything) == [*"012345"]


def test_it_goes_on_until_a_signal(
    broker_environment: dict[str, str], pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(
            [str(PROGRAM), "consume", topic, "--since", "0s"], env=broker_environment, stdout=out, stderr=out
        )
        producer = pulsar_client.create_producer(topic)

        def printed() -> list[str]:
            return (tmp_path / "out").read_text().splitlines()

        def come() -> bool:  # it begins some time after its start
            producer.send(b"x")
            return len(printed()) > 2

        wait_until(come, 20, "three messages")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert all(line.endswith("  x") for line in printed())
