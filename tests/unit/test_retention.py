"""Retention deletes what nobody needs: after any number of runs a rebuild and the audit say what they said before."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conf.settings import Settings
from jobs.audit import run_audit
from streaming.maintenance import maintain
from streaming.rebuild import _BOOKED, _DONE, _PENDING, _pending, _taken
from streaming.routes import subscription_names
from streaming.tables import Tables
from tests.unit.test_maintenance import DAY, HOUR, NOW, TOPIC, make, rows

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

    def __init__(self, number: int, topic: str, messages: list[tuple[int, tuple[str, str]]], age: int) -> None:
        self.position = {"topic": topic, "ledger_id": number // 4, "entry_id": number % 4}
        self.published = NOW - age
        self.messages = messages

    def rows(self, is_booked: bool) -> dict[str, list[dict[str, Any]]]:
        size = len(self.messages)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("delayed_index", "deliveries", "outcomes")}
        for i, (due, fates) in enumerate(self.messages):
            at = {**self.position, "batch_index": i if size > 1 else -1, "batch_size": size, "deliver_at": due}
            found["delayed_index"].append({**at, "operation": "DELAY"})
            for subscription, fate in zip("ab", fates, strict=True):
                text = f"{at['ledger_id']}:{at['entry_id']}:-1:{at['batch_index']}"
                own = {**at, "subscription": subscription, "position": text}
                if fate == "delivered":
                    found["deliveries"].append({**own, "sent_at": due + 5})
                elif fate == "cancelled":
                    found["outcomes"].append(
                        {**own, "result": "APPLIED", "operation": "SKIP", "applied_at": self.published + 1}
                    )
                    found["delayed_index"].append({**own, "operation": "CANCEL"})
        entry = {**self.position, "batch_size": size, "publish_time": self.published}
        return found | {"entries": [entry] if is_booked else []}


def write(tables: Tables, made: list[Entry], booked: int | None = None) -> None:
    """Appends entries, a few at a time; the first `booked` of them (or all) are in `entries`."""
    booked = len(made) if booked is None else booked
    for start in range(0, len(made), 3):
        batch = [entry.rows(start + i < booked) for i, entry in enumerate(made[start : start + 3])]
        for name in batch[0]:
            append(tables, name, [row for found in batch for row in found[name]])


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    made = []
    for number in range(draw(st.integers(1, 8))):
        messages = []
        for _ in range(draw(st.integers(1, 3))):
            due = NOW + draw(st.integers(-8, 3)) * DAY // 2 - HOUR
            # What is not due yet has not been delivered; what is due may hang.
            fates = ["waits", "cancelled"] + (["delivered"] * 4 if due < NOW else [])
            messages.append((due, (draw(st.sampled_from(fates)), draw(st.sampled_from(fates)))))
        topic = draw(st.sampled_from([TOPIC, TOPIC, TOPIC, OTHER]))
        made.append(Entry(number, topic, messages, age=draw(st.integers(0, 10)) * DAY + 4 * DAY))
    return made


def rebuilt(made: Settings, tables: Tables) -> tuple[Any, ...]:
    """What a rebuild would deliver to whom, and from where it would read on."""
    names = subscription_names(made)
    taken = _taken(tables.sql(_DONE.format(now=NOW)), names, NOW)
    pending = tables.sql(_PENDING)
    is_pending, _ = _pending(pending, taken, {}, names)
    done = {tuple(row.values())[:4] for row in taken.to_pylist()}
    wanted = set()
    for row in itertools.compress(pending.to_pylist(), is_pending):
        for number, name in enumerate(names[row["topic"]]):
            key = (row["ledger_id"], row["entry_id"])
            if (number, *key, row["batch_index"]) not in done and (number, *key, -1) not in done:
                wanted.add((name, *key, row["batch_index"], row["deliver_at"]))
    last: dict[str, tuple[int, int]] = {}
    for row in tables.sql(_BOOKED).to_pylist():
        last[row["topic"]] = max((row["ledger_id"], row["entry_id"]), last.get(row["topic"], (-1, -1)))
    # Of what comes again from the source topics: what is done of it.
    again = {row for row in done if all(row[1:3] > position for topic, position in last.items() if topic == TOPIC)}
    return wanted, last, again


@given(entries(), st.integers(0, 8), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_a_rebuild_and_the_audit_find_the_same_after_retention(made: list[Entry], booked: int, runs: int) -> None:
    with warehouse() as (settings_, tables):
        write(tables, made, booked)
        before = rebuilt(settings_, tables), run_audit(settings_, NOW).findings
        for _ in range(runs):
            maintain(settings_, now=NOW)
            assert rebuilt(settings_, tables) == before[0]
            assert run_audit(settings_, NOW).findings == before[1]


@given(entries())
@settings(max_examples=20, deadline=None)
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
                needed = "waits" in fates or due >= NOW - DAY or entry.position["topic"] == OTHER
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
        taken = _taken(tables.sql(_DONE.format(now=NOW)), subscription_names(made), NOW)
        assert sorted(taken["entry_id"].to_pylist()) == [1, 2]


def test_in_the_end_nothing_is_left_of_what_is_done() -> None:
    with warehouse() as (made, tables):
        fates = [("delivered", "delivered"), ("cancelled", "delivered"), ("cancelled", "cancelled")] * 20
        done = [Entry(i, TOPIC, [(NOW - 3 * DAY, fate)], age=5 * DAY) for i, fate in enumerate(fates)]
        write(tables, [*done, Entry(len(done), TOPIC, [(NOW + DAY, ("waits", "waits"))], age=0)])
        # The newest delivery is not old: deliveries near it stay.
        append(tables, "deliveries", [{"ledger_id": 999, "sent_at": NOW, "position": "999:0:-1:-1"}])
        for _ in range(3):
            maintain(made, now=NOW)
        counts = {name: tables.sql(f"SELECT * FROM {name}").num_rows for name in ("delayed_index", "entries")}
        assert counts == {"delayed_index": 1, "entries": 1}
        assert tables.sql("SELECT * FROM deliveries").num_rows == 1
        assert tables.sql("SELECT * FROM outcomes").num_rows == 0
        assert run_audit(made, NOW).is_clean


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
        ages = {"young": HOUR, "old": 25 * HOUR}
        append(
            tables,
            "outcomes",
            [{"request_id": r, "applied_at": NOW - age, "result": "NOT_FOUND"} for r, age in ages.items()],
        )
        maintain(made, now=NOW)
        assert tables.sql("SELECT request_id FROM outcomes")["request_id"].to_pylist() == ["young"]


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
