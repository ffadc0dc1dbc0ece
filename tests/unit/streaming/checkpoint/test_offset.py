"""What an offset knows of the source topics."""

from __future__ import annotations

from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from warehouse.routes.known_routes import known_routes

ORDERS, ALERTS, EMPTY = (f"persistent://public/default/{name}" for name in ("orders", "alerts", "empty"))


def test_the_newest_ledger_of_a_topic_is_that_of_any_partition_when_the_commands_came() -> None:
    settings = Settings(routes=[{"source": t, "subscriptions": [{"name": "a"}]} for t in (ORDERS, ALERTS, EMPTY)])  # type: ignore[arg-type]
    offset = Offset(
        tick=7,
        routes=known_routes(settings).to_json(),
        positions={f"{ORDERS}-partition-0": "9:3", f"{ORDERS}-partition-1": "12:0", ALERTS: "20:1"},
        barriers=[[6, {ALERTS: "99:0"}], [7, {f"{ORDERS}-partition-0": "14:0", ALERTS: None, EMPTY: "-1:-1"}]],
    )
    assert offset.newest_ledgers == {ORDERS: 14, EMPTY: -1}
    assert Offset.from_json(offset.to_json()) == offset


def test_what_offsets_of_an_earlier_program_lack_is_not_added_when_they_are_read() -> None:
    """The name of a batch's input is a hash of its offset."""
    text = Offset(tick=3, run_id="r").to_json()
    assert not {"drains", "large", "max_bytes", "max_delay_millis", "rejects_to"} & text.keys()
    assert Offset.from_json(text).to_json() == text
