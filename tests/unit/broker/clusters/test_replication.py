"""Which messages of a replicated topic were published in this cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from broker.client import PulsarError
from broker.clusters import replication
from broker.clusters.replication import NotWantedError, Origins
from broker.pulsar_admin.admin_rest import UnreadableEntryError
from broker.pulsar_admin.silent_producers import SilentProducers
from tests.support.tracker.messages import batches, messages, tick_at
from tracker.messages import concat
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput

TOPIC = "persistent://public/default/orders"


class FakeAdmin:
    """A broker of the cluster `west`.

    Args:
        clusters: between which the topic is replicated.
        origins: by entry the cluster in which it was published.
    """

    def __init__(self, clusters: list[str], origins: dict[int, str] | None = None) -> None:
        self.clusters, self.origins = clusters, origins or {}
        self.asked: list[int] = []
        self.failures = 0
        self.tells_its_name = True
        self.policies = 0

    def replication_clusters(self, topic: str) -> list[str]:
        assert topic == TOPIC
        self.policies += 1
        return self.clusters

    def broker_configuration(self) -> dict[str, str]:
        if not self.tells_its_name:
            raise PulsarError("403")
        return {"clusterName": "west"}

    def entry(self, topic: str, ledger_id: int, entry_id: int) -> tuple[Mapping[str, str], bytes] | None:
        assert topic == f"{TOPIC}-partition-1"
        if self.failures:
            self.failures -= 1
            raise PulsarError("the broker is away")
        self.asked.append(entry_id)
        if entry_id >= 100:
            raise UnreadableEntryError("the broker tells nothing of it")
        if entry_id < 0:
            return None
        origin = self.origins.get(entry_id)
        return ({} if origin is None else {"X-Pulsar-replicated-from": origin}), b""


def origins(admin: Any, waits: list[float] | None = None, gives_up: bool = False) -> Origins:
    def wait(seconds: float) -> bool:
        assert waits is not None
        waits.append(seconds)
        return gives_up

    return Origins(admin, f"{TOPIC}-partition-1", TOPIC, wait)


@pytest.mark.parametrize("clusters", [[], ["west"]])
def test_of_a_topic_of_one_cluster_nothing_is_asked(clusters: list[str]) -> None:
    admin = FakeAdmin(clusters, {1: "east"})
    asked = origins(admin)
    assert [asked.replicated_from("app", 1, entry) for entry in range(3)] == [None] * 3
    assert (admin.asked, admin.policies) == ([], 1)


def test_an_entry_of_a_producer_with_a_name_of_its_own_is_asked_for_once() -> None:
    """The same name may be in use in both clusters."""
    admin = FakeAdmin(["west", "east"], {1: "east"})
    asked = origins(admin)
    assert [asked.replicated_from("app", 1, entry) for entry in (0, 0, 1, 1, 2)] == [None, None, "east", "east", None]
    assert admin.asked == [0, 1, 2]


def test_a_name_that_a_broker_gave_tells_the_cluster() -> None:
    admin = FakeAdmin(["west", "east", "far-east"], {3: "east"})
    asked = origins(admin)
    names = ["west-3-17", "east-3-17", "far-east-3-17", "east-app"]
    assert [asked.replicated_from(name, 1, i) for i, name in enumerate(names)] == [None, "east", "far-east", "east"]
    assert admin.asked == [3]
    assert asked.replicated_from("north-3-17", 1, 4) is None
    assert admin.asked == [3, 4]


def test_where_the_brokers_cluster_is_not_told_every_entry_is_asked_for() -> None:
    admin = FakeAdmin(["west", "east"], {1: "east"})
    admin.tells_its_name = False
    asked = origins(admin)
    assert [asked.replicated_from(name, 1, i) for i, name in enumerate(["west-0-0", "east-0-1"])] == [None, "east"]
    assert admin.asked == [0, 1]


def test_it_waits_for_a_broker_that_is_away_and_guesses_nothing() -> None:
    waits: list[float] = []
    admin = FakeAdmin(["west", "east"], {1: "east"})
    admin.failures = 3
    assert origins(admin, waits).replicated_from("app", 1, 1) == "east"
    assert len(waits) == 3
    admin.failures = 3
    with pytest.raises(NotWantedError):
        origins(admin, waits, gives_up=True).replicated_from("app", 1, 1)
    assert len(waits) == 4


def test_what_the_broker_no_longer_has_is_its_own() -> None:
    assert origins(FakeAdmin(["west", "east"])).replicated_from("app", 1, -1) is None


def test_of_what_the_broker_tells_nothing_is_its_own_and_it_is_soon_asked_no_more() -> None:
    admin = FakeAdmin(["west", "east"], {1: "east"})
    asked = origins(admin)
    places = [("app", 100), ("app", 1), *(("app", 100 + n) for n in range(9)), ("other", 1)]
    assert [asked.replicated_from(name, 1, entry) for name, entry in places] == [None, "east", *[None] * 9, "east"]
    assert admin.asked == [100, 1, 100, 101, 102, 1]


def test_a_producer_is_asked_for_again_after_a_while() -> None:
    now = 0.0
    silent = SilentProducers(lambda: now)
    for _ in range(3):
        assert not silent.is_silent("app")
        silent.add("app")
    assert silent.is_silent("app")
    now = 600.0
    assert not silent.is_silent("app")
    silent.add("app")
    assert silent.is_silent("app")
    now = 1_200.0
    silent.remove("app")
    silent.add("app")
    assert not silent.is_silent("app")


def test_a_change_of_the_policy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin(["west"], {1: "east"})
    asked = origins(admin)
    assert asked.replicated_from("app", 1, 1) is None
    admin.clusters = ["west", "east"]
    monkeypatch.setattr(replication, "_POLICY_SECONDS", 0.0)
    assert asked.replicated_from("app", 1, 1) == "east"


def test_what_is_left_out_is_written_down_and_goes_nowhere() -> None:
    """Its entries are durable, so that they are acknowledged and have their indexes."""
    foreign = batches([(1, 1, 0, 2, 5), (1, 1, 1, 2, 5)], reason="replicated from east", payload=None)
    bad = messages([(1, 2, 5)], reason="deliverAt is no number")
    shard = Shard(MemoryStore(), {"persistent://public/default/t": ["a"]}, 1)
    came = shard.apply(
        tick_at(1, 100),
        TickInput(messages=concat([messages([(1, 0, 5)]), foreign, bad])),
    )
    assert sorted(e for release in came.releases for e in release.rows["entry_id"].to_pylist()) == [0, 2]
    assert came.rejects["entry_id"].to_pylist() == [1, 1, 2]
    assert [came.status[name] for name in ("taken", "rejected", "left_out", "short_notice")] == [4, 1, 2, 1]
    durable = shard.apply(tick_at(2, 200, confirmed=1, durable_through=1), TickInput())
    assert durable.entries["entry_id"].to_pylist() == [0, 1, 2]
    assert durable.entries["batch_size"].to_pylist() == [1, 2, 1]
