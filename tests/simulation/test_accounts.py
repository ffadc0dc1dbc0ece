"""What the accounts of a simulation find: each of their rules can fail."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from status.alerts import SLOW, UNWRITABLE, Alert
from status.job_status import JobStatus
from tests.simulation.accounts import BrokenGuaranteeError, Command
from tests.simulation.added import ADDED
from tests.simulation.auditing import check_nothing_waits
from tests.simulation.broker import Cluster
from tests.simulation.expected import Arrival, Expected, Repeat
from tests.simulation.faults import Faults
from tests.simulation.oracle import Oracle
from tests.simulation.parcels import SUBSCRIPTION, TOPIC, Parcels
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.told_destinations import ToldDestinations
from tracker.entry_log import ENTRIES
from warehouse.audit.accounts import Audit
from warehouse.audit.broker_comparison import Comparison
from warehouse.schemas import OUTCOMES, REJECTS

NOW = 1_000_000  # ms since the epoch
SOURCE = "persistent://public/default/orders"
POSITION = "7:3:-1:-1"


def rows(schema: pa.Schema, **values: Any) -> pa.Table:
    """One row of the entry of POSITION, with these values; the others are null."""
    row = {
        "ledger_id": 7,
        "entry_id": 3,
        "partition": -1,
        "batch_index": -1,
        "position": POSITION,
        "topic": SOURCE,
        **values,
    }
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names}], schema=schema)


def message(due: int = NOW, **values: Any) -> Expected:
    """A message of the subscription `a`."""
    return Expected(SOURCE, due, frozenset({"a"}), {"deliverAt": f"{due}"}, b"1", **values)


def command_of(oracle: Oracle, operation: str, value: int = 0) -> Command:
    """Sends a command for the entry of POSITION and the subscription `a`; an oracle knows of it."""
    command = Command("1", operation, SOURCE, [("7:3", -1)], frozenset({"a"}), value, NOW - 1)
    oracle.accounts.add_command(command)
    return command


def answer(command: Command, result: str) -> dict[str, Any]:
    """A row of `outcomes` for the entry of POSITION and the subscription `a`."""
    row: dict[str, Any] = dict.fromkeys(OUTCOMES.names)
    of_command = {"request_id": command.id, "operation": command.operation, "topic": command.topic, "issued_by": "user"}
    of_message = {"ledger_id": 7, "entry_id": 3, "batch_index": -1, "position": POSITION, "subscription": "a"}
    return {**row, **of_command, **of_message, "result": result, "applied_at": NOW}


def arrival(occurrence: int = 0) -> Arrival:
    """The message is with the subscription `a` now."""
    return Arrival(POSITION, "a", SOURCE, NOW, occurrence, 0, b"1", NOW)


def oracle_of(expected: Expected) -> Oracle:
    """An oracle that knows of a message, whose entry is in `entries` for good."""
    oracle = Oracle(lambda: NOW)
    oracle.sent(POSITION, expected)
    oracle.stored("entries", rows(ENTRIES))
    return oracle


@pytest.mark.parametrize(
    "expected", [message(), message(rejected_for="deliverAt"), message(repeat=Repeat(NOW, 1_000, 2))]
)
def test_whatever_kind_it_is_an_entry_that_no_table_has_may_not_be_acknowledged(expected: Expected) -> None:
    with pytest.raises(BrokenGuaranteeError, match="7:3 is acknowledged, and no table has it for good"):
        oracle_of(expected).acknowledged_to(["7:3"])


def test_what_is_rejected_may_be_acknowledged_when_the_table_has_it() -> None:
    oracle = oracle_of(message(rejected_for="deliverAt"))
    oracle.stored("rejects", rows(REJECTS, reason="deliverAt is no time"))
    oracle.acknowledged_to(["7:3"])
    assert oracle.acknowledged == 1


@pytest.mark.parametrize(("operation", "is_early"), [("CANCEL", True), ("RESCHEDULE", False)])
def test_never_early_holds_for_what_a_restored_backup_knows_no_answer_about(operation: str, is_early: bool) -> None:
    oracle = oracle_of(message(due=NOW + 60_000))
    command = command_of(oracle, operation, value=NOW)
    oracle.accounts.recorded({**answer(command, "APPLIED"), "deliver_at": NOW})
    oracle.accounts.restored([])
    if not is_early:
        oracle.accounts.arrived(arrival(), NOW)
        return
    with pytest.raises(BrokenGuaranteeError, match="60000 ms early"):
        oracle.accounts.arrived(arrival(), NOW)


def test_nor_is_an_occurrence_early_then() -> None:
    oracle = oracle_of(message(repeat=Repeat(NOW, 1_000, 3)))
    command = command_of(oracle, "SKIP_NEXT", value=NOW)
    oracle.schedules.restored([answer(command, "APPLIED")])
    oracle.schedules.arrived(arrival(occurrence=1), NOW)
    with pytest.raises(BrokenGuaranteeError, match="1000 ms early"):
        oracle.schedules.arrived(arrival(occurrence=2), NOW)


@pytest.mark.parametrize(
    ("change", "is_right"),
    [({}, True), ({"result": "ALREADY_APPLIED"}, False), ({"reason": "late"}, False), ({"batch_index": 1}, False)],
)
def test_a_repeat_is_told_what_the_table_has(change: dict[str, Any], is_right: bool) -> None:
    oracle = oracle_of(message())
    command = command_of(oracle, "CANCEL", value=NOW)
    row = answer(command, "APPLIED")
    oracle.accounts.recorded(row)
    told = {**row, "is_repeat": True, "n_named": 0, "deliver_at": 0, **change}
    if is_right:
        oracle.accounts.told(told)
        return
    with pytest.raises(BrokenGuaranteeError, match="told 1 times"):
        oracle.accounts.told(told)


@pytest.mark.parametrize("waits", ["pending", "overdue"])
def test_an_audit_has_nothing_that_waits_when_nothing_does(waits: str) -> None:
    for name in ("a", ADDED):
        counts = [{"topic": SOURCE, "subscription": name, "delivered": 1, "pending": int(waits == "pending")}]
        overdue = {"count": 1, "examples": [{"topic": SOURCE, "subscription": name, "position": POSITION}]}
        findings = {"overdue": overdue} if waits == "overdue" else {}
        audit = Audit(1, 0, counts, findings, Comparison())
        if name == ADDED:  # what it got when it was taken out may never be recorded
            check_nothing_waits(audit, Counter())
            continue
        with pytest.raises(BrokenGuaranteeError, match="nothing waits, and an audit has"):
            check_nothing_waits(audit, Counter())


def parcels_of(*positions: str) -> Parcels:
    """The account of a topic that admins change, with these messages, of which none is durable."""
    oracle = Oracle(lambda: NOW)
    for position in positions:
        oracle.sent(position, Expected(TOPIC, NOW, frozenset({SUBSCRIPTION}), {"deliverAt": f"{NOW}"}, b"1"))
    return oracle.parcels


@pytest.mark.parametrize(("counted", "is_right"), [("1", False), ("2", True), ("3", False), ("up to 3", True)])
def test_what_is_trimmed_is_counted_neither_too_low_nor_too_high(counted: str, is_right: bool) -> None:
    parcels = parcels_of("7:3:-1:-1", "7:4:-1:-1", "7:5:-1:-1")
    parcels.read(["7:3"])
    parcels.taken(["7:4", "7:5"], "expired", is_nameless=False)
    reason = f"not seen: {counted} messages by their indexes; the broker no longer has it"
    parcels.recorded([{"position": "7:4:-1:-1", "reason": reason}])
    if is_right:
        parcels.check_end()
        return
    with pytest.raises(BrokenGuaranteeError, match="2 messages"):
        parcels.check_end()


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_the_job_has_read_of_a_topic_that_is_deleted_comes_unless_the_checkpoint_is_lost(is_lost: bool) -> None:
    parcels = parcels_of("7:4:-1:-1", "7:5:-1:-1")
    parcels.read(["7:4"])
    parcels.deleted(["7:4", "7:5"], n_acknowledged=0)
    if is_lost:
        parcels.rebuilt()
    assert parcels.may_be_lost("7:4") == is_lost
    assert parcels.may_be_lost("7:5")


def test_nor_is_it_named_as_not_seen() -> None:
    parcels = parcels_of(POSITION)
    parcels.taken(["7:3"], "expired", is_nameless=False)
    parcels.read(["7:3"])
    with pytest.raises(BrokenGuaranteeError, match="7:3 is named, and nobody has skipped it"):
        parcels.recorded([{"position": POSITION, "reason": "not seen: skipped"}])


def test_what_names_an_entry_twice_is_found_when_a_rebuild_has_written_the_table_anew() -> None:
    row = {"position": POSITION, "reason": "not seen: skipped"}
    parcels = parcels_of(POSITION)
    parcels.replaced([row])
    with pytest.raises(BrokenGuaranteeError, match="twice"):
        parcels.replaced([row, row])


@pytest.mark.parametrize(
    ("expected", "occurrence"),
    [(message(due=NOW + 1_000, ends_at=NOW + 9_000), 0), (message(repeat=Repeat(NOW, 1_000, 3)), 2)],
)
def test_a_subscription_that_comes_and_goes_gets_nothing_early_whatever_its_kind(
    expected: Expected, occurrence: int
) -> None:
    oracle = oracle_of(expected)
    oracle.added.topic = SOURCE
    oracle.added.begun(has_it=True, now=NOW - 9_000)
    with pytest.raises(BrokenGuaranteeError, match="1000 ms early"):
        oracle.added.arrived(arrival(occurrence), NOW)
    oracle.added.came.clear()
    oracle.added.arrived(arrival(occurrence), NOW + 1_000)


@pytest.mark.parametrize(("operation", "may_be_gone"), [("CANCEL", True), ("POSTPONE", False)])
def test_after_a_restore_only_what_was_to_be_cancelled_may_not_come(operation: str, may_be_gone: bool) -> None:
    oracle = oracle_of(message())
    command = command_of(oracle, operation)
    row = {**answer(command, "TOO_LATE"), "deliver_at": NOW}
    oracle.accounts.recorded(row)
    oracle.accounts.restored([])
    oracle.accounts.recorded(row)
    oracle.accounts.told({**row, "is_repeat": False, "n_named": 0})
    if may_be_gone:
        oracle.accounts.check_end()
        return
    with pytest.raises(BrokenGuaranteeError, match="a has not got 7:3:-1:-1 after a restore"):
        oracle.accounts.check_end()


def test_what_is_cancelled_after_a_restore_does_not_come() -> None:
    oracle = oracle_of(message())
    command = command_of(oracle, "CANCEL")
    row = answer(command, "APPLIED")
    oracle.accounts.recorded(row)
    oracle.accounts.restored([])
    oracle.accounts.recorded(row)
    with pytest.raises(BrokenGuaranteeError, match="which is cancelled after a restore"):
        oracle.accounts.arrived(arrival(), NOW)


def test_after_a_restore_each_occurrence_comes_that_no_command_may_have_left_out() -> None:
    oracle = oracle_of(message(repeat=Repeat(NOW, 1_000, 1)))
    command = command_of(oracle, "PAUSE_SCHEDULE", value=NOW)
    oracle.schedules.restored([answer(command, "APPLIED")])
    with pytest.raises(BrokenGuaranteeError, match="has not got the occurrences"):
        oracle.schedules.check_end()


def test_a_retry_comes_as_a_retry() -> None:
    oracle = oracle_of(message())
    command = command_of(oracle, "RETRY")
    oracle.accounts.arrived(arrival(), NOW)
    oracle.accounts.recorded({**answer(command, "APPLIED"), "deliver_at": NOW})
    oracle.accounts.arrived(arrival()._replace(attempt=1), NOW)
    with pytest.raises(BrokenGuaranteeError, match="twice as its attempt 1"):
        oracle.accounts.arrived(arrival()._replace(attempt=1), NOW)


def refusing_cluster() -> Cluster:
    """A cluster whose topic SOURCE is terminated."""
    cluster = Cluster(Scheduler(0), Faults(0))
    cluster.terminate(cluster.topic(SOURCE))
    return cluster


def refused(cluster: Cluster) -> Cluster:
    """The cluster, which has refused one more producer of SOURCE."""
    with suppress(RefusedError):
        cluster.refuse(SOURCE, ServerError.TopicTerminatedError, "the topic is terminated")
    return cluster


def status_of(*troubles: Alert) -> JobStatus:
    """The status of a job with these troubles."""
    return JobStatus(state="running", updated_at=NOW, started_at=NOW, troubles=list(troubles))


@pytest.mark.parametrize("kind", ["", UNWRITABLE, SLOW])
def test_a_destination_that_refuses_for_long_is_named(kind: str) -> None:
    account, cluster, job = ToldDestinations([SOURCE]), refusing_cluster(), Process("job")
    status = status_of(Alert(kind, SOURCE, NOW, "can't be written")) if kind else status_of()
    for _ in range(15):
        account.told(job, status, refused(cluster))
    if kind:
        account.told(job, status, refused(cluster))
        return
    with pytest.raises(BrokenGuaranteeError, match="15 statuses of job do not say so"):
        account.told(job, status, refused(cluster))


def test_a_destination_may_be_refused_now_and_then_before_it_is_named() -> None:
    account, cluster, job = ToldDestinations([SOURCE]), refusing_cluster(), Process("job")
    for number in range(45):
        account.told(job, status_of(), cluster if number % 15 else refused(cluster))


def test_a_status_gives_no_reason_that_the_broker_has_not_given() -> None:
    account, cluster, job = ToldDestinations([SOURCE]), refusing_cluster(), Process("job")
    status = status_of(Alert(UNWRITABLE, SOURCE, NOW, "can't be written: TopicTerminatedError"))
    with pytest.raises(BrokenGuaranteeError, match="what the broker has not said"):
        account.told(job, status, cluster)
    account.told(job, status, refused(cluster))
