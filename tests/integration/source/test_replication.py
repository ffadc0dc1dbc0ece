"""A topic that Pulsar replicates between two clusters: each cluster's job takes what was published in its own."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.jvm.jars import jars
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from broker.standalone import EmbeddedBroker
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.conftest import RUN_SECONDS

OTHER = "elsewhere"


class Namespace:
    """One of its own, that can be replicated to a cluster which is not there."""

    def __init__(self, http: httpx.Client, name: str, own: str) -> None:
        self._http, self.name, self._own = http, name, own

    def replicate(self, *others: str) -> None:
        # Not before its topics are there: a broker makes none that it can't make at the other cluster.
        answer = self._http.post(f"namespaces/{self.name}/replication", json=[self._own, *others])
        assert answer.is_success, answer.text


@pytest.fixture
def namespace(broker: EmbeddedBroker) -> Iterator[Namespace]:
    with AdminClient(broker.settings) as admin:
        own = admin.broker_configuration()["clusterName"]
    name = f"geo_{uuid.uuid4().hex[:8]}/ns"
    tenant = name.partition("/")[0]
    nowhere = {"serviceUrl": "http://127.0.0.1:1", "brokerServiceUrl": "pulsar://127.0.0.1:1"}
    with httpx.Client(base_url=f"{broker.settings.admin_url}/admin/v2/", timeout=90) as http:

        def put(path: str, content: object) -> None:
            assert http.put(path, json=content).status_code in (200, 204, 409), path

        put(f"clusters/{OTHER}", nowhere)
        put(f"tenants/{tenant}", {"adminRoles": [], "allowedClusters": [own, OTHER]})
        put(f"namespaces/{name}", {"replication_clusters": [own]})
        made = Namespace(http, name, own)
        yield made
        made.replicate()


def test_what_was_published_elsewhere_is_left_out_and_written_down(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, namespace: Namespace
) -> None:
    topic = f"persistent://{namespace.name}/orders"
    here = pulsar_client.create_producer(topic)
    here.send(b"first", properties={"deliverAt": "1"})
    program = [
        "java",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars('broker')}/*",
        str(Path(__file__).parents[2] / "java/Replicated.java"),
    ]
    # The same name is in use in both clusters.
    sent = ["=own", f"{OTHER}=foreign", "=own again", f"{OTHER}=foreign again"]
    subprocess.run([*program, broker.settings.service_url, topic, "app", *sent], check=True, timeout=RUN_SECONDS)
    here.send_async(b"batched", None, properties={"deliverAt": "1"})
    here.flush()
    last = here.send(b"last", properties={"deliverAt": "1"})
    end = Position(last.ledger_id(), last.entry_id())
    namespace.replicate(OTHER)
    with AdminClient(broker.settings) as admin:
        brokers = Brokers(broker.settings)
        receiver = Receiver(
            SourceTopic(topic, topic, -1),
            TopicAccess(
                lambda: brokers.subscribe(topic, "job", max_bytes=1 << 20, max_messages=100),
                TopicQuestions(admin, "job"),
            ),
            START,
            Limits(10_000, 10_000_000),
            Acceptance(0, 5_000_000, takes_replicated=False),
        )
        receiver.start()
        try:
            assert receiver.wait_for(end, 100)
            rows = receiver.rows(START, end).to_pylist()
        finally:
            receiver.stop()
            brokers.close()
    left_out = f"replicated from {OTHER}"
    assert [(row["payload"], row["reason"]) for row in rows] == [
        (b"first", None),
        (b"own", None),
        (None, left_out),
        (b"own again", None),
        (None, left_out),
        (b"batched", None),
        (b"last", None),
    ]
    assert [row["properties"] for row in rows if row["reason"]] == [[], []]
    # No gap: what is left out has its place.
    indexes = [row["first_index"] for row in rows]
    assert indexes == list(range(indexes[0], indexes[0] + 7))
