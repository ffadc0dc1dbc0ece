"""A topic whose route was taken out: what is known of it, who tells of it, and what a rebuild makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from conf.settings import Settings
from status.alerts import NO_ROUTE, Alerts
from status.status_writer import StatusWriter
from tests.support.tracker.control_desk import Desk
from tests.support.tracker.messages import TOPIC
from tests.support.warehouse.rebuilt import of_all_shards, prepared
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import MESSAGES, typed
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.routes.known_routes import known_routes
from warehouse.routes.missing_routes import MissingRoutesWatch, missing_routes, settings_with
from warehouse.schemas import SCHEMAS

pytestmark = pytest.mark.slow

OTHER = "persistent://public/default/other"
NOW = 1_000_000


def settings(folder: Path, **routes: list[str]) -> Settings:
    topics = {"t": TOPIC, "other": OTHER}
    return Settings(
        warehouse=f"file:{folder}",
        routes=[{"source": topics[t], "subscriptions": [{"name": n} for n in names]} for t, names in routes.items()],  # type: ignore[arg-type]
    )


def write(folder: Path, **tables: list[dict[str, Any]]) -> Tables:
    made = Tables(f"file:{folder}")
    made.create()
    for name, rows in tables.items():
        of_topic = {"topic": TOPIC, "partition": -1, "batch_size": 1, "batch_index": -1, "ledger_id": 1}
        made.append(name, pa.Table.from_pylist([{**of_topic, **row} for row in rows], SCHEMAS[name]), {"test": 1})
    return made


def tell(of: Settings) -> None:
    """As a job on these settings does."""
    writer = StatusWriter(of.warehouse, 1)
    writer.routes(known_routes(of).to_json())
    writer._write()


def test_a_route_is_missing_when_the_job_had_it_and_the_settings_do_not(tmp_path: Path) -> None:
    both, one = settings(tmp_path, t=["a", "b"], other=["x"]), settings(tmp_path, other=["x"])
    assert not missing_routes(one), "no job has told of itself"
    tell(both)
    assert not missing_routes(both)
    assert [(r.source, [s.name for s in r.subscriptions]) for r in missing_routes(one)] == [(TOPIC, ["a", "b"])]
    found, is_missing = settings_with(one, TOPIC)
    assert (found.route(TOPIC), is_missing) == (both.route(TOPIC), True)
    assert settings_with(one, f"{TOPIC}-partition-3")[1]
    assert settings_with(both, TOPIC) == (both, False)
    assert settings_with(one, "never-seen") == (one, False)


def test_what_waits_without_a_route_is_a_trouble_until_it_is_gone() -> None:
    alerts = Alerts()
    waiting = [3_000]
    watch = MissingRoutesWatch(known_routes(Settings(routes=_routes("a"))).routes, lambda _: waiting[0], alerts)
    watch.check()
    [trouble] = alerts.current()
    assert (trouble.kind, trouble.name) == (NO_ROUTE, TOPIC)
    assert trouble.text.startswith("without a route, and 3,000 messages wait")
    waiting[0] = 0
    watch.check()
    assert not alerts.current()


def test_a_count_that_fails_is_told_too() -> None:
    alerts = Alerts()
    count = mock.Mock(side_effect=OSError("no disk"))
    MissingRoutesWatch(known_routes(Settings(routes=_routes("a"))).routes, count, alerts).check()
    assert "no disk" in alerts.current()[0].text


def _routes(*names: str) -> Any:
    return [{"source": TOPIC, "subscriptions": [{"name": name} for name in names]}]


# Entries 0 and 1 wait, a got 2, and 1 was cancelled for a. What is due at 10 is overdue.
TABLES: dict[str, list[dict[str, Any]]] = {
    "delayed_index": [
        *({"operation": "DELAY", "entry_id": i, "deliver_at": 10 if i == 2 else NOW + 50} for i in range(3)),
        {"operation": "CANCEL", "entry_id": 1, "deliver_at": NOW + 50, "subscription": "a", "sequence": 5},
    ],
    "outcomes": [{"entry_id": 1, "subscription": "a", "result": "APPLIED", "operation": "CANCEL", "sequence": 5}],
    "deliveries": [{"entry_id": 2, "subscription": "a", "position": "1:2:-1:-1", "deliver_at": 10, "sent_at": NOW}],
    "entries": [{"entry_id": i} for i in range(3)],
}


def test_the_audit_names_what_waits_without_a_route_and_nothing_that_is_settled(tmp_path: Path) -> None:
    write(tmp_path, **TABLES)
    tell(settings(tmp_path, t=["a", "b"], other=["x"]))
    found = run_audit(settings(tmp_path, other=["x"])).findings
    assert [*found] == ["without_route"]
    positions = [(e["subscription"], e["position"]) for e in found["without_route"]["examples"]]
    assert sorted(positions) == [("a", "1:0:-1:-1"), *(("b", f"1:{i}:-1:-1") for i in range(3))]


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"], ["new", "b", "a"], None], ids=str)
def test_a_rebuild_knows_subscriptions_by_their_names_and_missing_routes(
    tmp_path: Path, names: list[str] | None
) -> None:
    """Whatever the order of the settings then; None: the route is missing."""
    tables = write(tmp_path, **TABLES)
    tell(settings(tmp_path, t=["a", "b"], other=["x"]))
    now = settings(tmp_path, other=["x"], **({} if names is None else {"t": names}))
    found = prepared(now, tmp_path / "checkpoint", NOW)
    assert found.offset is not None
    routes = found.offset.known_routes
    assert routes is not None
    assert [*routes.missing] == ([TOPIC] if names is None else [])

    desk = Desk(subscriptions=routes.subscriptions)
    desk.rebuild(of_all_shards(found))
    rows = tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY' ORDER BY entry_id")
    known = routes.subscriptions.names[TOPIC]
    masks = [
        {n for i, n in enumerate(known) if bits >> i & 1} for bits in desk.subscription_mask(typed(rows, MESSAGES))
    ]
    every = {"a", "b", *(names or ())}
    assert masks == [every, every - {"a"}, every - {"a"}]
    if names is None:
        assert desk.choose_subscriptions(typed(rows, MESSAGES)).tolist() == [0, 0, 0]
        held = desk.state.take_moves()
        assert np.all(held["deliver_at"].to_numpy() == HELD_DELIVER_AT)
        assert sorted(zip(held["entry_id"].to_pylist(), held["subscription"].to_pylist(), strict=True)) == [
            (0, "a"), (0, "b"), (1, "b"), (2, "b"),
        ]  # fmt: skip
