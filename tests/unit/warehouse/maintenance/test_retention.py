"""Retention deletes what nobody needs: after any number of runs a rebuild and the audit say what they said before."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.position import Position
from checkpoint_from_tables.rebuild.changes import find_commands
from checkpoint_from_tables.rebuild.delivered import Delivered
from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import Settings, local_path
from tests.support.fuzzing.examples import examples
from tests.support.warehouse.rebuilt import without_destinations
from tests.support.warehouse.tables import DAY, HOUR, NOW, TOPIC, content, make, rows
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import FAN_IN
from warehouse.maintenance.maintain import maintain
from warehouse.maintenance.retention import OutdatedError
from warehouse.routes.known_routes import subscription_names

pytestmark = pytest.mark.slow

OTHER = "persistent://public/default/other"  # a topic without a route
KEPT = {f"{name}_millis": DAY for name in ("delayed_index", "deliveries", "outcomes", "entries", "rejects")}


@contextmanager
def warehouse() -> Iterator[tuple[Settings, Tables]]:
    with tempfile.TemporaryDirectory() as folder:
        yield make(Path(folder), **KEPT)


def append(tables: Tables, name: str, values: list[dict[str, Any]]) -> None:
    if values:
        tables.append(name, rows(name, values), {f"test{tables.version(name)}": 1})


class Entry:
    """An entry as the job would have left it in the tables."""

    def __init__(self, number: int, topic: str, messages: list[tuple[int, Any]], age: int) -> None:
        self.position: dict[str, Any] = {"topic": topic, "ledger_id": number // 4, "entry_id": number % 4}
        self.published = NOW - age
        self.messages = messages

    def rows(self, is_durable: bool) -> dict[str, list[dict[str, Any]]]:
        size = len(self.messages)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("delayed_index", "deliveries", "outcomes")}
        for i, (due, fates) in enumerate(self.messages):
            at = {**self.position, "batch_index": i if size > 1 else -1, "batch_size": size, "deliver_at": due}
            found["delayed_index"].append({**at, "operation": "DELAY"})
            for subscription, fate in zip("ab", fates, strict=True):
                text = f"{at['ledger_id']}:{at['entry_id']}:-1:{at['batch_index']}"
                own = {**at, "subscription": subscription, "position": text}
                # What happened, in its order: cancelled, restored, moved, delivered.
                for sequence, event in enumerate(fate, 1):
                    done = {**own, "sequence": sequence}
                    before = max(own["deliver_at"], due)
                    if event in MOVES:
                        own["deliver_at"] = MOVES[event](due, own["deliver_at"])
                        if event == "RETRY":
                            own["attempt"] = own.get("attempt", 0) + 1
                        done = {**own, "sequence": sequence}
                        found["delayed_index"].append({**done, "operation": "DELAY"})
                    if event == "DELIVER":
                        found["deliveries"].append({**own, "sent_at": own["deliver_at"] + 5})
                        continue
                    operation = {"operation": "MOVE" if event in MOVES else event}
                    last_due = max(own["deliver_at"], before)
                    found["delayed_index"].append({**done, **operation, "deliver_at": last_due})
                    if event not in ("HOLD", "RELEASE"):
                        command = {"result": "APPLIED", "applied_at": self.published + sequence}
                        command["operation"] = "RESCHEDULE" if event in ("LATER", "EARLIER") else event
                        found["outcomes"].append({**done, **command})
        entry = {**self.position, "batch_size": size, "publish_time": self.published}
        return found | {"entries": [entry] if is_durable else []}


def write(tables: Tables, made: list[Entry], durable: int | None = None) -> None:
    """Appends entries, a few at a time; the first `durable` of them (or all) are in `entries`."""
    durable = len(made) if durable is None else durable
    for start in range(0, len(made), 3):
        batch = [entry.rows(start + i < durable) for i, entry in enumerate(made[start : start + 3])]
        for name in batch[0]:
            append(tables, name, [row for found in batch for row in found[name]])


# By a RESCHEDULE or RETRY, or because it is held back: a message's next time, of when it was due at first, and last.
MOVES: dict[str, Callable[[int, int], int]] = {
    "LATER": lambda due, last: last + DAY // 2,
    "EARLIER": lambda due, last: last - DAY,
    "RETRY": lambda due, last: last + DAY // 4,
    "HOLD": lambda due, last: HELD_DELIVER_AT,
    "RELEASE": lambda due, last: due,
}
WAITS = [
    (),
    ("LATER",),
    ("EARLIER",),
    ("CANCEL", "RESTORE"),
    ("HOLD",),
    ("HOLD", "RELEASE"),
    ("HOLD", "RELEASE", "HOLD"),
]
CANCELLED = [
    ("CANCEL",),
    ("LATER", "CANCEL"),
    ("EARLIER", "LATER", "CANCEL"),
    ("CANCEL", "RESTORE", "CANCEL"),
    ("HOLD", "CANCEL"),
]
DELIVERED = [
    ("DELIVER",),
    ("LATER", "DELIVER"),
    ("EARLIER", "DELIVER"),
    ("CANCEL", "RESTORE", "DELIVER"),
    ("HOLD", "RELEASE", "DELIVER"),
    ("DELIVER", "RETRY", "DELIVER"),
    ("DELIVER", "RETRY", "CANCEL"),
]
RETRIED = [("DELIVER", "RETRY"), ("LATER", "DELIVER", "RETRY", "DELIVER", "RETRY")]  # and to be delivered


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    made = []
    for number in range(draw(st.integers(1, 8))):
        messages = []
        for _ in range(draw(st.integers(1, 3))):
            due = NOW + draw(st.integers(-8, 3)) * DAY // 2 - HOUR
            # What is not due yet has not been delivered; what is due may hang.
            fates = [*WAITS, *CANCELLED] + (DELIVERED * 2 + RETRIED if due < NOW - DAY else [])
            messages.append((due, (draw(st.sampled_from(fates)), draw(st.sampled_from(fates)))))
        topic = draw(st.sampled_from([TOPIC, TOPIC, TOPIC, OTHER]))
        made.append(Entry(number, topic, messages, age=draw(st.integers(0, 10)) * DAY + 4 * DAY))
    return made


def rebuilt(made: Settings, folder: Path) -> dict[str, Any]:
    """What a rebuild would deliver, to whom and when, and what it would keep in mind of entries that come again."""
    shutil.copytree(local_path(made.warehouse), folder / "warehouse")
    tables = Tables(str(folder / "warehouse"))
    with without_destinations():
        rebuild(made, tables, folder)
    names = subscription_names(made)[TOPIC]
    read = {
        kind: pq.read_table(folder / f"query/rebuild/rebuilt_{kind}.parquet").to_pylist()
        for kind in ("cancelled", "delivered", "moved")
    }
    done = [*read["cancelled"], *read["delivered"]]
    cancelled = {(names[r["subscription"]], r["ledger_id"], r["entry_id"], r["batch_index"]) for r in done}
    moved = {
        (names[r["subscription"]], r["ledger_id"], r["entry_id"], max(r["batch_index"], 0)): r["sequence"]
        for r in read["moved"]
    }
    meta = json.loads((folder / "query/rebuild/meta.json").read_text())
    delivers = set()
    pending = tables.sql(
        f"SELECT * FROM delayed_index WHERE operation = 'DELAY' AND topic = '{TOPIC}' "
        f"AND deliver_at >= {meta['offset']['load_horizon']}"
    ).to_pylist()
    for row, name in itertools.product(pending, names):
        key = (name, row["ledger_id"], row["entry_id"])
        is_its_row = moved.get((*key, max(row["batch_index"], 0))) == row["sequence"]
        if (
            is_its_row
            and row["subscription"] in (None, name)
            and not {(*key, -1), (*key, row["batch_index"])} & cancelled
        ):
            delivers.add((*key, row["batch_index"], row["deliver_at"]))
    last = {topic: tuple(map(int, position.split(":")[:2])) for topic, position in meta["offset"]["positions"].items()}
    again = {key for key in cancelled if key[1:3] > last.get(TOPIC, (-1, -1))}
    return {"delivers": delivers, "again": again, "last": last, "paused": meta["paused"]}


@given(entries(), st.integers(0, 8), st.integers(1, 3))
@settings(max_examples=examples(20))
def test_a_rebuild_and_the_audit_find_the_same_after_retention(made: list[Entry], durable: int, runs: int) -> None:
    with warehouse() as (settings_, tables), tempfile.TemporaryDirectory() as folder:
        write(tables, made, durable)
        before = rebuilt(settings_, Path(folder, "before")), run_audit(settings_, NOW).findings
        for _ in range(runs):
            maintain(settings_, now=NOW)
            assert run_audit(settings_, NOW).findings == before[1]
        assert rebuilt(settings_, Path(folder, "after")) == before[0]


@given(entries())
@settings(max_examples=examples(20))
def test_only_what_is_settled_and_past_its_retention_leaves_the_index(made: list[Entry]) -> None:
    with warehouse() as (settings_, tables):
        write(tables, made)
        maintain(settings_, now=NOW)
        found = tables.sql(
            "SELECT topic, ledger_id, entry_id, batch_index FROM delayed_index WHERE operation = 'DELAY'"
        )
        kept = {tuple(row.values()) for row in found.to_pylist()}
        for entry in made:
            for i, (due, fates) in enumerate(entry.messages):
                key = (*entry.position.values(), i if len(entry.messages) > 1 else -1)
                waits = any(fate in [*WAITS, *RETRIED] for fate in fates)
                needed = waits or due >= NOW - DAY or entry.position["topic"] == OTHER
                assert needed <= (key in kept)


def test_a_rebuild_passes_over_a_cancel_that_waited_in_vain() -> None:
    """Its message came after it was given up, with a later time than the one it named."""
    with warehouse() as (made, tables):
        at = {"topic": TOPIC, "ledger_id": 1, "batch_index": -1, "batch_size": 1}
        cancel = {**at, "operation": "CANCEL", "subscription": "a"}
        delay = {**at, "operation": "DELAY", "deliver_at": NOW + DAY}
        in_vain = [{**cancel, "entry_id": 0, "deliver_at": NOW - DAY}, {**delay, "entry_id": 0}]
        applied = [{**cancel, "entry_id": 1, "deliver_at": NOW + DAY}, {**delay, "entry_id": 1}]
        waiting = [{**cancel, "entry_id": 2, "deliver_at": NOW + DAY}]
        given_up = [{**cancel, "entry_id": 3, "deliver_at": NOW - DAY}]
        append(tables, "delayed_index", [*in_vain, *applied, *waiting, *given_up])
        names, durable = subscription_names(made), {TOPIC: Position(1, 9)}
        cancelled = find_commands(tables, names, durable, NOW).changes(Delivered(names, durable)).cancelled
        assert sorted(cancelled["entry_id"].to_pylist()) == [1, 2]


def test_in_the_end_nothing_is_left_of_what_is_done() -> None:
    with warehouse() as (made, tables):
        fates = [(*pair,) for pair in itertools.product([*DELIVERED, ("CANCEL",)], repeat=2)] * 2
        done = [Entry(i, TOPIC, [(NOW - 3 * DAY, fate)], age=5 * DAY) for i, fate in enumerate(fates)]
        write(tables, [*done, Entry(len(done), TOPIC, [(NOW + DAY, ((), ()))], age=0)])
        # The newest delivery is not old: deliveries near it stay.
        append(tables, "deliveries", [{"ledger_id": 999, "sent_at": NOW, "position": "999:0:-1:-1"}])
        for _ in range(4):
            maintain(made, now=NOW)
        counts = {name: tables.sql(f"SELECT * FROM {name}").num_rows for name in ("delayed_index", "entries")}
        assert counts == {"delayed_index": 1, "entries": 1}
        assert tables.sql("SELECT * FROM deliveries").num_rows == 1
        assert tables.sql("SELECT * FROM outcomes").num_rows == 0
        assert run_audit(made, NOW).is_clean


def test_what_was_published_within_an_hour_before_the_last_entry_of_its_topic_stays() -> None:
    """A restore with another broker compares that: what it does not find it would deliver again."""
    with warehouse() as (made, tables):
        ages = [5 * DAY + 2 * HOUR, 5 * DAY + HOUR // 2, 5 * DAY]
        done = [Entry(i, TOPIC, [(NOW - 4 * DAY, (("DELIVER",), ("CANCEL",)))], age) for i, age in enumerate(ages)]
        write(tables, done)
        append(tables, "deliveries", [{"ledger_id": 999, "sent_at": NOW, "position": "999:0:-1:-1"}])
        for _ in range(4):
            maintain(made, now=NOW)
        for name in ("entries", "deliveries", "outcomes"):
            found = tables.sql(f"SELECT * FROM {name} WHERE ledger_id = 0 ORDER BY entry_id")
            assert found["entry_id"].to_pylist() == [1, 2], name


def test_a_cancel_stays_until_its_message_can_no_longer_come() -> None:
    with warehouse() as (made, tables):
        cancel = {"operation": "CANCEL", "subscription": "a", "deliver_at": NOW - 3 * DAY}
        append(tables, "delayed_index", [{**cancel, "ledger_id": 2, "entry_id": entry} for entry in range(4)])
        append(tables, "entries", [{"ledger_id": 2, "entry_id": 2, "publish_time": NOW}])
        maintain(made, now=NOW)
        assert tables.sql("SELECT entry_id FROM delayed_index")["entry_id"].to_pylist() == [3]


def test_a_request_id_is_kept_for_a_day_whatever_the_retention() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made, tables = make(Path(folder), **{**KEPT, "outcomes_millis": 1})
        ages = {"young": 25 * HOUR, "old": 27 * HOUR}
        append(
            tables,
            "outcomes",
            [{"request_id": r, "applied_at": NOW - age, "result": "NOT_FOUND"} for r, age in ages.items()],
        )
        maintain(made, now=NOW)
        assert tables.sql("SELECT request_id FROM outcomes")["request_id"].to_pylist() == ["young"]


def test_what_is_paused_is_never_forgotten() -> None:
    with warehouse() as (made, tables):
        switch = {"subscription": "a", "result": "APPLIED", "applied_at": NOW - 30 * DAY, "ledger_id": -1}
        append(
            tables, "outcomes", [{**switch, "operation": o, "sequence": i} for i, o in enumerate(["PAUSE", "CANCEL"])]
        )
        append(tables, "entries", [{"ledger_id": 2, "entry_id": 0, "publish_time": NOW}])
        maintain(made, now=NOW)
        assert tables.sql("SELECT operation FROM outcomes")["operation"].to_pylist() == ["PAUSE"]


def test_a_cancel_that_waits_outlives_the_time_that_it_names() -> None:
    with warehouse() as (made, tables):
        given = {"result": "WAITING", "operation": "CANCEL", "applied_at": NOW - 30 * DAY, "ledger_id": 2}
        times = {"to come": NOW + 30 * DAY, "just past": NOW - HOUR, "past": NOW - 2 * DAY, "skip": None}
        append(tables, "outcomes", [{**given, "request_id": r, "deliver_at": time} for r, time in times.items()])
        maintain(made, now=NOW)
        assert sorted(tables.sql("SELECT request_id FROM outcomes")["request_id"].to_pylist()) == [
            "just past",
            "to come",
        ]


def test_rejects_outlive_their_entry() -> None:
    with warehouse() as (made, tables):
        at = {"ledger_id": 1, "entry_id": 1, "publish_time": NOW - 5 * DAY}
        append(tables, "rejects", [{**at, "reason": "deliverAt is no number", "position": "1:1:-1:-1"}])
        append(tables, "entries", [at, {"ledger_id": 2, "entry_id": 0, "publish_time": NOW}])
        left = []
        for _ in range(2):
            assert run_audit(made, NOW).findings == {
                "lost": {"count": 2, "examples": run_audit(made, NOW).findings["lost"]["examples"]}
            }
            maintain(made, now=NOW)
            left.append([tables.sql(f"SELECT * FROM {name}").num_rows for name in ("entries", "rejects")])
        assert left == [[1, 1], [1, 0]]


def test_rejects_of_a_topic_without_a_route_stay_with_their_entry_and_those_of_commands_do_not() -> None:
    with warehouse() as (made, tables):
        at = {"ledger_id": 1, "entry_id": 1, "publish_time": NOW - 5 * DAY}
        rejected = [{**at, "topic": topic, "position": "1:1:-1:-1"} for topic in (OTHER, made.control.topic)]
        append(tables, "rejects", rejected)
        append(tables, "delayed_index", [{**at, "topic": OTHER, "operation": "DELAY", "deliver_at": NOW}])
        append(tables, "entries", [{**at, "topic": OTHER}, {"topic": OTHER, "ledger_id": 2, "publish_time": NOW}])
        maintain(made, now=NOW)
        assert tables.sql("SELECT topic FROM rejects")["topic"].to_pylist() == [OTHER]


def test_a_run_that_outlasts_the_versions_that_it_looks_at_says_so_and_the_next_one_goes_on() -> None:
    made_entries = [Entry(n, TOPIC, [(NOW - 3 * DAY, (("CANCEL",), ("CANCEL",)))], 4 * DAY) for n in range(3 * FAN_IN)]
    with warehouse() as (made, tables):
        tables.create(keep_versions_millis=1)
        write(tables, made_entries)
        with pytest.raises(OutdatedError, match="keep_versions_millis"):
            maintain(made, now=NOW)
        before = content(tables, "delayed_index")
        with suppress(OutdatedError):  # it deletes rows, with which this run outlasts a version again
            maintain(made, now=NOW)
        assert len(content(tables, "delayed_index")) < len(before)
