"""`skip/{n}` with a job that is a few lines: it tells what became of each message that a command names."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from delaylake.control import ControlRequest
from delaylake.message_ids import MessageId, Outcome
from starlette.testclient import TestClient

from admin.app import create_app
from conf.settings import Settings
from tests.support.tracker.messages import messages
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import to_index

pytestmark = pytest.mark.slow

TOPIC = "persistent://public/default/orders"
SUBSCRIPTION = "/admin/v2/persistent/public/default/orders/subscription/a"
TOLD = {"Prefer": "return=representation"}
DUE = time.time_ns() // 1_000_000 + 3_600_000
N = 20

Fate = Callable[[int], str]


class FakeControl:
    """Answers commands as a job would.

    Args:
        fate: by entry id the result of skipping it.
        n_partitions: of the topic; 0: it is not partitioned.
    """

    is_connected = True

    def __init__(self, fate: Fate, n_partitions: int = 0) -> None:
        self._fate = fate
        self._n_partitions = n_partitions
        self.named: list[int] = []

    def partitions(self, topic: str) -> list[str]:
        return [f"{topic}-partition-{i}" for i in range(self._n_partitions)] or [topic]

    async def send_ahead(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> AsyncIterator[Outcome]:
        for request in requests:
            assert list(request.command.subscriptions) == ["a"]
            for entry in request.command.skip.entries:
                self.named.append(entry.entry_id)
                result = self._fate(entry.entry_id)
                yield Outcome("a", MessageId(-1, -1), result, "", result in ("APPLIED", "ALREADY_APPLIED"))


@contextmanager
def api(
    folder: Path, fate: Fate, partition: int = -1, timeout: int = 10_000, waits: bool = True
) -> Iterator[tuple[TestClient, FakeControl]]:
    """An API with N messages that wait, due a millisecond apart, in one entry each; those of odd entries came first."""
    subscriptions = [{"name": "a"}, {"name": "b"}, {"name": "x", "type": "Exclusive"}]
    settings = Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}",
            "api": {"answer_timeout_millis": timeout},
            "routes": [{"source": TOPIC, "subscriptions": subscriptions}],
        }
    )
    tables = Tables(settings.warehouse)
    tables.create()
    for number, entries in enumerate([range(1, N, 2), range(0, N, 2)] if waits else []):
        rows = messages([(1, i, DUE + i) for i in entries], topic=TOPIC)
        rows = rows.set_column(1, rows.schema.field(1), pa.array([partition] * rows.num_rows, pa.int32()))
        tables.append("delayed_index", to_index(rows, 1), {"test": number + 1})
    control = FakeControl(fate, partition + 1)
    app = create_app(settings)
    with TestClient(app, base_url="http://localhost") as client:
        app.state.control = control
        yield client, control


@pytest.mark.parametrize(
    "path",
    [
        SUBSCRIPTION,
        "/admin/persistent/public/local/default/orders/subscription/a",
        "/admin/v1/persistent/public/local/default/orders/subscription/a",
    ],
)
def test_the_next_n_are_skipped(tmp_path: Path, path: str) -> None:
    with api(tmp_path, lambda entry: "APPLIED") as (client, control):
        answer = client.post(f"{path}/skip/5")
        assert (answer.status_code, answer.content) == (204, b"")
        assert control.named == [0, 1, 2, 3, 4]


def test_what_is_handed_out_or_was_skipped_before_does_not_count(tmp_path: Path) -> None:
    """A second call comes before the first one's rows are in the table."""
    fates = dict.fromkeys(range(3), "TOO_LATE") | {3: "ALREADY_APPLIED", 5: "NOT_FOUND"}
    with api(tmp_path, lambda entry: fates.get(entry, "APPLIED")) as (client, control):
        answer = client.post(f"{SUBSCRIPTION}/skip/4", headers=TOLD)
        assert answer.status_code == 200
        assert answer.json() == {"applied": 4, "tooLate": 3, "alreadyApplied": 1, "notFound": 1}
        assert control.named == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("n", [N, N + 1, 2**31 - 1, 2**63 - 1])
def test_where_fewer_wait_all_are_skipped(tmp_path: Path, n: int) -> None:
    with api(tmp_path, lambda entry: "TOO_LATE" if entry == 7 else "APPLIED") as (client, control):
        answer = client.post(f"{SUBSCRIPTION}/skip/{n}", headers=TOLD)
        assert answer.json() == {"applied": N - 1, "tooLate": 1}
        assert control.named == list(range(N))


def test_what_is_within_the_lookahead_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "admin.rest.pending_api.known_status",
        lambda warehouse: SimpleNamespace(lookahead_millis=DUE + 6 - time.time_ns() // 1_000_000),
    )
    with api(tmp_path, lambda entry: "APPLIED") as (client, control):
        assert client.post(f"{SUBSCRIPTION}/skip/2").status_code == 204
        assert control.named[0] >= 6


def test_of_a_partitioned_topic_a_partition_is_to_be_named(tmp_path: Path) -> None:
    with api(tmp_path, lambda entry: "APPLIED", partition=3) as (client, control):
        whole = client.post(f"{SUBSCRIPTION}/skip/5")
        assert (whole.status_code, whole.json()["reason"]) == (405, "the topic is partitioned: name a partition")
        other = client.post(f"{SUBSCRIPTION.replace('orders', 'orders-partition-2')}/skip/5")
        assert (other.status_code, control.named) == (204, [])
        assert client.post(f"{SUBSCRIPTION.replace('orders', 'orders-partition-3')}/skip/2").status_code == 204
        assert control.named == [0, 1]


def test_a_partition_that_there_is_not_is_not_found(tmp_path: Path) -> None:
    with api(tmp_path, lambda entry: "APPLIED", partition=3) as (client, control):
        for name in ("orders-partition-4", "orders-partition-03"):
            orders = SUBSCRIPTION.replace("orders", name).removesuffix("/subscription/a")
            calls = [
                "/cancelDelayedMessage?ledgerId=1&entryId=2&deliverAt=3",
                "/acknowledgeMessage?ledgerId=1&entryId=2",
            ]
            for call in [*calls, "/subscription/a/skip/2", "/subscription/a/pause", "/subscription/a/cancel"]:
                answer = client.post(orders + call, json={"filter": {}} if call.endswith("/cancel") else None)
                assert (answer.status_code, "no such topic" in answer.text) == (404, True), call
        assert control.named == []


def test_a_partitioned_topic_of_which_nothing_is_known_has_to_be_named_by_partition(tmp_path: Path) -> None:
    orders = SUBSCRIPTION.removesuffix("/subscription/a")
    protobuf = {"Accept": "application/x-protobuf"}
    with api(tmp_path, lambda entry: "APPLIED", partition=3, waits=False) as (client, _):
        for answer in (
            client.post(f"{SUBSCRIPTION}/skip/5"),
            client.get(f"{orders}/getMessageIdByIndex?index=0"),
            client.get(f"{orders}/delayed", headers=protobuf),
        ):
            assert (answer.status_code, answer.json()["reason"]) == (405, "the topic is partitioned: name a partition")
    with api(tmp_path / "whole", lambda entry: "APPLIED", waits=False) as (client, _):
        assert client.post(f"{SUBSCRIPTION}/skip/5").status_code == 204
        assert client.get(f"{orders}/getMessageIdByIndex?index=0").status_code == 404
        assert client.get(f"{orders}/delayed", headers=protobuf).status_code == 200


def test_cumulative_types_bodies_and_nothing(tmp_path: Path) -> None:
    with api(tmp_path, lambda entry: "APPLIED") as (client, control):
        assert client.post(f"{SUBSCRIPTION[:-1]}x/skip/5").status_code == 405
        assert client.post(f"{SUBSCRIPTION}/skip/5", json={"1": "2"}).status_code == 400
        assert client.post(f"{SUBSCRIPTION}/skip/00").status_code == 204
        for nothing in ("", "{}", "null"):
            assert client.post(f"{SUBSCRIPTION}/skip/0", content=nothing).status_code == 204
        assert client.post(f"{SUBSCRIPTION}/skip/0", headers=TOLD).json() == {"outcomes": []}
        assert client.post(f"{SUBSCRIPTION[:-1]}nobody/skip/0").status_code == 404
        assert control.named == []


def test_with_more_handed_out_than_there_is_time_for_it_says_how_far_it_came(tmp_path: Path) -> None:
    with api(tmp_path, lambda entry: "TOO_LATE" if entry else "APPLIED", timeout=1) as (client, _):
        answer = client.post(f"{SUBSCRIPTION}/skip/2")
        assert answer.status_code == 504
        assert answer.json()["reason"].startswith("1 of 2 ")
