"""What was handed out while a subscription was not in the settings is not its: not lost, not pending, not sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from conf.settings import Settings
from streaming.batch_schema import InputKind
from streaming.checkpoint.prepared import PreparedState
from tests.support.fuzzing.examples import examples
from tests.support.tracker.control_desk import Desk
from tests.support.warehouse.rebuilt import of_all_shards, prepared
from tests.support.warehouse.tables import DAY, NOW, TOPIC, rows
from tracker.messages import MESSAGES, typed
from tracker.schemas import SEQUENCE_BITS
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.retention import Retention
from warehouse.named_queries import Sql, literal
from warehouse.queries.listing import PendingFilter
from warehouse.queries.pending_messages import Pending
from warehouse.routes.known_routes import KnownRoutes
from warehouse.routes.membership import Changes, Memberships, changes, write_changes
from warehouse.schemas import SUBSCRIPTION_CHANGES
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

HOUR = 3_600_000


def settings(folder: Path, *names: str) -> Settings:
    route: Any = {"source": TOPIC, "subscriptions": [{"name": name} for name in names]}
    return Settings(warehouse=f"file:{folder}/warehouse", checkpoint=f"file:{folder}/checkpoint", routes=(route,))


def known(folder: Path, *edits: tuple[str, ...]) -> list[KnownRoutes]:
    """The routes after each edit of the settings."""
    routes = [KnownRoutes({})]
    for names in edits:
        routes.append(routes[-1].updated_to(settings(folder, *names)))
    return routes[1:]


def test_changes_name_all_subscriptions_of_a_topic_where_one_has_changed(tmp_path: Path) -> None:
    first, same, other = known(tmp_path, ("a",), ("a",), ("b", "a"))
    positions = {TOPIC: "1:5", f"{TOPIC}-partition-2": "3:0", f"{TOPIC}2": "9:9", f"{TOPIC}-partition-x": "9:9"}
    new = {"handed_out": -1, "positions": {}, "subscriptions": {"a": "ADDED"}}
    assert changes(KnownRoutes({}), first, 70, positions) == {TOPIC: new}
    assert changes(first, same, 70, positions) == {}
    assert changes(first, other, 70, positions) == {
        TOPIC: {
            "handed_out": 70,
            "positions": {"-1": "1:5", "2": "3:0"},
            "subscriptions": {"a": "KEPT", "b": "ADDED"},
        }
    }
    assert changes(other, first.updated_to(settings(tmp_path, "b")), 70, {})[TOPIC]["subscriptions"]["a"] == "REMOVED"


class History:
    """A warehouse with a topic's messages 0, 1, ..., of which all but the last were handed out, an hour each."""

    def __init__(self, folder: Path, n: int) -> None:
        self.folder, self.n = folder, n
        self.tables = Tables(f"file:{folder}/warehouse")
        self.tables.create()
        self.due = [NOW + (i - n + 2) * HOUR - 1 for i in range(n)]
        places = [{"ledger_id": 1, "entry_id": i, "deliver_at": due} for i, due in enumerate(self.due)]
        delays = [{**place, "operation": "DELAY"} for place in places]
        self.tables.append("delayed_index", rows("delayed_index", delays), {})
        self.tables.append("entries", rows("entries", places), {})
        self.tick = 0

    def deliver(self, name: str, *which: int) -> None:
        done = [
            {"ledger_id": 1, "entry_id": i, "deliver_at": self.due[i], "sent_at": self.due[i], "subscription": name}
            | {"position": f"1:{i}:-1:-1"}
            for i in which
        ]
        self.tables.append("deliveries", rows("deliveries", done), {})

    def change(self, before: KnownRoutes, after: KnownRoutes, handed_out: int) -> None:
        """Notes a change when so many messages had been handed out; all had been taken in."""
        self.tick += 1
        at = self.due[handed_out - 1] if handed_out else -1
        found: Changes = changes(before, after, at, {TOPIC: f"1:{self.n - 1}"})
        write_changes(self.tables, found, self.tick, NOW, "job")
        write_changes(self.tables, found, self.tick, NOW, "job")  # the batch is run again

    def move(self, name: str, which: int, due: int, attempt: int | None = None) -> None:
        """Reschedules, or retries, a message for a subscription in a tick after the last change."""
        self.tick += 1
        place: dict[str, Any] = {
            "ledger_id": 1,
            "entry_id": which,
            "subscription": name,
            "sequence": self.tick << SEQUENCE_BITS,
        }
        moved = [
            {**place, "operation": "MOVE", "deliver_at": self.due[which]},
            {**place, "operation": "DELAY", "deliver_at": due, "bucket_id": self.tick, "attempt": attempt},
        ]
        self.tables.append("delayed_index", rows("delayed_index", moved), {})
        operation = "RESCHEDULE" if attempt is None else "RETRY"
        answer = {**place, "operation": operation, "result": "APPLIED", "deliver_at": due, "attempt": attempt}
        self.tables.append("outcomes", rows("outcomes", [{**answer, "batch_id": self.tick}]), {})

    def rebuilt(self, now: Settings) -> list[set[str]]:
        """For each message the subscriptions to which it goes out after a rebuild."""
        found = prepared(now, self.folder / "checkpoint", NOW)
        assert found.offset is not None
        names = [s.name for s in now.routes[0].subscriptions]
        desk = Desk(subscriptions={TOPIC: names})
        desk.rebuild(of_all_shards(found))
        index = self.tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY' ORDER BY entry_id")
        masks = desk.subscription_mask(typed(index, MESSAGES))
        goes: list[set[str]] = [set() for _ in self.due]
        for bits, row in zip(masks, index.to_pylist(), strict=True):
            if row["deliver_at"] >= found.offset.load_horizon:
                goes[row["entry_id"]] |= {name for i, name in enumerate(names) if bits >> i & 1}
        return goes


def test_what_was_handed_out_while_a_subscription_was_away_is_not_its(tmp_path: Path) -> None:
    """b came after 2 messages, was out for the 4th, and is back; of the 5th, that is due, neither has got anything."""
    history = History(tmp_path, 6)
    first, both, out, back = known(tmp_path, ("a",), ("a", "b"), ("a",), ("a", "b"))
    for handed_out, (before, after) in (
        (0, (KnownRoutes({}), first)),
        (2, (first, both)),
        (3, (both, out)),
        (4, (out, back)),
    ):
        history.change(before, after, handed_out)
    history.deliver("a", 0, 1, 2, 3)
    history.deliver("b", 2)
    now = settings(tmp_path, "a", "b")

    audit = run_audit(now, NOW + DAY)
    assert {(e["subscription"], e["position"]) for e in audit.findings.pop("overdue")["examples"]} == {
        (name, f"1:{i}:-1:-1") for name in "ab" for i in (4, 5)
    }
    assert audit.findings == {}
    pending = {(name, i) for name in "ab" for i in (4, 5)}
    views = Warehouse(now).sql("SELECT subscription, entry_id FROM pending").to_pylist()
    assert {(row["subscription"], row["entry_id"]) for row in views} == pending
    listed = Pending(now, TOPIC, PendingFilter(due_from=0), now=NOW).page(100).messages
    assert {(name, message.ref.entry_id) for message in listed for name in message.subscriptions} == pending
    index = history.tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY' ORDER BY entry_id")
    assert Retention(now, history.tables, NOW)._is_settled(index).tolist() == [True] * 4 + [False] * 2
    assert history.rebuilt(now) == [set()] * 4 + [{"a", "b"}] * 2


def test_what_was_moved_for_a_subscription_and_came_due_while_it_was_away_is_not_its(tmp_path: Path) -> None:
    """b is out for the 4th and 5th; a row that it got when it was back is its, whatever its time."""
    history = History(tmp_path, 9)
    both, out, back = known(tmp_path, ("a", "b"), ("a",), ("a", "b"))
    history.change(KnownRoutes({}), both, 0)
    history.move("b", 6, history.due[3] + 1)  # missed
    history.move("b", 7, history.due[1] + 1)  # handed out before b was removed
    history.deliver("b", 0, 1, 2, 7)
    history.move("b", 1, history.due[4], attempt=1)  # missed
    history.move("b", 3, history.due[8] + 1)  # not yet due
    history.move("a", 4, history.due[3] + 1)
    history.change(both, out, 3)
    history.change(out, back, 5)
    history.move("b", 5, history.due[3] + 2)
    history.deliver("a", *range(8))
    now = settings(tmp_path, "a", "b")

    pending = {("b", 3), ("b", 5), ("a", 8), ("b", 8)}
    views = Warehouse(now).sql("SELECT subscription, entry_id FROM pending").to_pylist()
    assert {(row["subscription"], row["entry_id"]) for row in views} == pending
    assert len(views) == len(pending)
    listed = Pending(now, TOPIC, PendingFilter(due_from=0), now=NOW).page(100).messages
    assert {(name, message.ref.entry_id) for message in listed for name in message.subscriptions} == pending
    audit = run_audit(now, NOW + 2 * DAY)
    assert {(e["subscription"], e["position"]) for e in audit.findings.pop("overdue")["examples"]} == {
        (name, f"1:{i}:-1:-1") for name, i in pending
    }
    assert audit.findings == {}
    assert {row["subscription"]: row["pending"] for row in audit.counts} == {"a": 1, "b": 3}
    index = history.tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY'")
    settled = Retention(now, history.tables, NOW)._is_settled(index).tolist()
    of_old_file = index.drop_columns(["occurrence"])
    assert Retention(now, history.tables, NOW)._is_settled(of_old_file).tolist() == settled
    waiting = {entry for _, entry in pending}
    for row, done in zip(index.to_pylist(), settled, strict=True):
        if row["sequence"] is not None or row["entry_id"] == 8:
            assert done == (row["entry_id"] not in waiting), row
    assert history.rebuilt(now) == [{name for name, entry in pending if entry == i} for i in range(9)]


def test_what_the_first_batch_after_a_rebuild_adds_again_has_been_added(tmp_path: Path) -> None:
    history = History(tmp_path, 3)
    both, out = known(tmp_path, ("a", "b"), ("a",))
    history.change(KnownRoutes({}), both, 0)
    history.change(both, out, 1)
    history.change(out, both, 2)
    history.change(out, both, 2)
    table = history.tables.sql("SELECT * FROM delayed_index ORDER BY deliver_at")
    assert Memberships.of(f"file:{tmp_path}/warehouse").were_missed(table, TOPIC, "b").tolist() == [False, True, False]


def test_to_a_subscription_that_the_job_has_not_begun_with_nothing_is_to_have_come(tmp_path: Path) -> None:
    history = History(tmp_path, 3)
    first, both = known(tmp_path, ("a",), ("a", "b"))
    history.change(KnownRoutes({}), first, 0)
    history.deliver("a", 0, 1)
    for names in (("a", "b"), ("b",)):
        audit = run_audit(settings(tmp_path, *names), NOW + DAY)
        found = [(e["subscription"], e["position"]) for one in audit.findings.values() for e in one["examples"]]
        assert found == [(name, "1:2:-1:-1") for name in names if name == "a"]
    history.change(first, both, 2)
    pending = {row["subscription"]: row["pending"] for row in run_audit(settings(tmp_path, "a", "b"), NOW).counts}
    assert pending == {"a": 1, "b": 1}


@pytest.mark.parametrize("is_first_known", [True, False])
def test_a_subscription_that_a_rebuild_finds_new_gets_what_is_due_from_now_on(
    tmp_path: Path, is_first_known: bool
) -> None:
    """Where nothing tells which were there before, all are taken to have been."""
    history = History(tmp_path, 3)
    if is_first_known:
        history.change(KnownRoutes({}), known(tmp_path, ("a",))[-1], 0)
    history.deliver("a", 0, 1)
    now = settings(tmp_path, "b", "a")
    assert history.rebuilt(now) == ([set(), set(), {"a", "b"}] if is_first_known else [{"b"}, {"b"}, {"a", "b"}])
    assert ("lost" in run_audit(now, NOW).findings, "overdue" in run_audit(now, NOW).findings) == (
        False,
        not is_first_known,
    )
    # Once more: it is known by now.
    assert history.rebuilt(now)[2] == {"a", "b"}


def test_what_comes_again_after_a_rebuild_does_not_go_to_who_was_not_there(tmp_path: Path) -> None:
    """An entry that was handed out, and not durable."""
    history = History(tmp_path, 3)
    first, both = known(tmp_path, ("a",), ("a", "b"))
    history.change(KnownRoutes({}), first, 0)
    again = {"ledger_id": 1, "entry_id": 3, "deliver_at": history.due[0], "sent_at": NOW, "subscription": "a"}
    history.tables.append("deliveries", rows("deliveries", [again]), {})
    history.n = 4
    history.change(first, both, 1)
    history.deliver("a", 0, 1)
    history.deliver("b", 1)
    now = settings(tmp_path, "a", "b")
    history.rebuilt(now)
    found = PreparedState(tmp_path / "checkpoint")
    for _, of_shard in found.inputs(now.tracker.shard_count):
        kept = of_shard[InputKind.REBUILT_DELIVERED].to_pylist()
        assert sorted((row["entry_id"], row["subscription"]) for row in kept) == [(3, 0), (3, 1)]


@dataclass
class Row:
    """A row for b: the tick in which it came, when it is due, and whether the message came with it."""

    tick: int
    due: int
    is_first: bool


@effort(max_examples=examples(200), deadline=None)
@given(
    is_there=st.lists(st.booleans(), min_size=1, max_size=8),
    rows_made=st.lists(st.builds(Row, st.integers(0, 7), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
)
def test_what_was_missed_is_what_a_job_drops(is_there: list[bool], rows_made: list[Row]) -> None:
    """A job that hands out in each tick what is due by its number, and reads the settings before each tick."""
    changes_made: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    goes_out = []
    taken_in = -1
    for tick, (before, now) in enumerate(pairwise([True, *is_there])):
        if before != now:
            positions = json.dumps({"-1": f"1:{taken_in}"} if taken_in >= 0 else {})
            change = {"subscription": "b", "change": "ADDED" if now else "REMOVED", "positions": positions}
            changes_made.append({"topic": TOPIC, **change, "handed_out": tick - 1, "batch_id": tick, "changed_at": 0})
        for row in (row for row in rows_made if row.tick == tick and (row.is_first or now)):
            taken_in += row.is_first
            sequence = None if row.is_first else (tick << SEQUENCE_BITS) + 1
            place = {"topic": TOPIC, "partition": -1, "ledger_id": 1, "entry_id": taken_in if row.is_first else 0}
            table.append({**place, "deliver_at": row.due, "sequence": sequence})
            goes_out.append(max(tick, row.due))
    if table:
        made = pa.Table.from_pylist(table, pa.schema([MESSAGES.field(name) for name in table[0]]))
        memberships = Memberships(pa.Table.from_pylist(changes_made, SUBSCRIPTION_CHANGES))
        # What is dropped while it is away, and does not come back, nobody asks for.
        back = max((row["batch_id"] for row in changes_made if row["change"] == "ADDED"), default=-1)
        expected = [tick < back and not is_there[tick] for tick in goes_out]
        assert memberships.were_missed(made, TOPIC, "b").tolist() == expected


def test_columns_and_sql_say_the_same(tmp_path: Path) -> None:
    history = History(tmp_path, 5)
    first, both, out, back = known(tmp_path, ("a",), ("a", "b"), ("a",), ("b",))
    for handed_out, pair in ((1, (first, both)), (2, (both, out)), (4, (out, back))):
        history.change(*pair, handed_out)
    memberships = Memberships.of(f"file:{tmp_path}/warehouse")
    late: list[dict[str, Any]] = [
        {"ledger_id": ledger, "entry_id": 0, "deliver_at": at} for ledger in (0, 1, 2) for at in history.due
    ]
    others: list[dict[str, Any]] = [{}, {"partition": 1}, {"topic": "t"}]
    others += [{"subscription": "b", "sequence": tick << SEQUENCE_BITS} for tick in range(6)]
    table = pa.concat_tables(
        [rows("delayed_index", [{**row, "operation": "LATE", **other} for row in late]) for other in others]
    )
    history.tables.append("delayed_index", table, {})
    table = history.tables.sql("SELECT * FROM delayed_index WHERE operation = 'LATE'")
    for name in ("a", "b", "c"):
        condition = memberships.sql("i", Sql("i.deliver_at"), Sql("i.topic"), literal(name), Sql("i.sequence"))
        sql = f"SELECT {condition} AS missed FROM delayed_index AS i WHERE operation = 'LATE'"
        by_sql = history.tables.sql(sql)["missed"].to_pylist()
        assert memberships.were_missed(table, TOPIC, name).tolist() == by_sql
        one_by_one = [
            row["topic"] == TOPIC and memberships.was_absent(TOPIC, name, row, row["deliver_at"], row["sequence"] or 0)
            for row in table.to_pylist()
        ]
        assert one_by_one == by_sql
        assert any(by_sql) == (name == "b")
    assert memberships.last == {TOPIC: {"b"}}
