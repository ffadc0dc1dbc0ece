"""What is counted by the statistics of files is what reading all rows finds, whatever has happened to the messages."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, messages
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.schemas import SEQUENCE_BITS
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import merge
from warehouse.maintenance.table_files import TableFiles
from warehouse.queries.index_rows import to_index
from warehouse.queries.listing import PendingFilter, State, VersionGoneError
from warehouse.queries.pending_messages import Pending
from warehouse.routes.membership import Memberships
from warehouse.schemas import DELAYED_INDEX, DELIVERIES, STATISTICS, SUBSCRIPTION_CHANGES

pytestmark = pytest.mark.slow

NOW = 1_800_000_000_000
OTHER = f"{TOPIC}-2"
MINUTE = 60_000
_BEFORE = "deliver_at,topic,partition,ledger_id,entry_id"  # the columns with statistics in earlier versions


class Warehouse:
    """Tables in a folder, with small row groups."""

    def __init__(self, folder: str, statistics: str = STATISTICS["delayed_index"]) -> None:
        self.tables = Tables(folder, segment_rows=5)
        self.tables.create()
        self.index = DeltaTable(self.tables.path("delayed_index"))
        self.index.alter.set_table_properties({"delta.dataSkippingStatsColumns": statistics})
        route = {"source": TOPIC, "subscriptions": [{"name": name} for name in "ab"]}
        self.settings = Settings(warehouse=folder, routes=(route,))  # type: ignore[arg-type]

    def append(self, name: str, rows: pa.Table) -> None:
        if rows.num_rows:
            self.tables.append(name, rows, {})

    def pending(self, topic: str = TOPIC, **wanted: Any) -> Pending:
        return Pending(self.settings, topic, PendingFilter(**wanted), None, NOW)


def history(chance: np.random.Generator, folder: str) -> Warehouse:
    """Messages of partitions, and of another topic, in files over any time, and anything that may happen to some."""
    has_new_files = chance.random() < 0.7
    made = Warehouse(folder, STATISTICS["delayed_index"] if has_new_files else _BEFORE)
    span = int(chance.choice([10_000, 3_600_000, 400 * MINUTE]))
    rare = float(chance.choice([0, 0.01, 0.1, 0.5]))
    n_files, is_sorted = int(chance.integers(1, 6)), chance.random() < 0.5

    def times(n: int) -> np.ndarray:
        return NOW + chance.integers(-span // 10, span, n)

    for number in range(n_files):
        n = int(chance.integers(1, 40))
        due = np.sort(times(n)) if is_sorted else times(n)
        if is_sorted:
            due = NOW + (due - NOW) // n_files + number * span // n_files
        rows: list[dict[str, Any]] = []
        for entry in range(n):
            size = int(chance.choice([1, 1, 1, 2, 3]))
            own = {
                "ledger_id": int(chance.choice([number, 7])),
                "entry_id": number * 40 + entry,
                "partition": int(chance.choice([0, 0, 0, 1])),
                "topic": OTHER if chance.random() < 0.1 else TOPIC,
                "batch_size": size,
            }
            for index in range(size):
                at = int(due[entry] + (chance.integers(-5, 5) if chance.random() < 0.3 else 0))
                row = own | {"deliver_at": at, "batch_index": -1 if size == 1 else index, "operation": "DELAY"}
                rows += [row, *happened(row, chance, rare, times)]
        parts = {"now": rows, "later": []}
        if chance.random() < 0.5:
            parts = {
                "now": [r for r in rows if r["operation"] == "DELAY"],
                "later": [r for r in rows if r["operation"] != "DELAY"],
            }
        for part in parts.values():
            made.append("delayed_index", pa.Table.from_pylist(part, DELAYED_INDEX))
        made.append("deliveries", delivered([r for r in rows if r["operation"] == "DELAY"], chance))
    files = TableFiles(made.tables, "delayed_index", 5)
    if chance.random() < 0.3:
        merge(files, files.all())
    if chance.random() < 0.3:
        change = dict.fromkeys(SUBSCRIPTION_CHANGES.names) | {"topic": TOPIC, "subscription": "b", "change": "ADDED"}
        change |= {"changed_at": NOW, "handed_out": int(times(1)[0]), "positions": '{"0": "7:60"}', "batch_id": 5}
        made.append("subscription_changes", pa.Table.from_pylist([change], SUBSCRIPTION_CHANGES))
    return made


def happened(row: dict[str, Any], chance: np.random.Generator, rare: float, times: Any) -> list[dict[str, Any]]:
    """Rows of what has happened to the message of one: commands for it, or its entry, and its rows at other times."""
    rows = []
    while chance.random() < rare:
        operation = str(chance.choice(["CANCEL", "CANCEL", "RESTORE", "MOVE", "OCCURRENCE"]))
        sequence = int(chance.integers(0, 9)) << SEQUENCE_BITS
        at = row["deliver_at"] + int(chance.choice([0, 0, -1, 3]))
        own = row | {"operation": operation, "subscription": str(chance.choice(["a", "b", "c"])), "sequence": sequence}
        rows.append(own | {"batch_index": int(chance.choice([row["batch_index"], -1])), "deliver_at": at})
        if operation in ("MOVE", "OCCURRENCE"):
            beyond = int(chance.choice([HELD_DELIVER_AT, PAUSED_DELIVER_AT]))
            new = beyond if chance.random() < 0.3 else int(times(1)[0])
            number = int(chance.integers(1, 4)) if operation == "OCCURRENCE" else None
            rows[-1:] = [own | {"operation": "DELAY", "deliver_at": new, "occurrence": number}]
            if operation == "MOVE" or chance.random() < 0.5:
                rows.append(own | {"operation": "MOVE", "deliver_at": max(new, row["deliver_at"])})
    return rows


def delivered(rows: list[dict[str, Any]], chance: np.random.Generator) -> pa.Table:
    done = [
        {name: row.get(name) for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at")}
        | {"subscription": name, "sent_at": row["deliver_at"], "occurrence": row.get("occurrence")}
        for row in rows
        for name in "ab"
        if row["deliver_at"] <= NOW and chance.random() < 0.5
    ]
    return pa.Table.from_pylist(done, DELIVERIES)


def counted(made: Warehouse, topic: str, wanted: dict[str, Any], width: int, begin: int) -> tuple[Any, ...]:
    asked = made.pending(topic, **wanted)
    stats = {name: value for name, value in asked.stats().items() if name != "lastWriteAgeMillis"}
    return asked.count(), asked.histogram(width, begin).to_pydict(), stats


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_as_reading_all_rows_finds_it(seed: int, data: st.DataObject) -> None:
    chance = np.random.default_rng(seed)
    time = st.one_of(st.none(), st.integers(-MINUTE, 400 * MINUTE).map(lambda n: NOW + n))
    with tempfile.TemporaryDirectory() as folder:
        made = history(chance, folder)
        for _ in range(3):
            wanted = {
                "subscription": data.draw(st.sampled_from([None, "a", "b"])),
                "due_from": data.draw(st.one_of(st.just(0), time)),
                "due_before": data.draw(time),
                "state": data.draw(st.sampled_from([State.WAITING] * 9 + [State.HELD, State.CANCELLED])),
                "ledger_id": data.draw(st.sampled_from([None] * 9 + [7])),
            }
            topic = data.draw(st.sampled_from([TOPIC, TOPIC, f"{TOPIC}-partition-0"]))
            width = data.draw(st.sampled_from([1_000, MINUTE, 30 * MINUTE, 86_400_000]))
            begin = data.draw(st.sampled_from([0, NOW, NOW + 7 * MINUTE]))
            found = counted(made, topic, wanted, width, begin)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Memberships, "handed_out", lambda *_: 2**63 - 2)  # so everything is looked at
                assert found == counted(made, topic, wanted, width, begin)


def without_files(made: Warehouse) -> Warehouse:
    """The same tables without the data files of the delayed index: only their log can be read."""
    for file in Path(made.tables.path("delayed_index")).glob("*.parquet"):
        file.unlink()
    return made


def test_what_is_in_one_span_of_time_is_counted_without_reading_it(tmp_path: Path) -> None:
    made = Warehouse(str(tmp_path))
    for day in range(1, 4):
        due = NOW + day * 86_400_000
        made.append("delayed_index", to_index(messages([(day, entry, due + entry) for entry in range(100)]), day))
    without_files(made)
    assert made.pending().count() == 300
    assert made.pending(due_from=NOW + 2 * 86_400_000, subscription="a").count() == 200
    assert made.pending().histogram(86_400_000)["0"].to_pylist() == [100, 100, 100]


def test_of_a_topic_with_a_long_name_which_statistics_cut_all_are_counted(tmp_path: Path) -> None:
    made = Warehouse(str(tmp_path))
    names = [f"{TOPIC}-{'x' * 200}{end}" for end in "ab"]
    for number, name in enumerate(names):
        rows = messages([(number, entry, NOW + 1_000 + entry) for entry in range(7)], topic=name)
        made.append("delayed_index", to_index(rows, 1))
    routes = [{"source": name, "subscriptions": [{"name": "a"}]} for name in names]
    made.settings = Settings(warehouse=str(tmp_path), routes=tuple(routes))  # type: ignore[arg-type]
    assert [made.pending(name).count() for name in names] == [7, 7]


def test_a_table_of_an_earlier_version_gets_the_statistics_from_then_on(tmp_path: Path) -> None:
    made = Warehouse(str(tmp_path), _BEFORE)
    made.append("delayed_index", to_index(messages([(1, 0, NOW + 1_000)]), 1))
    made.tables.create()
    made.append("delayed_index", to_index(messages([(2, 0, NOW + 2_000)]), 1))
    made.index.update_incremental()
    files = pa.table(made.index.get_add_actions(flatten=True))
    assert sorted(files["null_count.operation"].to_pylist(), key=str) == [0, None]
    assert made.pending().count() == 2


def test_a_version_whose_files_are_gone_is_one_clear_error(tmp_path: Path) -> None:
    made = Warehouse(str(tmp_path))
    made.append("delayed_index", to_index(messages([(1, entry, NOW + entry * MINUTE) for entry in range(1, 9)]), 1))
    asked = made.pending()
    without_files(made)
    with pytest.raises(VersionGoneError):
        asked.histogram(MINUTE)
