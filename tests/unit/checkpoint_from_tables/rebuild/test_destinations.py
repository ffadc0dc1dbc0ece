"""What a rebuild believes of the messages that it finds at a destination."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from broker.position import START, Position
from broker.protocol.reading import ReadMessage
from checkpoint_from_tables.rebuild.destinations import _deliveries, _of_known_entries
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES, SCHEMAS

ORDERS = "persistent://public/default/orders"
OWN = "delaylake-0123456789ab-billing-0-p0"


def sent(position: str = "7:3:-1:-1", producer: str = OWN, source: str = ORDERS, due: str = "1000") -> ReadMessage:
    properties = {"delaylake.source": source, "delaylake.messageId": position, "delaylake.deliverAt": due}
    return ReadMessage(f"{ORDERS}-billing", START, 2_000, producer, properties)


def believed(*messages: ReadMessage) -> list[str]:
    return _deliveries(messages, ORDERS, "billing")["position"].to_pylist()


def test_what_the_job_sent_is_a_delivery_once() -> None:
    rows = _deliveries([sent(), sent(), sent("7:4:2:11", f"{OWN}-batched")], ORDERS, "billing").to_pylist()
    assert [(r["position"], r["deliver_at"], r["sent_at"], r["short_notice"]) for r in rows] == [
        ("7:3:-1:-1", 1_000, 2_000, False),
        ("7:4:2:11", 1_000, 2_000, False),
    ]
    assert [rows[1][name] for name in ("ledger_id", "entry_id", "partition", "batch_index")] == [7, 4, 2, 11]


@pytest.mark.parametrize(
    "producer",
    ["standalone-0-3", "", "delaylake", "delaylake-0123456789ab-audit-0-p0", "x" + OWN, "delaylake-xyz-billing-0-p0"],
)
def test_what_another_producer_sent_with_our_properties_is_none(producer: str) -> None:
    assert believed(sent(producer=producer)) == []


@pytest.mark.parametrize(
    "position",
    [
        *[
            "",
            "7",
            "7:3",
            "7:3:-1",
            "7:3:-1:-1:0",
            "a:b:c:d",
            "7:3:-1:",
            ":::",
            "7:3:-2:-1",
            "-7:3:-1:-1",
            "7:-3:-1:-1",
        ],
        *[
            "7:3:-1:1.5",
            "0x7:3:-1:-1",
            " 7:3:-1:-1",
            "7:3:-1:-1\n",
            "7_0:3:-1:-1",
            "\N{ARABIC-INDIC DIGIT SEVEN}:3:-1:-1",
        ],
        *[f"{10**18}:3:-1:-1", f"7:{10**30}:-1:-1", f"7:3:{10**9}:-1", f"7:3:-1:{10**9}"],
    ],
)
def test_a_position_that_is_none_is_passed_over(position: str) -> None:
    assert believed(sent(position), sent()) == ["7:3:-1:-1"]


@pytest.mark.parametrize("due", ["", "soon", "-1", "1.5", "1e3", str(10**30), "\N{ARABIC-INDIC DIGIT THREE}"])
def test_a_time_that_is_none_is_passed_over(due: str) -> None:
    assert believed(sent("7:4:-1:-1", due=due), sent()) == ["7:3:-1:-1"]


def test_of_another_source_or_without_properties_is_none() -> None:
    assert believed(sent(source=f"{ORDERS}2"), ReadMessage("d", START, 1, OWN, {})) == []


def test_only_entries_that_were_taken_in_or_come_again_were_delivered(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    durable = [{"topic": ORDERS, "partition": p, "ledger_id": 7, "entry_id": e} for p, e in ((0, 3), (1, 4))]
    tables.append("entries", pa.Table.from_pylist(durable, schema=SCHEMAS["entries"]), {"test": 1})
    # Of a topic at a broker that was lost: it was sealed, and its entry was not durable yet.
    sealed = [{"topic": ORDERS, "partition": 0, "ledger_id": 6, "entry_id": 1, "operation": "DELAY"}]
    tables.append("delayed_index", pa.Table.from_pylist(sealed, schema=SCHEMAS["delayed_index"]), {"test": 1})
    rows = _deliveries(
        [sent(text) for text in ("7:3:0:-1", "7:3:1:0", "7:4:1:5", "8:0:0:-1", "9:1:0:0", "6:0:0:-1", "6:1:0:-1")],
        ORDERS,
        "billing",
    )
    last = {f"{ORDERS}-partition-{p}": Position(8, 5) for p in (0, 1)}
    found = _of_known_entries(tables, rows, last)
    assert found.schema == DELIVERIES
    assert sorted(found["position"].to_pylist()) == ["6:1:0:-1", "7:3:0:-1", "7:4:1:5", "9:1:0:0"]
