"""A rebuild finds what was kept of messages and commands, by plain Python that knows what happened to each."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.position import Position
from checkpoint_from_tables.rebuild.context import RebuildContext
from checkpoint_from_tables.rebuild.delivered import Delivered, is_not_durable
from checkpoint_from_tables.rebuild.message_set import MessageSet
from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import Settings
from streaming.batch_schema import InputKind
from streaming.checkpoint.prepared import PreparedState
from tests.support.fuzzing.examples import examples
from tests.support.tracker.control_desk import Desk
from tests.support.warehouse.rebuilt import of_all_shards, without_destinations
from tests.support.warehouse.tables import DAY, HOUR, NOW, TOPIC, make, rows
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, subscription_numbers, typed
from tracker.rebuilt import REBUILT_KEPT_MILLIS
from tracker.sharding import shard_of
from warehouse.delta.tables import Tables
from warehouse.routes.known_routes import subscription_names

pytestmark = pytest.mark.slow

OTHER = "persistent://public/default/other"  # a topic without a route
_ENTRY = ["ledger_id", "entry_id"]
LATER = 3 * DAY  # longer than a rebuild keeps what it knows no time of


@dataclass
class Message:
    """A message of an entry, and what one subscription has of it."""

    times: list[tuple[int, int]]  # (sequence, due) of its rows that are sealed, the last move's even where it is not
    is_last_sealed: bool = True
    is_cancelled: bool = False
    is_delivered: bool = False
    attempt: int = 0  # the number of its last retry

    @property
    def is_waiting(self) -> bool:
        return not self.is_cancelled and not self.is_delivered


@dataclass
class History:
    """An entry, and what happened to it: rows of the tables, and the messages of each subscription."""

    topic: str
    ledger: int
    entry: int
    due: list[int]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    sequence: int = 0
    is_sealing: bool = True

    def __post_init__(self) -> None:
        self.messages = {name: [Message([(0, due)]) for due in self.due] for name in "ab"}
        for i, due in enumerate(self.due):
            self.index("DELAY", i, due, subscription=None, sequence=None)

    def at(self, message: int | None) -> dict[str, Any]:
        size = len(self.due)
        index = -1 if message is None or size == 1 else message
        return {
            "topic": self.topic,
            "ledger_id": self.ledger,
            "entry_id": self.entry,
            "batch_index": index,
            "batch_size": size,
        }

    def index(self, operation: str, message: int | None, due: int, **columns: Any) -> None:
        self.tables["delayed_index"].append({**self.at(message), "operation": operation, "deliver_at": due, **columns})

    def command(self, kind: str, name: str, message: int | None, due: int = 0) -> None:
        """Applies a command as a shard would, where it can: to one message, or to the whole entry (None)."""
        own = self.messages[name]
        named = own if message is None else [own[message]]
        if any(m.is_delivered or m.is_cancelled == (kind != "RESTORE") for m in named):
            return
        self.sequence += 1
        by: dict[str, Any] = {"subscription": name, "sequence": self.sequence}
        past = max(m.times[-1][1] for m in named)
        self.tables["outcomes"].append(
            {**self.at(message), **by, "result": "APPLIED", "operation": kind, "deliver_at": due or None}
        )
        for m in named:
            if kind == "RESCHEDULE":
                m.times = [*(m.times if m.is_last_sealed else m.times[:-1]), (self.sequence, due)]
                m.is_last_sealed = self.is_sealing
            else:
                m.is_cancelled = kind == "SKIP"
        if self.is_sealing and kind == "RESCHEDULE":
            by["attempt"] = named[0].attempt or None
            self.index("DELAY", message, due, **by)
            self.index("MOVE", message, max(past, due), **by)
        elif self.is_sealing:
            self.index("CANCEL" if kind == "SKIP" else kind, message, max(past, *self.due), **by)

    def hold(self, name: str, message: int) -> None:
        """As a paused subscription does with what comes due."""
        m = self.messages[name][message]
        if m.is_waiting and m.is_last_sealed and self.is_sealing:
            self.sequence += 1
            m.times.append((self.sequence, HELD_DELIVER_AT))
            for operation in ("DELAY", "MOVE"):
                by = {"subscription": name, "sequence": self.sequence, "attempt": m.attempt or None}
                self.index(operation, message, HELD_DELIVER_AT, **by)

    def resume(self, name: str, message: int) -> None:
        """As a subscription that goes on does with what was held back, where no seal follows but that of its move."""
        m = self.messages[name][message]
        if m.is_waiting and m.times[-1][1] == HELD_DELIVER_AT and self.is_sealing:
            self.sequence += 1
            m.times.append((self.sequence, NOW))
            m.is_last_sealed = False
            by = {"subscription": name, "sequence": self.sequence, "attempt": m.attempt or None}
            self.index("MOVE", message, HELD_DELIVER_AT, **by)

    def retry(self, name: str, message: int, due: int) -> None:
        """As a shard does: the new row is sealed with the answer, if no crash comes between."""
        m = self.messages[name][message]
        if m.is_delivered:
            self.sequence += 1
            m.attempt, m.is_delivered = m.attempt + 1, False
            due = max(due, m.times[-1][1] + 1)
            by = {"subscription": name, "sequence": self.sequence, "attempt": m.attempt}
            applied = {"result": "APPLIED", "operation": "RETRY", "deliver_at": due}
            self.tables["outcomes"].append({**self.at(message), **by, **applied})
            m.times = [*(m.times if m.is_last_sealed else m.times[:-1]), (self.sequence, due)]
            m.is_last_sealed = self.is_sealing
            for operation in ("DELAY", "MOVE") if self.is_sealing else ():
                self.index(operation, message, due, **by)

    def deliver(self, name: str, message: int) -> None:
        m = self.messages[name][message]
        if m.is_waiting and m.times[-1][1] < HELD_DELIVER_AT:
            m.is_delivered = True
            at = self.at(message)
            text = f"{self.ledger}:{self.entry}:-1:{at['batch_index']}"
            self.tables["deliveries"].append(
                {
                    **at,
                    **{"subscription": name, "deliver_at": m.times[-1][1], "sent_at": NOW, "position": text},
                    "attempt": m.attempt or None,
                }
            )


times = st.one_of(st.integers(-3, 3), st.integers(-3, 3).map(lambda n: n + LATER)).map(lambda n: NOW + n)


@st.composite
def histories(draw: st.DrawFn) -> list[History]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        topic = draw(st.sampled_from([TOPIC, TOPIC, TOPIC, OTHER]))
        ledger = number // 2 + (100 if topic == OTHER else 0)  # no two topics share one
        entry = History(topic, ledger, number % 2, draw(st.lists(times, min_size=1, max_size=3)))
        for _ in range(draw(st.integers(0, 6))):
            # What comes after the last seal is not sealed.
            entry.is_sealing &= draw(st.integers(0, 3)) > 0
            name, message = draw(st.sampled_from("ab")), draw(st.integers(0, len(entry.due) - 1))
            event = draw(
                st.sampled_from(["SKIP", "SKIP WHOLE", "RESTORE", "RESCHEDULE", "HOLD", "RESUME", "DELIVER", "RETRY"])
            )
            if event == "DELIVER":
                entry.deliver(name, message)
            elif event == "RETRY":
                entry.deliver(name, message)
                entry.retry(name, message, draw(times))
            elif event == "HOLD":
                entry.hold(name, message)
            elif event == "RESUME":
                entry.resume(name, message)
            elif event == "SKIP WHOLE":
                entry.command("SKIP", name, None)
            else:
                entry.command(event, name, message, draw(times) if event == "RESCHEDULE" else 0)
        made.append(entry)
    return made


def write(tables: Tables, made: list[History], durable: int) -> None:
    """The first `durable` entries are in `entries`."""
    for entry in made[:durable]:
        entry.tables["entries"] = [entry.at(None)]
    for name in ("delayed_index", "outcomes", "deliveries", "entries"):
        values = [row for entry in made for row in entry.tables[name]]
        if values:
            tables.append(name, rows(name, values), {"test": 1})


def rebuilt(made: Settings, folder: str) -> tuple[dict[str, Any], PreparedState, dict[str, int]]:
    with without_destinations():
        counts = rebuild(made, Tables(made.warehouse), Path(folder), now=NOW)
    return json.loads(Path(folder, "query/rebuild/meta.json").read_text()), PreparedState(Path(folder)), counts


def begun(made: Settings, found: PreparedState) -> Desk:
    """What all shards together begin with."""
    desk = Desk(subscriptions=subscription_names(made))
    desk.rebuild(of_all_shards(found))
    return desk


@given(histories(), st.integers(0, 6))
@settings(max_examples=examples(30), deadline=None)
def test_a_rebuild_finds_what_happened(made: list[History], durable: int) -> None:
    check_rebuild(made, durable)


@pytest.mark.parametrize("is_delivered", [False, True])
def test_what_was_held_back_and_handed_out_is_handed_out_again_unless_it_came(is_delivered: bool) -> None:
    entry = History(TOPIC, 1, 0, [NOW - 5])
    entry.hold("a", 0)
    entry.resume("a", 0)
    if is_delivered:
        entry.deliver("a", 0)
    assert entry.messages["a"][0].is_waiting == (not is_delivered)
    check_rebuild([entry], 1)


@pytest.mark.parametrize("is_own_first", [False, True])
@pytest.mark.parametrize("event", ["RESUME", "RETRY", "RESCHEDULE"])
def test_a_move_that_was_not_sealed_has_the_end_of_its_subscriptions_last_row(event: str, is_own_first: bool) -> None:
    """Whichever row of the message comes first: also the other subscription has moved it, to another end."""
    entry, due = History(TOPIC, 1, 0, [NOW - HOUR]), NOW - HOUR
    after = {"properties": [("expireAfter", f"{2 * HOUR}ms")]}
    entry.tables["delayed_index"][0] |= {"expires_at": due + 2 * HOUR, **after}
    rows_of = {}
    for name, sequence, moved_to in (("a", 1, due + 10), ("b", 2, due - DAY)):
        by = {"subscription": name, "sequence": sequence, "expires_at": moved_to + 2 * HOUR, **after}
        rows_of[name] = {**entry.at(0), "operation": "DELAY", "deliver_at": moved_to, **by}
    entry.sequence = 2
    entry.tables["delayed_index"] += [rows_of[name] for name in ("ab" if is_own_first else "ba")]
    entry.messages["a"][0].times.append((1, due + 10))
    own_end, was_due = due + 10 + 2 * HOUR, None
    if event == "RESUME":
        entry.hold("a", 0)
        was_due = due + 10
        entry.tables["delayed_index"][-2] |= {"was_due": was_due, "expires_at": own_end, **after}
        entry.resume("a", 0)
    elif event == "RETRY":
        entry.deliver("a", 0)
        entry.is_sealing = False
        entry.retry("a", 0, NOW + HOUR)
    else:
        entry.is_sealing = False
        entry.command("RESCHEDULE", "a", 0, NOW + HOUR)
        own_end = NOW + 3 * HOUR
    with tempfile.TemporaryDirectory() as folder:
        settings_, tables = make(Path(folder))
        write(tables, [entry], 1)
        rebuilt(settings_, folder)
        [row] = tables.sql(
            f"SELECT * FROM delayed_index WHERE operation = 'DELAY' AND sequence = {entry.sequence}"
        ).to_pylist()
    assert (row["subscription"], row["expires_at"], row["was_due"]) == ("a", own_end, was_due)


def test_only_what_was_applied_is_taken_for_done() -> None:
    """A repeat of a command that had come too late, or named something else, was answered ALREADY_APPLIED by 0.1.0."""
    entry = History(TOPIC, 1, 0, [NOW + DAY])
    for name in "ab":
        repeated = {"subscription": name, "result": "ALREADY_APPLIED", "operation": "CANCEL"}
        entry.tables["outcomes"].append({**entry.at(0), **repeated})
    check_rebuild([entry], 1)


def check_rebuild(made: list[History], durable: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings_, tables = make(Path(folder))
        write(tables, made, durable)
        last = {
            t: max(((e.ledger, e.entry) for e in made[:durable] if e.topic == t), default=()) for t in (TOPIC, OTHER)
        }
        meta, found, counts = rebuilt(settings_, folder)
        expected: dict[Key, set[str]] = {}
        for entry in made:
            expected |= rows_left(entry, (entry.ledger, entry.entry) <= last[entry.topic])

        first = min([NOW, *(key[0] for key, masks in expected.items() if masks)])
        waits = {key: masks for key, masks in expected.items() if key[0] >= first}
        shards = settings_.tracker.shard_count
        shard = {key: int(shard_of(np.array([key[1]]), np.array([key[2]]), shards)[0]) for key in waits}
        assert (meta["offset"]["load_horizon"], meta["released"]) == (first, first - 1)
        assert meta["sealed"] == [list(shard.values()).count(i) for i in range(shards)]
        assert meta["unwanted"] == [sum(shard[k] == i and not waits[k] for k in waits) for i in range(shards)]
        assert counts["pending"] == sum(bool(masks) for masks in waits.values())

        # The shards begin with what says the same of each row when it comes due, whatever they have forgotten by then.
        desk = begun(settings_, found)
        index = tables.sql("SELECT * FROM delayed_index WHERE operation = 'DELAY' ORDER BY deliver_at")
        assert index.num_rows == len(expected)
        for i, row in enumerate(index.to_pylist()):
            due, sequence = row["deliver_at"], row["sequence"] or 0
            if due >= first:
                if due < HELD_DELIVER_AT:
                    desk.state.drop_expired(due - 1)
                else:  # never loaded, but found when its subscription goes on
                    desk = begun(settings_, found)
                position_ = row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)
                key = (due, *position_, sequence, row["subscription"] if sequence else "")
                assert wanted_by(desk, typed(index.slice(i, 1), MESSAGES)) == [expected[key]]

        # And of messages that come in again.
        desk = begun(settings_, found)
        for entry in made:
            if entry.topic == TOPIC and (entry.ledger, entry.entry) > last[TOPIC]:
                again = [row for row in entry.tables["delayed_index"] if row["sequence"] is None]
                assert wanted_by(desk, typed(rows("delayed_index", again), MESSAGES)) == [
                    {name for name in "ab" if waits_again(found, entry, i, name)} for i in range(len(entry.due))
                ]


Key = tuple[int, int, int, int, int, str]  # due, ledger, entry, message, sequence and subscription of the move


def rows_left(entry: History, is_durable: bool) -> dict[Key, set[str]]:
    """Each row that a rebuild leaves of an entry, or completes, and who wants it."""
    left: dict[Key, set[str]] = {}
    for i in range(len(entry.due)):
        own = {name: entry.messages[name][i] for name in "ab"}
        has_row = is_durable or any(len(m.times) > 2 - m.is_last_sealed for m in own.values())
        for name, m in own.items():
            for sequence, due in m.times:
                is_last = (sequence, due) == m.times[-1]
                is_completed = has_row and not m.is_delivered and entry.topic == TOPIC
                if is_durable if sequence == 0 else (m.is_last_sealed or is_completed or not is_last):
                    masks = left.setdefault(
                        (due, entry.ledger, entry.entry, i, sequence, name if sequence else ""), set()
                    )
                    masks |= {name} if is_last and m.is_waiting and entry.topic == TOPIC else set()
    return left


def wanted_by(desk: Desk, messages: pa.Table) -> list[set[str]]:
    return [{name for i, name in enumerate("ab") if bits >> i & 1} for bits in desk.subscription_mask(messages)]


def waits_again(found: PreparedState, entry: History, message: int, name: str) -> bool:
    """Whether a message that comes in again is to be taken in for a subscription: as it is, or to be moved at once."""
    m = entry.messages[name][message]
    waiting = [row for _, tables in found.inputs(2) for row in tables[InputKind.REBUILT_WAITING].to_pylist()]
    moves = {(r["ledger_id"], r["entry_id"], max(r["batch_index"], 0), r["subscriptions"]) for r in waiting}
    position_ = (entry.ledger, entry.entry, message, 1 << "ab".index(name))
    # One that is to be retried is not delivered as it came.
    return m.is_waiting and not m.attempt and (len(m.times) == 1 or position_ in moves)


def one(due: int, **row: Any) -> dict[str, Any]:
    return {"ledger_id": 1, "operation": "DELAY", "deliver_at": due, **row}


@pytest.mark.parametrize("due", [NOW - 2, NOW - 1, NOW, NOW + 1])
def test_what_is_done_counts_from_the_first_on_that_is_not(due: int, tmp_path: Path) -> None:
    """Of three messages at each of some times all are cancelled but one, which is the first or beyond `now`."""
    settings_, tables = make(tmp_path)
    at = [NOW - 3, NOW - 2, NOW - 1, NOW, NOW + 1]
    found = [(3 * i + j, time) for i, time in enumerate(at) for j in range(3)]
    kept = 3 * at.index(due)
    cancels = [
        one(time, entry_id=entry, operation="CANCEL", subscription=name, sequence=1)
        for entry, time in found
        if entry != kept
        for name in "ab"
    ]
    delays = [one(time, entry_id=entry) for entry, time in found]
    tables.append("delayed_index", rows("delayed_index", [*delays, *cancels]), {})
    tables.append("entries", rows("entries", [{"ledger_id": 2}]), {})
    meta, _, counts = rebuilt(settings_, str(tmp_path))
    first = min(due, NOW)
    assert meta["offset"]["load_horizon"] == first
    n = 3 * sum(time >= first for time in at)
    assert (sum(meta["sealed"]), sum(meta["unwanted"]), counts["pending"]) == (n, n - 1, 1)


def test_of_what_was_delivered_only_that_is_kept_which_is_loaded_or_comes_again(tmp_path: Path) -> None:
    settings_, tables = make(tmp_path)
    waits, before, after = NOW - 100, NOW - 101, NOW - 99
    tables.append(
        "delayed_index",
        rows("delayed_index", [one(waits, entry_id=0), one(before, entry_id=1), one(after, entry_id=2)]),
        {},
    )
    sent = [one(due, entry_id=i, subscription=name) for i, due in ((1, before), (2, after)) for name in "ab"]
    short_notice = one(before, entry_id=3, subscription="a")
    not_durable = one(before, entry_id=6, subscription="a")
    tables.append("deliveries", rows("deliveries", [*sent, short_notice, not_durable]), {})
    tables.append("entries", rows("entries", [{"ledger_id": 1, "entry_id": 5}]), {})
    meta, found, _ = rebuilt(settings_, str(tmp_path))
    kept = [row for _, tables in found.inputs(2) for row in tables[InputKind.REBUILT_DELIVERED].to_pylist()]
    # What comes again each of the two shards knows.
    assert sorted((row["entry_id"], row["subscription"]) for row in kept) == [(2, 0), (2, 1), (6, 0), (6, 0)]
    assert all(row["until"] == NOW + REBUILT_KEPT_MILLIS for row in kept)
    assert (meta["offset"]["load_horizon"], sum(meta["sealed"]), sum(meta["unwanted"])) == (waits, 2, 1)


positions = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2**32 - 1), st.integers(-1, 2**20 - 1))


@given(st.lists(positions), st.lists(positions))
def test_a_message_set_is_a_set(added: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> None:
    made = MessageSet()
    expected = {(*key, max(index, 0)) for *key, index in added}
    for subscription, *position_ in added:
        made.add(subscription, *(np.array([value]) for value in position_))
    for subscription in (0, 1):
        asked = np.array([position_ for _, *position_ in [*added, *others]], np.int64).reshape(-1, 3)
        found = made.contains(subscription, *asked.T).tolist()
        assert found == [(subscription, e, f, max(i, 0)) in expected for e, f, i in asked.tolist()]


@given(st.lists(st.tuples(st.sampled_from(["x", "y"]), st.integers(-1, 1), st.integers(0, 2), st.integers(0, 2))))
def test_what_comes_again_is_after_the_last_durable_entry_of_its_partition(found: list[tuple[Any, ...]]) -> None:
    durable = {"x": Position(1, 1), "x-partition-0": Position(0, 2), "y-partition-1": Position(2, 0)}
    table = pa.table([list(c) for c in zip(*found, strict=True)] or [[]] * 4, ["topic", "partition", *_ENTRY])
    table = table.set_column(0, "topic", table["topic"].cast(pa.string()))
    names = [topic if partition < 0 else f"{topic}-partition-{partition}" for topic, partition, *_ in found]
    expected = [tuple(entry) > durable.get(n, (-1, -1)) for n, (_, _, *entry) in zip(names, found, strict=True)]
    assert is_not_durable(table, durable).tolist() == expected


@given(st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), st.sampled_from(["a", "b", "c", None]))))
def test_subscriptions_are_numbered_as_in_their_route(found: list[tuple[str, str | None]]) -> None:
    names = {"x": ["a", "b"], "y": ["b", "a", "c"]}
    table = pa.table(
        {
            "topic": pa.array([t for t, _ in found], pa.string()),
            "subscription": pa.array([s for _, s in found], pa.string()),
        }
    )
    expected = [names[t].index(s) if s and s in names.get(t, ()) else -1 for t, s in found]
    assert subscription_numbers(table, names).tolist() == expected


def test_what_was_imported_does_not_come_again() -> None:
    table = pa.table({"topic": ["x"], "partition": [-1], "ledger_id": [FIRST_IMPORTED_LEDGER], "entry_id": [0]})
    assert not is_not_durable(table, {"x": Position(1, 1)}).any()
    assert not is_not_durable(table, {}).any()


def overdue_of(made: Settings) -> dict[tuple[str, int], int]:
    """Since when a rebuild takes each subscription to lack something that may have been sent."""
    with (
        tempfile.TemporaryDirectory() as folder,
        without_destinations() as written,
    ):
        rebuild(made, Tables(made.warehouse), Path(folder), now=NOW)
    found: dict[tuple[str, int], int] = written.call_args.args[2]
    return found


def test_destinations_are_read_since_the_first_message_that_may_have_been_sent(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    entries = [History(TOPIC, 1, i, [NOW - (10 - i) * HOUR]) for i in range(10)]
    for i, entry in enumerate(entries):
        if i != 4:
            entry.deliver("a", 0)
        if i == 0:
            entry.command("SKIP", "b", 0)
        elif i != 7:
            entry.deliver("b", 0)
    write(tables, [*entries, History(TOPIC, 2, 0, [NOW + DAY])], 11)
    assert overdue_of(made) == {(TOPIC, 0): NOW - 6 * HOUR, (TOPIC, 1): NOW - 3 * HOUR}


def test_destinations_are_not_read_for_what_has_come_or_is_not_due(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    entry = History(TOPIC, 1, 0, [NOW - HOUR, NOW + DAY])
    entry.deliver("a", 0)
    entry.deliver("b", 0)
    write(tables, [entry], 1)
    assert overdue_of(made) == {}


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_message_may_have_been_sent_since_it_was_moved_to_an_earlier_time(tmp_path: Path, is_sealed: bool) -> None:
    made, tables = make(tmp_path)
    entry = History(TOPIC, 1, 0, [NOW + DAY])
    entry.is_sealing = is_sealed
    entry.command("RESCHEDULE", "b", 0, NOW - 2 * HOUR)
    write(tables, [entry], 1)
    assert overdue_of(made) == {(TOPIC, 1): NOW - 2 * HOUR}


def test_a_move_of_what_only_a_destination_has_is_not_carried_out_again(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    entry = History(TOPIC, 1, 0, [NOW + DAY])
    entry.is_sealing = False
    entry.command("RESCHEDULE", "b", 0, NOW - HOUR)
    write(tables, [entry], 1)

    def find(context: RebuildContext, delivered: Delivered, *_: Any) -> int:
        delivered.add(rows("deliveries", [{**entry.at(0), "subscription": "b"}]))
        return 1

    with mock.patch("checkpoint_from_tables.rebuild.rebuild.write_missing_deliveries", side_effect=find):
        counts = rebuild(made, tables, tmp_path / "c", now=NOW)
    assert counts["deliveries_found_at_destinations"] == 1
    assert tables.sql("SELECT * FROM delayed_index WHERE sequence IS NOT NULL").num_rows == 0


def test_what_was_held_back_may_have_been_sent_since_its_subscription_went_on(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    entry = History(TOPIC, 1, 0, [NOW - DAY])
    entry.deliver("b", 0)
    entry.hold("a", 0)
    write(tables, [entry], 1)
    assert overdue_of(made) == {}, "held back to this day"
    on = [{"subscription": "a", "operation": "RESUME", "result": "APPLIED", "applied_at": NOW - 5 * HOUR}]
    tables.append("outcomes", rows("outcomes", on), {"test": 2})
    assert overdue_of(made) == {(TOPIC, 0): NOW - 5 * HOUR}
