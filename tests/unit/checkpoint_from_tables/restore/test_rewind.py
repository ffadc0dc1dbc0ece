"""From where the source topics are read again, by a broker that notes what it is asked to reset."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from broker.clusters.new_cluster import NewClusterError
from broker.position import START, Position
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from checkpoint_from_tables.new_checkpoint import RebuildError, rebuild_checkpoint
from checkpoint_from_tables.rebuild.context import Reports
from checkpoint_from_tables.restore.rewind import ConnectedError, check_alone, check_broker, read_from, rewind
from conf.settings import Settings
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.crash_recovery import begin
from tests.support.warehouse.rebuilt import without_destinations
from tests.support.warehouse.tables import NOW, TOPIC, make, rows
from tracker.messages import FIRST_IMPORTED_LEDGER
from warehouse.backup.copying import BackupError, back_up
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow

MINUTE = 60_000
CONTROL = "persistent://public/default/delaylake-control"


@dataclass
class Admin:
    """As AdminClient, of topics that are not partitioned."""

    topics: dict[str, TopicLedgers]
    published_at: dict[tuple[int, int], int] = field(default_factory=dict)  # of the control topic's entries
    producer: str | None = None
    connected: list[str] = field(default_factory=list)
    resets: list[tuple[str, object]] = field(default_factory=list)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def partitions(self, topic: str) -> int | None:
        return 0 if topic in self.topics else None

    def internal_stats(self, name: str) -> TopicLedgers | None:
        return self.topics.get(name)

    def connections(self, name: str, subscription: str) -> list[str]:
        return self.connected if name == TOPIC else []

    def entry_metadata(self, name: str, ledger: int, entry: int) -> BrokerEntry | None:
        at = self.published_at.get((ledger, entry))
        return None if at is None else BrokerEntry(1, at, self.producer, None, {}, False, False)

    def reset_to_entry(self, name: str, subscription: str, ledger: int, entry: int) -> None:
        self.resets.append((name, Position(ledger, entry)))

    def reset_to_time(self, name: str, subscription: str, at: int) -> None:
        self.resets.append((name, at))


def of(acknowledged: tuple[int, int], **ledgers: int) -> TopicLedgers:
    entries = {int(name[1:]): n for name, n in ledgers.items()}
    return TopicLedgers(entries, {"delaylake": acknowledged}, {}, (max(entries), 9))


def resets(settings: Settings, tables: Tables, admin: Admin, durable: dict[str, Position]) -> list[tuple[str, object]]:
    with mock.patch("checkpoint_from_tables.restore.rewind.AdminClient", return_value=admin):
        check_alone(settings)
        check_broker(settings, tables, durable)
        rewind(settings, tables, durable, NOW)
    return admin.resets


@pytest.fixture
def copy(tmp_path: Path) -> tuple[Settings, Tables]:
    """A backup with an entry a minute, of which the last is 7:19."""
    made, tables = make(tmp_path)
    entries = [
        {"ledger_id": 7, "entry_id": i, "publish_time": NOW + (i - 19) * MINUTE, "producer_name": "p"}
        for i in range(10, 20)
    ]
    entries.append({"ledger_id": FIRST_IMPORTED_LEDGER, "entry_id": 1, "publish_time": NOW - 60 * MINUTE})
    entries.append({"ledger_id": 9, "entry_id": 1, "publish_time": NOW - 60 * MINUTE, "partition": 0})
    tables.append("entries", rows("entries", entries), {})
    return made, tables


def test_a_topic_is_read_again_from_before_what_can_be_a_part_of_a_message(copy: tuple[Settings, Tables]) -> None:
    settings, tables = copy
    assert read_from(tables, TOPIC, -1, Position(7, 19)) == (7, 16)
    assert read_from(tables, TOPIC, 0, Position(9, 1)) == START, "there is nothing earlier"
    assert read_from(tables, TOPIC, 1, START) == START
    after = Admin({TOPIC: of((7, 50), _7=60)})
    assert resets(settings, tables, after, {TOPIC: Position(7, 19)}) == [(TOPIC, Position(7, 16))]
    assert resets(settings, tables, Admin({TOPIC: of((7, 50), _7=60)}), {}) == [(TOPIC, 0)]


def test_nothing_is_passed_over(copy: tuple[Settings, Tables]) -> None:
    settings, tables = copy
    behind = Admin({TOPIC: of((7, 12), _7=60), CONTROL: of((3, 4), _3=9)}, {(3, 4): NOW - 60 * MINUTE})
    assert resets(settings, tables, behind, {TOPIC: Position(7, 19)}) == [], "commands wait, and so do messages"
    assert resets(settings, tables, Admin({}), {TOPIC: Position(7, 19)}) == []


@pytest.mark.parametrize("acknowledged", [(3, 4), (5, -1)])
def test_commands_since_then_come_again(copy: tuple[Settings, Tables], acknowledged: tuple[int, int]) -> None:
    admin = Admin({CONTROL: of(acknowledged, _3=5, _4=0)}, {(3, 4): NOW + MINUTE})
    assert resets(*copy, admin, {}) == [(CONTROL, NOW - 15 * MINUTE)]


def test_it_is_refused_beside_a_job_and_with_another_broker(copy: tuple[Settings, Tables]) -> None:
    with pytest.raises(ConnectedError, match="a job still reads it"):
        resets(*copy, Admin({TOPIC: of((7, 50), _7=60)}, connected=["127.0.0.1:1"]), {})
    other = Admin({TOPIC: of((3, 5), _3=6)})
    with pytest.raises(NewClusterError):
        resets(*copy, other, {TOPIC: Position(7, 19)})
    assert other.resets == []


@pytest.mark.parametrize(
    ("producer", "at", "is_another"), [("p", NOW, False), ("p", NOW - MINUTE, False), ("q", NOW, True), ("p", 9, True)]
)
def test_a_broker_with_another_entry_under_the_same_id_is_refused(
    copy: tuple[Settings, Tables], producer: str, at: int, is_another: bool
) -> None:
    admin = Admin({TOPIC: of((7, 12), _7=60)}, {(7, 19): at}, producer)
    with pytest.raises(NewClusterError, match="--another-broker") if is_another else nullcontext():
        resets(*copy, admin, {TOPIC: Position(7, 19)})


def test_another_broker_needs_a_backup_and_settings_that_take_what_was_replicated(
    copy: tuple[Settings, Tables],
) -> None:
    settings, _ = copy
    with pytest.raises(RebuildError, match="replicated: all"):
        rebuild_checkpoint(settings, True, is_another_broker=True)
    everything = settings.model_copy(update={"replicated": "all"})
    with pytest.raises(RebuildError, match="is no backup"):
        rebuild_checkpoint(everything, True, is_another_broker=True)


def test_a_restore_fences_the_job_that_may_come_back_on_the_warehouse_that_was_lost(
    copy: tuple[Settings, Tables], tmp_path: Path
) -> None:
    settings, tables = copy
    tables.take_over(5)
    place = str(tmp_path / "copy")
    back_up(settings, place)
    there = settings.model_copy(update={"warehouse": place, "checkpoint": str(tmp_path / "another")})
    admin, warnings = Admin({TOPIC: of((7, 50), _7=60)}), list[str]()
    with mock.patch("checkpoint_from_tables.restore.rewind.AdminClient", return_value=admin), without_destinations():
        rebuild_checkpoint(there, discards_checkpoint=False, reports=Reports(on_warning=warnings.append))
    assert (admin.resets, warnings) == ([(TOPIC, Position(7, 16))], [])
    with pytest.raises(FencedError):
        tables.append("entries", rows("entries", [{"ledger_id": 7, "entry_id": 20}]), {"job": 9})
    begin(there, Tables(place), Checkpoint(tmp_path / "another"))
    with pytest.raises(BackupError):
        back_up(settings, place)


@pytest.mark.parametrize("topics", [{}, {TOPIC: of((3, 5), _3=6)}], ids=["empty", "of other messages"])
def test_a_restore_in_another_cluster_does_not_touch_the_warehouse_that_was_backed_up(
    copy: tuple[Settings, Tables], tmp_path: Path, topics: dict[str, TopicLedgers]
) -> None:
    settings, tables = copy
    tables.take_over(5)
    place = str(tmp_path / "copy")
    back_up(settings, place)
    there = settings.model_copy(update={"warehouse": place, "checkpoint": str(tmp_path / "another")})
    patched = mock.patch("checkpoint_from_tables.restore.rewind.AdminClient", return_value=Admin(topics))
    with patched, without_destinations(), suppress(NewClusterError):
        rebuild_checkpoint(there, discards_checkpoint=True)
    assert tables.append("entries", rows("entries", [{"ledger_id": 7, "entry_id": 20}]), {}), "no other epoch"
    if topics:
        back_up(settings, place)  # the refused rebuild has left it a backup
