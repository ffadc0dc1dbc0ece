"""`delaylake audit` on tables made by hand: what is in order passes, and each kind of fault is found."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from conf.settings import Settings
from tests.conftest import Run
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.audit.accounts import EXAMPLES, OVERDUE_MILLIS, Audit, run_audit
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS
from warehouse.views import Warehouse as Views

ORDERS = "persistent://public/default/orders"  # to billing and audit
ALERTS = "persistent://public/default/alerts"  # to mail
NOW = 1_900_000_000_000
LATER = NOW + 3_600_000

FAULTS = ["lost", "doubled", "early", "delivered_although_cancelled", "overdue", "reject_delivered", "not_seen"]


class Warehouse:
    """Tables to be filled by hand, a row at a time."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "settings.yaml"
        content: dict[str, Any] = {
            "warehouse": f"file:{folder}/warehouse",
            "pulsar": {"admin_url": "http://127.0.0.1:9"},
            "routes": [
                {"source": ORDERS, "subscriptions": [{"name": "billing"}, {"name": "audit", "type": "Exclusive"}]},
                {"source": ALERTS, "subscriptions": [{"name": "mail"}]},
            ],
        }
        self.file.write_text(yaml.safe_dump(content))
        self.settings = Settings(**content)
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}

    def entry(self, topic: str, entry_id: int, batch_size: int = 1, partition: int = -1) -> None:
        self._add("entries", topic, entry_id, partition, batch_size=batch_size, publish_time=NOW)

    def sealed(self, topic: str, entry_id: int, batch_index: int = -1, deliver_at: int = LATER, **more: Any) -> None:
        self._add("delayed_index", topic, entry_id, batch_index=batch_index, **{"operation": "DELAY"} | more)
        self._rows["delayed_index"][-1]["deliver_at"] = deliver_at

    def delivered(
        self, topic: str, entry_id: int, *subscriptions: str, batch_index: int = -1, late: int = 5, partition: int = -1
    ) -> None:
        for subscription in subscriptions:
            self._add(
                "deliveries",
                topic,
                entry_id,
                partition,
                batch_index,
                subscription=subscription,
                deliver_at=NOW,
                sent_at=NOW + late,
            )

    def rejected(
        self, topic: str, entry_id: int, batch_index: int = -1, reason: str = "deliverAt is negative: -5"
    ) -> None:
        self._add("rejects", topic, entry_id, batch_index=batch_index, reason=reason)

    def outcome(
        self,
        topic: str,
        entry_id: int,
        *subscriptions: str,
        batch_index: int = -1,
        result: str = "APPLIED",
        operation: str = "SKIP",
    ) -> None:
        for subscription in subscriptions:
            more: dict[str, Any] = {"subscription": subscription, "result": result, "operation": operation}
            sequence = len(self._rows["outcomes"]) + 1
            self._add("outcomes", topic, entry_id, batch_index=batch_index, sequence=sequence, **more)

    def write(self) -> None:
        for number, (name, rows) in enumerate(self._rows.items(), 1):
            if rows:
                columns = [pa.array([row.get(f.name) for row in rows], f.type) for f in SCHEMAS[name]]
                self.tables.append(name, pa.table(columns, schema=SCHEMAS[name]), {"test": number})

    def audit(self, now: int | None = None) -> Audit:
        self.write()
        return run_audit(self.settings, now)

    def _add(
        self, table: str, topic: str, entry_id: int, partition: int = -1, batch_index: int = -1, **more: Any
    ) -> None:
        self._rows[table].append(
            {
                "topic": topic,
                "partition": partition,
                "ledger_id": 7,
                "entry_id": entry_id,
                "batch_index": batch_index,
                "position": f"7:{entry_id}:{partition}:{batch_index}",
                **more,
            }
        )


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    """Tables in which every kind of proper fate occurs."""
    made = Warehouse(tmp_path)
    ids = count()
    for fate in ("delivered unsealed", "delivered sealed", "pending", "rejected", "cancelled", "skipped for one"):
        entry = next(ids)
        made.entry(ORDERS, entry)
        if fate == "delivered unsealed":
            made.delivered(ORDERS, entry, "billing", "audit")
        elif fate == "delivered sealed":
            made.sealed(ORDERS, entry, deliver_at=NOW)
            made.delivered(ORDERS, entry, "billing", "audit")
        elif fate == "pending":
            made.sealed(ORDERS, entry)
        elif fate == "rejected":
            made.rejected(ORDERS, entry)
        elif fate == "cancelled":
            made.outcome(ORDERS, entry, "billing", "audit")
            made.sealed(ORDERS, entry, operation="CANCEL", subscription="billing")
        elif fate == "skipped for one":
            made.outcome(ORDERS, entry, "billing", batch_index=0)
            made.delivered(ORDERS, entry, "audit")
    # A batch of four in a partition: two delivered, one skipped, one rejected.
    made.entry(ALERTS, 20, batch_size=4)
    made.delivered(ALERTS, 20, "mail", batch_index=0)
    made.sealed(ALERTS, 20, batch_index=1, deliver_at=NOW)
    made.delivered(ALERTS, 20, "mail", batch_index=1)
    made.outcome(ALERTS, 20, "mail", batch_index=2)
    made.rejected(ALERTS, 20, batch_index=3)
    # A batch of one, and a batch skipped as a whole.
    made.entry(ALERTS, 21)
    made.delivered(ALERTS, 21, "mail", batch_index=0)
    made.entry(ALERTS, 22, batch_size=3)
    made.outcome(ALERTS, 22, "mail")
    # The same numbers in another partition are another entry; a command that came too late cancelled nothing.
    made.entry(ALERTS, 20, partition=1)
    made.delivered(ALERTS, 20, "mail", partition=1)
    made.outcome(ORDERS, 0, "billing", result="TOO_LATE")
    return made


def only(audit: Audit, kind: str) -> list[tuple[str, str, str]]:
    """The examples of a finding that must be the only one, all of them."""
    assert list(audit.findings) == [kind]
    examples = audit.findings[kind]["examples"]
    assert audit.findings[kind]["count"] == len(examples)
    return [(e["topic"], e["subscription"], e["position"]) for e in examples]


def test_tables_in_order_have_no_findings(warehouse: Warehouse) -> None:
    audit = warehouse.audit()
    assert audit.findings == {}
    assert audit.is_clean
    assert (audit.taken_in, audit.rejected) == (6 + 4 + 1 + 3 + 1, 2)
    assert audit.counts == [
        {
            "topic": ALERTS,
            "subscription": "mail",
            "delivered": 4,
            "occurrences": 0,
            "taken_back": 4,
            "superseded": 0,
            "expired": 0,
            "rejected": 1,
            "pending": 0,
        },
        {
            "topic": ORDERS,
            "subscription": "audit",
            "delivered": 3,
            "occurrences": 0,
            "taken_back": 1,
            "superseded": 0,
            "expired": 0,
            "rejected": 1,
            "pending": 1,
        },
        {
            "topic": ORDERS,
            "subscription": "billing",
            "delivered": 2,
            "occurrences": 0,
            "taken_back": 2,
            "superseded": 0,
            "expired": 0,
            "rejected": 1,
            "pending": 1,
        },
    ]


def test_a_message_that_is_nowhere_is_lost(warehouse: Warehouse) -> None:
    warehouse.entry(ORDERS, 90)
    assert only(warehouse.audit(), "lost") == [(ORDERS, "audit", "7:90:-1:-1"), (ORDERS, "billing", "7:90:-1:-1")]


def test_one_message_of_a_batch_that_is_nowhere_is_lost(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90, batch_size=3)
    for batch_index in (0, 2):
        warehouse.delivered(ALERTS, 90, "mail", batch_index=batch_index)
    assert only(warehouse.audit(), "lost") == [(ALERTS, "mail", "7:90:-1:1")]


def test_delivered_to_one_subscription_only_is_lost_to_the_other(warehouse: Warehouse) -> None:
    warehouse.entry(ORDERS, 90)
    warehouse.delivered(ORDERS, 90, "audit")
    assert only(warehouse.audit(), "lost") == [(ORDERS, "billing", "7:90:-1:-1")]


@pytest.mark.parametrize("batch_index", [-1, 0])
def test_cancelled_from_one_subscription_and_nowhere_else_is_lost_to_the_other(
    warehouse: Warehouse, batch_index: int
) -> None:
    warehouse.entry(ORDERS, 90)
    warehouse.outcome(ORDERS, 90, "billing", batch_index=batch_index)
    assert only(warehouse.audit(), "lost") == [(ORDERS, "audit", "7:90:-1:-1")]


def test_the_same_position_in_another_partition_does_not_stand_in(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90, partition=0)
    warehouse.entry(ALERTS, 90, partition=1)
    warehouse.delivered(ALERTS, 90, "mail", partition=1)
    assert only(warehouse.audit(), "lost") == [(ALERTS, "mail", "7:90:0:-1")]


def test_a_command_that_was_not_applied_does_not_account_for_a_message(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90)
    warehouse.outcome(ALERTS, 90, "mail", result="TOO_LATE")
    assert only(warehouse.audit(), "lost") == [(ALERTS, "mail", "7:90:-1:-1")]


@pytest.mark.parametrize("is_cancelled_again", [False, True])
def test_what_was_restored_must_be_delivered(warehouse: Warehouse, is_cancelled_again: bool) -> None:
    warehouse.entry(ORDERS, 90, batch_size=2)
    for batch_index in (0, 1):
        warehouse.delivered(ORDERS, 90, "audit", batch_index=batch_index)
    warehouse.outcome(ORDERS, 90, "billing")
    warehouse.outcome(ORDERS, 90, "billing", batch_index=1, operation="RESTORE")
    if is_cancelled_again:
        warehouse.outcome(ORDERS, 90, "billing", batch_index=1)
    findings = warehouse.audit().findings
    assert [e["position"] for found in findings.values() for e in found["examples"]] == (
        [] if is_cancelled_again else ["7:90:-1:1"]
    )


def test_two_deliveries_to_a_subscription_are_doubled(warehouse: Warehouse) -> None:
    warehouse.delivered(ORDERS, 0, "billing")
    assert only(warehouse.audit(), "doubled") == [(ORDERS, "billing", "7:0:-1:-1")]


def test_sent_before_its_time_is_early(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90)
    warehouse.delivered(ALERTS, 90, "mail", late=-1)
    assert only(warehouse.audit(), "early") == [(ALERTS, "mail", "7:90:-1:-1")]


@pytest.mark.parametrize("batch_index", [-1, 0])
def test_delivered_although_cancelled(warehouse: Warehouse, batch_index: int) -> None:
    warehouse.outcome(ORDERS, 0, "audit", batch_index=batch_index)
    assert only(warehouse.audit(), "delivered_although_cancelled") == [(ORDERS, "audit", "7:0:-1:-1")]


def test_pending_long_after_its_time_is_overdue(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90)
    warehouse.sealed(ALERTS, 90, deliver_at=NOW)
    warehouse.entry(ALERTS, 91)
    warehouse.delivered(ALERTS, 91, "mail", late=OVERDUE_MILLIS + 1)
    assert only(warehouse.audit(), "overdue") == [(ALERTS, "mail", "7:90:-1:-1")]


def test_by_the_clock_overdue_does_not_need_a_later_delivery(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90)
    warehouse.sealed(ALERTS, 90, deliver_at=NOW)
    assert warehouse.audit().is_clean
    assert only(run_audit(warehouse.settings, NOW + OVERDUE_MILLIS + 1), "overdue") == [(ALERTS, "mail", "7:90:-1:-1")]


@pytest.mark.parametrize("moved_to", [HELD_DELIVER_AT, LATER])
def test_what_was_moved_for_one_subscription_is_overdue_for_the_other(warehouse: Warehouse, moved_to: int) -> None:
    warehouse.entry(ORDERS, 90)
    warehouse.sealed(ORDERS, 90, deliver_at=NOW)
    for operation in ("DELAY", "MOVE"):
        warehouse.sealed(ORDERS, 90, deliver_at=moved_to, operation=operation, subscription="billing", sequence=1)
    assert only(warehouse.audit(NOW + OVERDUE_MILLIS + 1), "overdue") == [(ORDERS, "audit", "7:90:-1:-1")]


def test_a_rejected_message_must_not_be_delivered(warehouse: Warehouse) -> None:
    warehouse.delivered(ORDERS, 3, "billing")
    assert only(warehouse.audit(), "reject_delivered") == [(ORDERS, "billing", "7:3:-1:-1")]


def test_what_was_not_seen_is_found_and_counts_as_no_message(warehouse: Warehouse) -> None:
    warehouse.rejected(ORDERS, 90, reason="not seen: the broker no longer has it")
    warehouse.rejected("persistent://public/default/commands", 91, reason="not seen: the broker no longer has it")
    audit = warehouse.audit()
    assert only(audit, "not_seen") == [
        ("persistent://public/default/commands", "", "7:91:-1:-1"),
        (ORDERS, "", "7:90:-1:-1"),
    ]
    assert (audit.taken_in, audit.rejected, {row["rejected"] for row in audit.counts}) == (15, 2, {1})
    assert (audit.comparison.topics, "no answer from" in (audit.comparison.problem or "")) == ([], True)


def test_of_many_findings_twenty_are_examples(warehouse: Warehouse) -> None:
    warehouse.entry(ALERTS, 90, batch_size=1_000)
    found = warehouse.audit().findings["lost"]
    assert (found["count"], len(found["examples"])) == (1_000, EXAMPLES)


def test_the_command_passes_tables_in_order(delaylake_here: Run, warehouse: Warehouse) -> None:
    warehouse.write()
    done = delaylake_here("audit", "--config", str(warehouse.file))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"public/default/orders +billing +2 +2 +0 +0 +1 +1$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "15 messages taken in, 2 rejected: all accounted for"
    assert "\ncompared with the tables alone: no answer from http://127.0.0.1:9" in done.stdout
    shown = json.loads(delaylake_here("audit", "--config", str(warehouse.file), "--output", "json").stdout)
    assert (shown["ok"], shown["taken_in"], shown["findings"]) == (True, 15, {})
    assert (shown["comparison"]["topics"], shown["comparison"]["not_seen"]) == ([], [])


@pytest.mark.parametrize("kind", FAULTS)
def test_the_command_fails_for_every_fault_and_names_it(delaylake_here: Run, warehouse: Warehouse, kind: str) -> None:
    if kind == "lost":
        warehouse.entry(ALERTS, 90)
    elif kind == "doubled":
        warehouse.delivered(ORDERS, 0, "billing")
    elif kind == "early":
        warehouse.entry(ALERTS, 90)
        warehouse.delivered(ALERTS, 90, "mail", late=-1)
    elif kind == "delivered_although_cancelled":
        warehouse.outcome(ORDERS, 0, "audit")
    elif kind == "overdue":
        warehouse.entry(ALERTS, 90)
        warehouse.sealed(ALERTS, 90, deliver_at=NOW - OVERDUE_MILLIS)
    elif kind == "not_seen":
        warehouse.rejected(ORDERS, 90, reason="not seen: the broker no longer has it")
    else:
        warehouse.delivered(ORDERS, 3, "billing")
    warehouse.write()
    done = delaylake_here("audit", "--config", str(warehouse.file))
    assert (done.returncode, done.stderr) == (1, "")
    assert f"\n{kind.replace('_', ' ')}: " in done.stdout
    assert done.stdout.splitlines()[-1].endswith("NOT all accounted for")


def test_missing_tables_are_one_line_and_status_1(delaylake_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    routes = [{"source": ORDERS, "subscriptions": [{"name": "billing"}]}]
    file.write_text(yaml.safe_dump({"warehouse": f"file:{tmp_path}/none", "routes": routes}))
    done = delaylake_here("audit", "--config", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"error: no table entries in the warehouse .*: has the job run\? \(settings: /.*\)\n", done.stderr
    )


def test_a_hundred_thousand_messages_are_accounted_for(warehouse: Warehouse) -> None:
    n = 100_000
    warehouse.write()

    def table(name: str, **columns: Any) -> pa.Table:
        values = {"topic": [ALERTS] * n, "partition": [-1] * n, "ledger_id": [8] * n, "entry_id": np.arange(n)}
        values |= {"batch_index": [-1] * n, "position": [f"8:{i}:-1:-1" for i in range(n)], **columns}
        arrays = [pa.array(values[f.name], f.type) if f.name in values else pa.nulls(n, f.type) for f in SCHEMAS[name]]
        return pa.table(arrays, schema=SCHEMAS[name])

    tables = warehouse.tables
    tables.append("entries", table("entries", batch_size=[1] * n, publish_time=[NOW] * n), {"many": 1})
    tables.append("delayed_index", table("delayed_index", operation=["DELAY"] * n, deliver_at=[NOW] * n), {"many": 1})
    deliveries = table("deliveries", subscription=["mail"] * n, deliver_at=[NOW] * n, sent_at=[NOW + 3] * n)
    tables.append("deliveries", deliveries, {"many": 1})
    audit = run_audit(warehouse.settings)
    assert (audit.is_clean, audit.taken_in) == (True, n + 15)


def test_the_view_pending_gives_what_a_subscription_waits_for(warehouse: Warehouse) -> None:
    warehouse.entry(ORDERS, 90, batch_size=2)
    for batch_index in (0, 1):
        warehouse.sealed(ORDERS, 90, batch_index=batch_index)
    warehouse.outcome(ORDERS, 90, "billing", batch_index=1)
    warehouse.entry(ORDERS, 91)
    warehouse.sealed(ORDERS, 91)
    warehouse.outcome(ORDERS, 91, "billing")
    pending = {row["subscription"]: row["pending"] for row in warehouse.audit().counts if row["topic"] == ORDERS}
    view = f"SELECT 1 FROM pending WHERE topic = '{ORDERS}' AND subscription = "
    for subscription in ("billing", "audit"):
        assert Views(warehouse.settings).sql(f"{view}'{subscription}'").num_rows == pending[subscription]
    assert pending == {"billing": 2, "audit": 4}
