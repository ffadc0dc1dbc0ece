"""The ways in which a broker refuses what is sent to a destination: each alone, with its name, until it is lifted."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import pulsar
import pyarrow as pa
import pytest

from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.release.task.can_write import can_write
from streaming.release.task.sender import send_releases
from tests.support.clients.tokens import SECRET, token
from tests.support.service.harness import now, wait_until
from tests.support.tracker.messages import messages, release_rows
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.messages import with_columns
from tracker.packing import pack, unpack
from warehouse.message_schemas import SchemaKeeper, version_bytes
from warehouse.routes.known_routes import known_routes

ROWS = 20
NAMESPACE = "namespaces/public/default"


@dataclass
class Cluster:
    """A broker on which the job may do only what it was granted."""

    settings: Settings
    admin: httpx.Client
    client: pulsar.Client

    def path(self, topic: str) -> str:
        return topic.replace("://", "/")

    def make(self, topic: str) -> str:
        self.admin.put(self.path(topic)).raise_for_status()
        self.grant(topic)
        return topic

    def grant(self, topic: str) -> None:
        self.admin.post(f"{self.path(topic)}/permissions/job", json=["produce", "consume"]).raise_for_status()

    def refuse(self, topic: str) -> None:
        self.admin.delete(f"{self.path(topic)}/permissions/job").raise_for_status()

    def terminate(self, topic: str) -> None:
        self.admin.post(f"{self.path(topic)}/terminate").raise_for_status()

    def make_anew(self, topic: str) -> None:
        self.admin.delete(self.path(topic), params={"force": "true"}).raise_for_status()
        self.make(topic)

    def limit(self, topic: str) -> None:
        self.admin.put(f"{self.path(topic)}/subscription/slow").raise_for_status()
        producer = self.client.create_producer(topic)
        producer.send(b"before")
        producer.close()
        quota = {"limitSize": 1, "limitTime": -1, "policy": "producer_exception"}
        self.admin.post(f"{NAMESPACE}/backlogQuota", json=quota).raise_for_status()

    def lift_limit(self, topic: str) -> None:
        self.admin.delete(f"{NAMESPACE}/backlogQuota").raise_for_status()
        self.admin.post(f"{self.path(topic)}/subscription/slow/skip_all").raise_for_status()

    def want_schema(self, topic: str) -> None:
        body = {"type": "AVRO", "schema": json.dumps(ORDER), "properties": {}}
        path = self.path(topic).removeprefix("persistent/")
        self.admin.post(f"schemas/{path}/schema", json=body).raise_for_status()
        self.admin.post(f"{NAMESPACE}/schemaValidationEnforced", json=True).raise_for_status()

    def want_no_schema(self, topic: str) -> None:
        self.admin.post(f"{NAMESPACE}/schemaValidationEnforced", json=False).raise_for_status()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("refusing")
    plugin = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
    broker = EmbeddedBroker(
        folder,
        {
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
            "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
            "superUserRoles": "admin",
            "brokerClientAuthenticationPlugin": plugin,
            "brokerClientAuthenticationParameters": f"token:{token('admin')}",
        },
    )
    files = {}
    for role in ("admin", "job"):
        files[role] = folder / f"{role}.token"
        files[role].write_text(token(role))
    try:
        broker.start(port=0, http_port=0, wait=False)
        of_admin = broker.settings.model_copy(update={"token_file": files["admin"]})
        headers = {"Authorization": f"Bearer {token('admin')}"}
        admin = httpx.Client(base_url=f"{of_admin.admin_url}/admin/v2/", timeout=60, headers=headers)

        def is_ready() -> bool:
            try:
                return admin.get("brokers/health").is_success and admin.get(NAMESPACE).is_success
            except httpx.TransportError:
                return False

        wait_until(is_ready, 60, "the broker is ready")
        client = connect(of_admin)
        of_job = broker.settings.model_copy(update={"token_file": files["job"]})
        yield Cluster(Settings(pulsar=of_job, warehouse=f"file:{folder}/warehouse"), admin, client)
        client.close()
        admin.close()
    finally:
        broker.kill()


def release(
    topic: str,
    payloads: list[bytes],
    partitions: dict[str, int] | None = None,
    due: list[int] | None = None,
    key: str | None = None,
    without_value: int | None = None,
    with_large_properties: int | None = None,
) -> Assignment:
    """A release.

    Args:
        without_value: the row that has a property without a value.
        with_large_properties: the row that has more bytes of properties than a chunk may have.
    """
    times = due or [now()] * len(payloads)
    rows = messages([(1, i, time) for i, time in enumerate(times)], topic=topic, key=key)
    properties: list[list[tuple[str, str | None]]] = [[] for _ in payloads]
    if without_value is not None:
        properties[without_value] = [("region", None)]
    if with_large_properties is not None:
        properties[with_large_properties] = [("large", "x" * (3 << 20))]
    rows = with_columns(
        rows, payload=pa.array(payloads), properties=pa.array(properties, rows.schema.field("properties").type)
    )
    sending = {"lanes": 1, "partitions": partitions or {}, "batch_millis": 5}
    return Assignment("app", 0, 1, True, pack(release_rows(rows, 3, json.dumps(sending))))


def send(settings: Settings, attempt: Attempt, what: Assignment) -> SendReport:
    return next(send_releases(settings.model_dump_json(), attempt, [what]))


def delivered(sent: SendReport) -> dict[str, int]:
    names = unpack(sent.deliveries)["subscription"].to_pylist()
    return {name: names.count(name) for name in set(names)}


def reader_of(client: pulsar.Client, topic: str) -> pulsar.Reader:
    for _ in range(3):
        with contextlib.suppress(pulsar.Timeout):  # one that was terminated just now may not answer a first time
            return client.create_reader(topic, pulsar.MessageId.earliest)
    return client.create_reader(topic, pulsar.MessageId.earliest)


def received(client: pulsar.Client, topic: str) -> list[bytes]:
    reader, found = reader_of(client, topic), []
    while reader.has_message_available():
        found.append(reader.read_next(60_000).data())
    with contextlib.suppress(pulsar.NotConnected):  # a topic that is terminated may be unloaded just now
        reader.close()
    return found


Change = Callable[[Cluster, str], None]

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
OTHER = {"type": "record", "name": "Order", "fields": [{"name": "to", "type": "string"}]}
NO_SCHEMA = "messages without a schema"


class Registry:
    """Schemas of a source topic."""

    def __init__(self, schemas: list[tuple[str, str, dict[str, str]]]) -> None:
        self._schemas = schemas

    def schema(self, topic: str, version: int) -> tuple[str, str, dict[str, str]]:
        return self._schemas[version]


def is_refused_without_schema(cluster: Cluster, topic: str) -> bool:
    try:
        cluster.client.create_producer(topic).close()
    except pulsar.IncompatibleSchema:
        return True
    return False


@pytest.mark.parametrize(
    ("refuse", "lift", "reason"),
    [
        (Cluster.terminate, Cluster.make_anew, "TopicTerminated"),
        (Cluster.limit, Cluster.lift_limit, "QuotaExceeded"),
        (Cluster.refuse, Cluster.grant, "Authorization"),
    ],
    ids=["terminated", "quota", "no-rights"],
)
def test_one_destination_is_refused_and_named_the_other_goes_on_and_it_is_made_up_for(
    cluster: Cluster, topic: str, refuse: Change, lift: Change, reason: str
) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in "ab"]}]).routes}  # type: ignore[arg-type]
    )
    refused, well = cluster.make(f"{topic}-a"), cluster.make(f"{topic}-b")
    what = release(topic, [f"{i}".encode() for i in range(ROWS)])
    refuse(cluster, refused)
    try:
        # A change of policies takes the broker some moments.
        wait_until(lambda: reason in next(can_write(settings.model_dump_json(), [refused])), 30, "it is refused")
        sent = send(settings, Attempt(), what)
        assert delivered(sent) == {"b": ROWS}
        assert {(one.recipient, one.is_refused) for one in sent.failed} == {((topic, "a"), True)}
        assert all(reason in one.reason for one in sent.failed), sent.failed
    finally:
        lift(cluster, refused)
    wait_until(lambda: not next(can_write(settings.model_dump_json(), [refused])), 10, "it can be written again")
    again = send(settings, Attempt(only=frozenset({(topic, "a")}), done=frozenset(sent.done)), what)
    assert (delivered(again), again.failed) == ({"a": ROWS}, ())
    for destination in (refused, well):
        found = [payload for payload in received(cluster.client, destination) if payload != b"before"]
        assert found == [f"{i}".encode() for i in range(ROWS)]


def test_only_messages_of_which_a_destination_refuses_the_schema_are_rejected_and_the_reason_names_it(
    cluster: Cluster, topic: str
) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": "a"}]}]).routes}  # type: ignore[arg-type]
    )
    refused, rejects = (cluster.make(f"{topic}-{name}") for name in ("a", "rejects"))
    registry = Registry([("AVRO", json.dumps(ORDER), {}), ("STRING", "", {}), ("AVRO", json.dumps(OTHER), {})])
    keeper = SchemaKeeper(settings.warehouse, registry)  # type: ignore[arg-type]
    for version in range(3):
        keeper.keep(topic, version_bytes(version), topic)
    # The destination's schema, another type's, none, one that its own does not fit, and one that no table has.
    versions = [0, 1, None, 0, 2, 9, 0]
    what = release(topic, [f"{i}".encode() for i in range(len(versions))])
    column = pa.array([None if one is None else version_bytes(one) for one in versions], pa.binary())
    what = replace(what, body=pack(with_columns(unpack(what.body), schema_version=column)))
    cluster.want_schema(refused)
    taken = [i for i, one in enumerate(versions) if one == 0]
    try:
        wait_until(lambda: is_refused_without_schema(cluster, refused), 30, "it is refused")
        for attempt in (Attempt(is_first=True), Attempt()):  # the second as after a crash before it was written down
            sent = send(settings, attempt, what)
            assert sent.failed == ()
            assert received(cluster.client, refused) == [f"{i}".encode() for i in taken]
            found = {row["entry_id"]: row["reason"] for row in unpack(sent.refused[1, True]).to_pylist()}
            assert sorted(found) == [i for i in range(len(versions)) if i not in taken]
            of_refused = [f"{refused} does not take {what} of {topic}: " for what in ("schema version 1", NO_SCHEMA)]
            assert of_refused[0] in found[1]
            assert of_refused[1] in found[2]
            assert "schema version 9" in found[5]
            assert found[1].startswith(f"{NOT_DELIVERED}a: ")
            wait_until(lambda: not next(can_write(settings.model_dump_json(), [refused])), 10, "it takes others")
    finally:
        cluster.want_no_schema(refused)
    others = [f"{i}".encode() for i in range(len(versions)) if i not in taken]
    assert sorted(received(cluster.client, rejects)) == others


def test_what_arrived_before_its_schema_was_refused_is_not_rejected_when_it_is_sent_again(
    cluster: Cluster, topic: str
) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": "a"}]}]).routes}  # type: ignore[arg-type]
    )
    there = cluster.make(f"{topic}-a")
    cluster.make(f"{topic}-rejects")
    begin = now()
    payloads = [f"{i}".encode() for i in range(ROWS)]
    what = release(topic, payloads, due=[begin + i for i in range(ROWS)])
    first = replace(what, body=pack(unpack(what.body).slice(0, 5)))
    send(settings, Attempt(is_first=True), first)
    cluster.want_schema(there)
    try:
        wait_until(lambda: is_refused_without_schema(cluster, there), 30, "it is refused")
        sent = send(settings, Attempt(), what)
    finally:
        cluster.want_no_schema(there)
    assert sent.failed == ()
    assert delivered(sent) == {"a": 5}
    assert sorted(unpack(sent.refused[1, True])["entry_id"].to_pylist()) == list(range(5, ROWS))
    assert received(cluster.client, there) == payloads[:5]


def test_what_was_handed_out_to_a_subscription_that_is_gone_is_rejected_once_and_the_others_get_theirs(
    cluster: Cluster, topic: str
) -> None:
    before, after = (
        Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in names]}])  # type: ignore[arg-type]
        for names in ("ab", "b")
    )
    settings = cluster.settings.model_copy(update={"routes": after.routes})
    well, rejects = (cluster.make(f"{topic}-{name}") for name in ("b", "rejects"))
    rows = with_columns(messages([(1, i, now()) for i in range(3)], topic=topic), payload=pa.array([b"0", b"1", b"2"]))
    sending = Offset(routes=known_routes(before).to_json()).to_tick().sending
    what = Assignment("app", 0, 1, True, pack(release_rows(rows, 3, sending)))
    for _ in range(2):  # as after a crash before it was written down
        sent = send(settings, Attempt(), what)
        assert (sent.failed, delivered(sent)) == ((), {"b": 3})
        gone = unpack(sent.refused[1, True])
        assert gone["entry_id"].to_pylist() == [0, 1, 2]
        assert set(gone["subscription"].to_pylist()) == {"a"}
        assert all("no longer have the subscription" in reason for reason in gone["reason"].to_pylist())
    assert not send(settings, Attempt(done=frozenset(sent.done)), what).refused
    assert received(cluster.client, well) == received(cluster.client, rejects) == [b"0", b"1", b"2"]


def test_dead_letters_are_refused_alone_and_are_kept_when_they_have_arrived(cluster: Cluster, topic: str) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in "ab"]}]).routes}  # type: ignore[arg-type]
    )
    for name in "ab":
        cluster.make(f"{topic}-{name}")
    dead = {name: cluster.make(f"{topic}-{name}-dlq") for name in "ab"}
    what = release(topic, [f"{i}".encode() for i in range(4)])
    attempts = {"attempt": pa.array([None, 6, 6, 1], pa.int32())}
    what = replace(what, body=pack(with_columns(unpack(what.body), **attempts)))
    cluster.terminate(dead["a"])
    sent = send(settings, Attempt(), what)
    assert delivered(sent) == {"a": 2, "b": 4}
    assert {(one.recipient, one.reason.partition(":")[0]) for one in sent.failed} == {
        ((topic, "a dlq"), "TopicTerminatedError")
    }
    cluster.make_anew(dead["a"])
    again = send(settings, Attempt(only=frozenset({(topic, "a dlq")}), done=frozenset(sent.done)), what)
    assert (delivered(again), again.failed) == ({"a": 2}, ())
    for name in "ab":
        assert received(cluster.client, f"{topic}-{name}") == [b"0", b"3"]
        stats = cluster.admin.get(f"{cluster.path(dead[name])}/stats").json()["subscriptions"]
        assert {name: one["msgBacklog"] for name, one in stats.items()} == {"delaylake-redrive": 2}


def test_a_destination_that_is_terminated_amid_a_release_and_made_anew_gets_the_rest_only(
    cluster: Cluster, topic: str
) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in "ab"]}]).routes}  # type: ignore[arg-type]
    )
    refused, well = cluster.make(f"{topic}-a"), cluster.make(f"{topic}-b")
    begin = now() + 1_000
    what = release(topic, [f"{i}".encode() for i in range(ROWS)], due=[begin + 50 * i for i in range(ROWS)])
    terminate = threading.Timer((begin + 25 * ROWS - now()) / 1000, cluster.terminate, [refused])
    terminate.start()
    sent = send(settings, Attempt(patience_seconds=2), what)
    terminate.join()
    assert delivered(sent) == {"b": ROWS}
    first = received(cluster.client, refused)
    assert 0 < len(first) < ROWS
    cluster.make_anew(refused)
    arrived_to = {(one.topic, one.producer): one.arrived_to for one in sent.failed}
    again = send(
        settings, Attempt(only=frozenset({(topic, "a")}), done=frozenset(sent.done), arrived_to=arrived_to), what
    )
    assert (delivered(again), again.failed) == ({"a": ROWS}, ())
    assert first + received(cluster.client, refused) == [f"{i}".encode() for i in range(ROWS)]
    assert received(cluster.client, well) == [f"{i}".encode() for i in range(ROWS)]


def test_one_partition_of_a_destination_is_refused_and_made_up_for_and_the_other_gets_nothing_twice(
    cluster: Cluster, topic: str
) -> None:
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in "ab"]}]).routes}  # type: ignore[arg-type]
    )
    there, _ = f"{topic}-a", cluster.make(f"{topic}-b")
    cluster.admin.put(f"{cluster.path(there)}/partitions", json=2).raise_for_status()
    cluster.grant(there)
    well, refused = (f"{there}-partition-{i}" for i in range(2))
    what = release(topic, [f"{i}".encode() for i in range(ROWS)], {there: 2})
    cluster.terminate(refused)
    sent = send(settings, Attempt(), what)
    assert {(one.topic, one.recipient, one.is_refused) for one in sent.failed} == {(refused, (topic, "a"), True)}
    first = set(received(cluster.client, well))
    assert delivered(sent) == {"a": len(first), "b": ROWS}
    assert 0 < len(first) < ROWS

    cluster.admin.delete(cluster.path(refused), params={"force": "true"}).raise_for_status()
    again = send(settings, Attempt(only=frozenset({(topic, "a")}), done=frozenset(sent.done)), what)
    assert (delivered(again), again.failed) == ({"a": ROWS - len(first)}, ())
    assert len(received(cluster.client, well)) == len(first)
    assert {*received(cluster.client, refused)} == {f"{i}".encode() for i in range(ROWS)} - first


@pytest.mark.parametrize("key", [None, "k"], ids=["in batches", "with a key, each alone"])
def test_messages_that_the_broker_or_the_client_can_not_take_go_to_the_rejects_topic_once_and_the_others_arrive(
    cluster: Cluster, topic: str, key: str | None
) -> None:
    """One is too large, one has a property without a value; with a key they have the producer of the others.

    A payload alone does not make a message too large, as it is sent in chunks: the properties do, which each chunk has.
    """
    settings = cluster.settings.model_copy(
        update={"routes": Settings(routes=[{"source": topic, "subscriptions": [{"name": n} for n in "ab"]}]).routes}  # type: ignore[arg-type]
    )
    for name in ("a", "b", "rejects"):
        cluster.make(f"{topic}-{name}")
    payloads = [b"x" * (6 << 20) if i == 3 else f"{i}".encode() for i in range(ROWS)]
    what = release(topic, payloads, key=key, without_value=5, with_large_properties=3)
    for _ in range(2):  # as after a crash before it was written down
        sent = send(settings, Attempt(), what)
        assert sent.failed == ()
        assert delivered(sent) == {"a": ROWS - 2, "b": ROWS - 2}
        refused = unpack(sent.refused[1, True])
        reasons = dict(zip(refused["entry_id"].to_pylist(), refused["reason"].to_pylist(), strict=True))
        assert refused.num_rows == 4
        assert all(text.startswith(NOT_DELIVERED) for text in reasons.values())
        assert "MessageTooBig" in reasons[3]
        assert "the property 'region' has no value" in reasons[5]
    for name in ("a", "b"):
        assert received(cluster.client, f"{topic}-{name}") == [f"{i}".encode() for i in range(ROWS) if i not in (3, 5)]
    assert len(received(cluster.client, f"{topic}-rejects")) == 4
