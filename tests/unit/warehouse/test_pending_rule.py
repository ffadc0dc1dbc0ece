"""What is pending: views, listings, audit, retention and rebuild say the same as a model that knows what happened."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, Phase, settings

from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.control_desk import Desk
from tests.support.tracker.messages import TOPIC
from tests.support.warehouse.rebuilt import of_all_shards, prepared
from tests.unit.tracker.test_shard_model import Entry, ShardModel
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import MESSAGES, concat, position_texts, typed, with_columns
from tracker.schemas import PauseChange
from tracker.tick import Effects
from warehouse.audit.accounts import OVERDUE_MILLIS, run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.retention import Retention
from warehouse.queries.index_rows import cancels_to_index, outcomes_to_rows, to_index
from warehouse.queries.listing import PendingFilter, State
from warehouse.queries.pending_messages import Pending
from warehouse.queries.pending_rows import WAITS
from warehouse.routes.known_routes import subscription_names
from warehouse.schemas import DELIVERIES, SCHEMAS
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

OTHER = "persistent://public/default/other"
SUBSCRIPTIONS = ["s0", "s1"]
# Where entries are, each third of them: topic, partition, ledger.
PLACES = ((TOPIC, 0, 1), (TOPIC, 1, 2), (OTHER, -1, 3))

# (entry, batch index, subscription, time)
Row = tuple[int, int, str, int]


class PendingModel(ShardModel):
    """Writes what the shard does to tables, at the end, when all that waits is sealed, and asks them."""

    NEAR_MILLIS = 1

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}

    def step(
        self,
        new: list[Entry],
        rows: list[dict[str, object]],
        seals: bool = False,
        pause_changes: Sequence[PauseChange] = (),
        back: Sequence[tuple[str, str]] = (),
    ) -> Effects:
        effects = super().step(new, rows, seals, pause_changes, back)
        index = [to_index(effects.bucket, self.tick), cancels_to_index(effects.cancels, self.tick)]
        self.written["delayed_index"] += index
        self.written["outcomes"].append(outcomes_to_rows(effects.outcomes, self.tick, self.now))
        for release in effects.releases:
            if release.tick == self.tick:
                self.written["deliveries"] += deliveries(release.rows, self.cutoff)
        return effects

    def the_job_starts_again_with_other_settings(self, names: list[str], later: int) -> None:
        """No rule here: the readers know the settings' subscriptions only."""

    def teardown(self) -> None:
        for _ in range(2):  # what a pause holds back is sealed at the end of the next seal epoch
            self.step([], [], seals=True)
        names = ("topic", "partition", "ledger_id", "entry_id", "batch_size", "publish_time")
        sizes = [(TOPIC, -1, 1, e.entry_id, len(e.due), 0) for e in self.entries.values()]
        rows = [dict(zip(names, row, strict=True)) for row in sizes]
        self.written["entries"] = [pa.Table.from_pylist(rows, SCHEMAS["entries"])]
        with tempfile.TemporaryDirectory() as folder:
            tables = Tables(f"{folder}/warehouse")
            tables.create()
            for name, written in self.written.items():
                found = concat(written, SCHEMAS[name])
                if found.num_rows:
                    tables.append(name, placed(found), {"test": 1})
            routes: list[Any] = [
                {"source": t, "subscriptions": [{"name": s} for s in SUBSCRIPTIONS]} for t in (TOPIC, OTHER)
            ]
            made = Settings(warehouse=tables.path("").rstrip("/"), checkpoint=folder, routes=tuple(routes))
            self.check(made, tables)

    def check(self, made: Settings, tables: Tables) -> None:
        pending = {row for row in self.rows() if not self.is_cancelled(row)}
        self.check_views(Warehouse(made), pending)
        self.check_listings(made, pending)
        self.check_audit(made, pending)
        index = tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY'")
        settled = Retention(made, tables, self.now)._is_settled(index) if index.num_rows else np.zeros(0, np.bool_)
        expected = [any(waiting) for waiting in waits(index.to_pylist(), pending)]
        assert [not done for done in settled] == expected
        self.check_rebuild(made, tables, pending)

    def rows(self) -> Iterator[Row]:
        """What has not been handed out: what waits, and what is cancelled."""
        for e in self.entries.values():
            for i, s in e.pairs(SUBSCRIPTIONS):
                if (i, s) not in e.handed_out:
                    yield e.entry_id, e.index(i), s, e.time(i, s)

    def is_cancelled(self, row: Row) -> bool:
        entry, index, subscription, _ = row
        return (max(index, 0), subscription) in self.entries[entry].cancelled

    def counts(self, rows: set[Row]) -> Counter[tuple[str, str]]:
        """By topic and subscription."""
        return Counter((PLACES[entry % 3][0], subscription) for entry, _, subscription, _ in rows)

    def check_views(self, warehouse: Warehouse, pending: set[Row]) -> None:
        found = warehouse.sql("SELECT * FROM pending").to_pylist()
        names = ("entry_id", "batch_index", "subscription", "deliver_at")
        assert Counter(tuple(row[name] for name in names) for row in found) == Counter(pending)
        assert all((r["topic"], r["partition"], r["ledger_id"]) == PLACES[r["entry_id"] % 3] for r in found)
        scheduled = warehouse.sql("SELECT coalesce(sum(messages), 0) AS n FROM schedule")["n"][0].as_py()
        assert scheduled == sum(due < HELD_DELIVER_AT for *_, due in pending)
        cancelled = {row for row in self.rows() if self.is_cancelled(row)}
        of_now = "subscription <> '*'"  # what is sent back is skipped for later ones, too
        found = warehouse.sql(f"SELECT DISTINCT entry_id, subscription FROM cancellations WHERE {of_now}").to_pylist()
        assert {(r["entry_id"], r["subscription"]) for r in found} == {(row[0], row[2]) for row in cancelled}
        for row in warehouse.sql("SELECT * FROM funnel").to_pylist():
            own = row["topic"], row["subscription"]
            n = sum(len(e.due) for e in self.entries.values() if PLACES[e.entry_id % 3][0] == row["topic"])
            counts = n, self.counts(pending)[own], self.counts(cancelled)[own]
            assert (row["taken_in"], row["pending"], row["taken_back"]) == counts
            assert row["delivered"] == n - counts[1] - counts[2]

    def check_listings(self, made: Settings, pending: set[Row]) -> None:
        cancelled = {row for row in self.rows() if self.is_cancelled(row) and row[3] > self.cutoff}
        for state, expected in ((State.WAITING, pending), (State.CANCELLED, cancelled)):
            found = []
            for topic in (TOPIC, OTHER):
                asked = Pending(made, topic, PendingFilter(due_from=0, state=state), None, self.cutoff)
                listed = asked.rows(1_000, ["ledger_id", "entry_id", "batch_index", "deliver_at"]).to_pylist()
                assert asked.count() == len(listed)
                found += [
                    (row["entry_id"], row["batch_index"], name, row["deliver_at"])
                    for row in listed
                    for i, name in enumerate(SUBSCRIPTIONS)
                    if row[WAITS] >> i & 1
                ]
            assert Counter(found) == Counter(expected)

    def check_audit(self, made: Settings, pending: set[Row]) -> None:
        cancelled = {row for row in self.rows() if self.is_cancelled(row)}
        # Long after all is due but what is held back.
        now = max((due for *_, due in pending if due < HELD_DELIVER_AT), default=0) + OVERDUE_MILLIS + 1
        found = run_audit(made, now)
        for row in found.counts:
            own = row["topic"], row["subscription"]
            assert (row["pending"], row["taken_back"]) == (self.counts(pending)[own], self.counts(cancelled)[own])
        overdue = sum(due < HELD_DELIVER_AT for *_, due in pending)
        assert {kind: finding["count"] for kind, finding in found.findings.items()} == (
            {"overdue": overdue} if overdue else {}
        )

    def check_rebuild(self, made: Settings, tables: Tables, pending: set[Row]) -> None:
        found = of_all_shards(prepared(made, Path(made.checkpoint), self.now))
        first = found.released + 1
        index = tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY'")
        begun = Desk(subscriptions=subscription_names(made))
        begun.rebuild(found)
        bits = begun.subscription_mask(typed(index, MESSAGES))
        rows = index.to_pylist()
        for row, masks, expected in zip(rows, bits, waits(rows, pending), strict=True):
            is_loaded = row["deliver_at"] >= first
            assert [bool(masks >> i & 1) and is_loaded for i in range(len(SUBSCRIPTIONS))] == expected


def waits(index: list[dict[str, Any]], pending: set[Row]) -> list[list[bool]]:
    """For which subscriptions each row of the delayed index is the one by which its message waits: the last of them."""
    last: dict[tuple[int, int, str], int] = {}
    of_rows = [
        {name: (r["entry_id"], r["batch_index"], name) for name in SUBSCRIPTIONS if r["subscription"] in (None, name)}
        for r in index
    ]
    for row, messages in zip(index, of_rows, strict=True):
        for message in messages.values():
            last[message] = max(row["sequence"] or 0, last.get(message, 0))
    return [
        [
            name in messages
            and (*messages[name], row["deliver_at"]) in pending
            and last[messages[name]] == (row["sequence"] or 0)
            for name in SUBSCRIPTIONS
        ]
        for row, messages in zip(index, of_rows, strict=True)
    ]


def deliveries(rows: pa.Table, sent_at: int) -> Iterator[pa.Table]:
    """What the sender writes down of a release."""
    for i, name in enumerate(SUBSCRIPTIONS):
        own = rows.filter(pc.equal(pc.bit_wise_and(pc.shift_right(rows["subscription_mask"], i), 1), 1))
        values = {
            **{column: own[column] for column in DELIVERIES.names if column in own.column_names},
            "subscription": pa.repeat(name, own.num_rows),
            "sent_at": pa.repeat(sent_at, own.num_rows),
        }
        yield typed(values, DELIVERIES)


def placed(rows: pa.Table) -> pa.Table:
    """The rows where their entries are."""
    at = [PLACES[entry % 3] for entry in rows["entry_id"].to_pylist()]
    columns = dict(zip(("topic", "partition", "ledger_id"), zip(*at, strict=True), strict=True))
    types = {name: pa.array(list(values), rows.schema.field(name).type) for name, values in columns.items()}
    rows = with_columns(rows, **types)
    return with_columns(rows, position=position_texts(rows)) if "position" in rows.column_names else rows


PendingModel.TestCase.settings = settings(
    max_examples=examples(6),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
test_five_readers_agree_on_what_is_pending = PendingModel.TestCase
