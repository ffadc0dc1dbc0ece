"""A rebuild says of which destinations the broker has trimmed what it needed to see, and of no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pyarrow as pa
import pytest

from broker.client import PulsarError
from broker.position import Position
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers
from checkpoint_from_tables.new_checkpoint import RebuildError, rebuild_checkpoint
from checkpoint_from_tables.rebuild.context import DestinationReading, RebuildContext, Reports
from checkpoint_from_tables.rebuild.delivered import Delivered
from checkpoint_from_tables.rebuild.destinations import UnreadableDestinationError, write_missing_deliveries
from checkpoint_from_tables.rebuild.trimmed import warn_of_trimmed
from conf.settings import Settings
from tests.support.servers.fake_destinations import FakeBrokers
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES

ORDERS = "persistent://public/default/orders"
BILLING = f"{ORDERS}-billing"
MINUTE = 60_000
HOUR = 60 * MINUTE
NEEDED = 1_700_000_000_000  # 22:13:20


class FakeAdmin:
    """Topics by their ledgers: (number, entries, when it was made), and how many entries were added since an unload."""

    def __init__(
        self, ledgers: list[tuple[int, int, int]], added: int | None = None, made_at: int | None = None
    ) -> None:
        self.ledgers = ledgers
        self.topic_made_at = made_at
        self.topics: set[str] = set()
        self.added = sum(n for _, n, _ in ledgers) if added is None else added

    def internal_stats(self, partition: str) -> TopicLedgers | None:
        if not self.ledgers:
            return None
        sizes = {ledger: n for ledger, n, _ in self.ledgers}
        return TopicLedgers(sizes, {}, {}, (max(sizes), sizes[max(sizes)] - 1), self.ledgers[-1][2], self.added)

    def entry_metadata(self, partition: str, ledger_id: int, entry_id: int) -> BrokerEntry | None:
        assert entry_id == 0
        [(n, made_at)] = [(n, at) for ledger, n, at in self.ledgers if ledger == ledger_id]
        assert n, "an empty ledger has no entry"
        return BrokerEntry(1, made_at, None, None, {}, False, False)

    def made_at(self, partition: str) -> int | None:
        return self.topic_made_at

    def entry_published_at(self, topic: str, time: int) -> tuple[int, int] | None:
        return None

    def partitions(self, topic: str) -> int | None:
        return 0 if topic in self.topics else None

    def close(self) -> None:
        pass


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    tables = Tables(f"file:{tmp_path}/warehouse")
    tables.create()
    return tables


def delivered(tables: Tables, at: int, destination: str = BILLING, subscription: str = "billing") -> None:
    row = {"topic": ORDERS, "subscription": subscription, "sent_at": at, "destination": destination}
    tables.append("deliveries", pa.Table.from_pylist([row], schema=DELIVERIES), {})


def told(tables: Tables, admin: object, *partitions: str) -> str | None:
    names = partitions or (BILLING,)
    return warn_of_trimmed(cast("AdminClient", admin), tables, names, NEEDED, ORDERS, "billing")


MEANS = "what was sent before then and not written down may come twice; give the namespace a retention"


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_was_trimmed_since_is_told_with_the_time_from_which_on_the_broker_has_it(
    tables: Tables, is_closed: bool
) -> None:
    delivered(tables, NEEDED - HOUR)
    ledgers = [(9, 3, NEEDED + 5 * MINUTE)] + [(12, 0, NEEDED + HOUR)] * is_closed
    assert told(tables, FakeAdmin(ledgers)) == (
        f"{BILLING}: the broker still has it from 2023-11-14 22:18:20 UTC, "
        f"and it is needed from 2023-11-14 22:13:20 UTC: {MEANS}"
    )


def test_nothing_is_told_of_what_reaches_back(tables: Tables) -> None:
    delivered(tables, NEEDED - HOUR)
    # Of the open ledger nothing is trimmed, whenever its first message came.
    assert told(tables, FakeAdmin([(9, 3, NEEDED)])) is None
    assert told(tables, FakeAdmin([(9, 3, NEEDED - 1), (12, 7, NEEDED + HOUR)])) is None
    assert told(tables, FakeAdmin([(9, 3, NEEDED - 1), (12, 0, NEEDED + HOUR)], added=900)) is None


@pytest.mark.parametrize(
    "ledgers",
    [
        [],  # no such topic
        [(9, 0, NEEDED + MINUTE)],
        [(9, 3, NEEDED + MINUTE)],
        [(9, 0, NEEDED - HOUR), (10, 3, NEEDED + HOUR), (12, 0, NEEDED + 2 * HOUR)],
    ],
)
def test_nothing_is_told_of_a_topic_that_has_no_older_messages(
    tables: Tables, ledgers: list[tuple[int, int, int]]
) -> None:
    for _, _, first in [ledger for ledger in ledgers if ledger[1]][:1]:
        delivered(tables, first - MINUTE)  # by a clock that is behind the broker's
    delivered(tables, NEEDED - HOUR, destination=f"{ORDERS}-before")  # when it had another destination
    delivered(tables, NEEDED - HOUR, subscription="audit")
    assert told(tables, FakeAdmin(ledgers)) is None


def test_what_nobody_wrote_down_is_missed_by_the_entries_that_the_broker_counts(tables: Tables) -> None:
    assert told(tables, FakeAdmin([(9, 3, NEEDED + MINUTE)], added=3)) is None
    assert "from 2023-11-14 22:14:20" in str(told(tables, FakeAdmin([(9, 3, NEEDED + MINUTE)], added=4)))


def test_an_open_ledger_that_is_not_the_first_tells_that_there_was_more(tables: Tables) -> None:
    # A broker that was killed counts anew what it adds, and trims at its start what consumers had.
    ledgers = [(9, 3, NEEDED + MINUTE)]
    assert "from 2023-11-14 22:14:20" in str(told(tables, FakeAdmin(ledgers, made_at=NEEDED)))
    assert told(tables, FakeAdmin(ledgers, made_at=NEEDED + MINUTE - 100)) is None


def test_the_partition_that_reaches_back_least_is_named(tables: Tables) -> None:
    first, second = f"{BILLING}-partition-0", f"{BILLING}-partition-1"
    for partition in (first, second):
        delivered(tables, NEEDED - HOUR, destination=partition)
    topics = {
        first: FakeAdmin([(9, 3, NEEDED + HOUR)]),
        second: FakeAdmin([(12, 1, NEEDED + MINUTE)]),
        f"{BILLING}-partition-2": FakeAdmin([(15, 0, NEEDED + 2 * HOUR)]),  # added meanwhile
    }
    admin = mock.Mock(internal_stats=lambda name: topics[name].internal_stats(name), made_at=lambda name: None)
    assert str(told(tables, admin, *topics)).startswith(f"{first}: the broker still has it from 2023-11-14 23:13:20")


def test_a_broker_that_does_not_say_is_told_of(tables: Tables) -> None:
    delivered(tables, NEEDED - HOUR)
    admin = mock.Mock(internal_stats=mock.Mock(side_effect=PulsarError("no answer")))
    assert told(tables, admin) == f"{BILLING}: the broker does not say from when it still has it (no answer); {MEANS}"


def test_a_destination_that_can_not_be_read_is_named_and_can_be_left_out(
    tables: Tables, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    route: dict[str, Any] = {"source": ORDERS, "subscriptions": [{"name": "billing"}]}
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": [route]})

    class Brokers(FakeBrokers):
        def read(self, topic: str, start: Position, **_: Any) -> Any:
            if topic == BILLING:
                raise RefusedError(ServerError.AuthorizationError, b"no rights")
            return super().read(topic, start)

    brokers = Brokers()

    known = Delivered({ORDERS: ["billing"]}, {ORDERS: Position(1, 0)})
    overdue = {(ORDERS, 0): NEEDED}
    warnings: list[str] = []
    context = RebuildContext(settings, settings, tables, known.durable, NEEDED, Reports(on_warning=warnings.append))
    with (
        mock.patch("checkpoint_from_tables.rebuild.destinations.Brokers", return_value=brokers),
        mock.patch("checkpoint_from_tables.rebuild.destinations.AdminClient", return_value=FakeAdmin([])),
    ):
        with pytest.raises(
            UnreadableDestinationError, match=f"{BILLING} can't be read .*no rights.*--without-dest"
        ) as e:
            write_missing_deliveries(context, known, overdue)
        assert "\n" not in str(e.value)
        found = write_missing_deliveries(context, known, overdue, DestinationReading([BILLING]))
    assert (found, warnings) == (0, [f"{BILLING}: not read: what was sent there and not written down may come twice"])
    assert caplog.messages == warnings


def test_what_is_no_destination_can_not_be_left_out(tmp_path: Path) -> None:
    route: dict[str, Any] = {"source": ORDERS, "subscriptions": [{"name": "billing"}]}
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": [route]})
    with pytest.raises(RebuildError, match=f"x is no destination: those are {BILLING}"):
        rebuild_checkpoint(settings, False, without=["x"])


def test_a_rebuild_that_reads_a_destination_logs_and_passes_on_what_there_is_to_say(
    tables: Tables, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delivered(tables, NEEDED - HOUR)
    route: dict[str, Any] = {"source": ORDERS, "subscriptions": [{"name": "billing"}, {"name": "audit"}]}
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": [route]})
    brokers = FakeBrokers()
    known = Delivered({ORDERS: ["billing", "audit"]}, {ORDERS: Position(1, 0)})
    warnings: list[str] = []
    with (
        mock.patch("checkpoint_from_tables.rebuild.destinations.Brokers", return_value=brokers),
        mock.patch(
            "checkpoint_from_tables.rebuild.destinations.AdminClient", return_value=FakeAdmin([(9, 3, NEEDED + MINUTE)])
        ),
    ):
        overdue = {(ORDERS, 0): NEEDED}  # audit's is not read
        reports = Reports(on_warning=warnings.append)
        context = RebuildContext(settings, settings, tables, known.durable, NEEDED, reports)
        write_missing_deliveries(context, known, overdue)
    assert [warning.startswith(f"{BILLING}: the broker still has it from") for warning in warnings] == [True]
    assert caplog.messages == warnings


@pytest.mark.parametrize("is_there", [True, False])
def test_dead_letters_are_read_wherever_there_are_any(tables: Tables, tmp_path: Path, is_there: bool) -> None:
    """Also where no outcome says so yet: that is written after they have been sent. To read none makes the topic."""
    route: dict[str, Any] = {"source": ORDERS, "subscriptions": [{"name": "billing"}]}
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": [route]})
    read: set[str] = set()

    class Brokers(FakeBrokers):
        def read(self, topic: str, start: Position, **_: Any) -> Any:
            read.add(topic)
            return super().read(topic, start)

    brokers, admin = Brokers(), FakeAdmin([])
    admin.topics = {f"{BILLING}-dlq"} if is_there else set()
    known = Delivered({ORDERS: ["billing"]}, {ORDERS: Position(1, 0)})
    with (
        mock.patch("checkpoint_from_tables.rebuild.destinations.Brokers", return_value=brokers),
        mock.patch("checkpoint_from_tables.rebuild.destinations.AdminClient", return_value=admin),
    ):
        context = RebuildContext(settings, settings, tables, known.durable, NEEDED)
        write_missing_deliveries(context, known, {(ORDERS, 0): NEEDED})
    assert read == {ORDERS, BILLING} | admin.topics
