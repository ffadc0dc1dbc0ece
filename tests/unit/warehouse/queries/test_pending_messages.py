"""What waits, asked of real Delta tables that the service's own functions wrote."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.fuzzing.examples import examples
from tests.support.tracker.messages import TOPIC, batches, messages
from tests.support.warehouse.waiting import NOW, SUBSCRIPTIONS, Warehouse
from tracker.messages import int64
from warehouse.delta.tables import ranges_of
from warehouse.queries import pending_messages
from warehouse.queries.listing import PendingError, PendingFilter, PendingMessage, State, VersionGoneError
from warehouse.queries.pending_messages import Pending
from warehouse.queries.pending_rows import OVERDUE_MILLIS, PendingRows

pytestmark = pytest.mark.slow


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def entries(found: list[PendingMessage]) -> list[int]:
    return [message.ref.entry_id for message in found]


def test_the_soonest_comes_first_with_the_subscriptions_that_it_waits_for(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 3_000), (1, 1, NOW + 1_000)], key="k", properties=[("p", "v")]))
    warehouse.cancel([("b", 1, 0, -1, NOW + 3_000)])
    first, second = warehouse.listed()
    assert (first.ref.entry_id, first.subscriptions) == (1, ("a", "b"))
    assert (second.ref.entry_id, second.subscriptions) == (0, ("a",))
    assert (first.deliver_at, first.key, first.properties) == (NOW + 1_000, "k", {"p": "v"})
    assert entries(warehouse.listed(subscription="b")) == [1]


def test_a_cancelled_entry_takes_all_its_messages_and_a_cancelled_message_only_itself(warehouse: Warehouse) -> None:
    warehouse.seal(batches([(1, entry, index, 3, NOW + 1_000 + index) for entry in (0, 1) for index in range(3)]))
    warehouse.cancel([("a", 1, 0, -1, NOW + 1_002), ("a", 1, 1, 1, NOW + 1_002)])
    left = [(m.ref.entry_id, m.ref.batch_index) for m in warehouse.listed(subscription="a")]
    assert left == [(1, 0), (1, 2)]


def test_what_was_cancelled_is_listed_until_it_is_past_or_restored(warehouse: Warehouse) -> None:
    warehouse.seal(batches([(1, entry, index, 2, NOW + 1_000 + entry) for entry in range(4) for index in range(2)]))
    warehouse.cancel([("a", 1, 0, -1, NOW + 1_000), ("a", 1, 1, 1, NOW + 1_001), ("b", 1, 2, -1, NOW + 1_002)])
    listed = warehouse.listed(state=State.CANCELLED)
    assert [(m.ref.entry_id, m.ref.batch_index, m.subscriptions) for m in listed] == [
        (0, 0, ("a",)),
        (0, 1, ("a",)),
        (1, 1, ("a",)),
        (2, 0, ("b",)),
        (2, 1, ("b",)),
    ]
    assert entries(warehouse.listed(state=State.CANCELLED, subscription="b")) == [2, 2]
    later = Pending(warehouse.settings, TOPIC, PendingFilter(state=State.CANCELLED, due_from=0), None, NOW + 1_003)
    assert later.page(9).messages == []


def test_a_cancel_that_waited_in_vain_for_an_earlier_time_takes_nothing_back(warehouse: Warehouse) -> None:
    warehouse.cancel([("a", 1, 0, -1, NOW + 500)])
    warehouse.seal(messages([(1, 0, NOW + 60_000)]))
    assert warehouse.listed()[0].subscriptions == ("a", "b")


def test_what_is_overdue_is_pending_until_it_is_delivered(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW - 2_000), (1, 1, NOW - 1_000), (1, 2, NOW)]))
    warehouse.deliver([("a", 1, 0, -1, NOW - 2_000), ("b", 1, 0, -1, NOW - 2_000), ("a", 1, 1, -1, NOW - 1_000)])
    assert [(m.ref.entry_id, m.subscriptions) for m in warehouse.listed()] == [(1, ("b",)), (2, ("a", "b"))]


def test_what_was_due_long_before_the_last_delivery_is_looked_at_only_on_request(warehouse: Warehouse) -> None:
    long_ago = NOW - 10 * OVERDUE_MILLIS
    warehouse.seal(messages([(1, 0, long_ago - OVERDUE_MILLIS - 1), (1, 1, long_ago + 1), (1, 2, long_ago - 1)]))
    warehouse.deliver([(s, 1, 2, -1, long_ago - 1) for s in "ab"], sent_at=long_ago)
    # The job has stood still since: what became due in the meantime still waits.
    assert entries(warehouse.listed()) == [1]
    assert entries(warehouse.listed(due_from=0)) == [0, 1]


def test_the_pages_of_a_listing_are_of_one_version(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, entry, NOW + 1_000 + entry) for entry in range(5)]))
    page = warehouse.pending().page(2)
    warehouse.seal(messages([(1, 9, NOW + 1_003)]))
    warehouse.cancel([(s, 1, 3, -1, NOW + 2_000) for s in "ab"])
    next_page = warehouse.pending(cursor=page.cursor).page(10)
    assert entries(page.messages + next_page.messages) == [0, 1, 2, 3, 4]
    assert (next_page.version, next_page.as_of, next_page.cursor) == (page.version, page.as_of, None)
    assert entries(warehouse.listed()) == [0, 1, 2, 9, 4]


def test_a_version_that_is_gone_is_one_clear_error(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 1), (1, 1, NOW + 2)]))
    cursor = warehouse.pending().page(1).cursor
    index = DeltaTable(warehouse.tables.path("delayed_index"))
    index.delete("entry_id = 1")
    index.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(PendingError, match="version of the tables is gone: begin the listing again"):
        warehouse.pending(cursor=cursor).page(1)
    shutil.rmtree(warehouse.tables.path("deliveries"))
    with pytest.raises(PendingError, match="version of the tables is gone"):
        warehouse.pending(cursor=cursor)


def test_a_cursor_belongs_to_its_listing(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 1), (1, 1, NOW + 2)]))
    cursor = warehouse.pending().page(1).cursor
    assert cursor
    with pytest.raises(PendingError, match="another topic or filter"):
        warehouse.pending(PendingFilter(key="k"), cursor)
    for wrong in ("x", "ünicode", cursor[:-4], "bnVsbA"):
        with pytest.raises(PendingError, match="cursor is none of a listing"):
            warehouse.pending(cursor=wrong)


def test_a_listing_goes_on_behind_what_was_cancelled(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, entry, NOW + entry) for entry in range(1, 101)]))
    warehouse.cancel([(s, 1, entry, -1, NOW + entry) for entry in range(1, 98) for s in "ab"])
    assert entries(warehouse.pending().page(2).messages) == [98, 99]
    assert warehouse.pending().count() == 3


def test_a_text_finds_its_messages_page_by_page_also_where_most_were_cancelled(warehouse: Warehouse) -> None:
    def texts_of(text: str) -> dict[str, Any]:
        return {"properties": [("p", text)], "key": text, "producer_name": text}

    warehouse.seal(messages([(1, entry, NOW + entry // 2) for entry in range(2, 100)], **texts_of("other")))
    warehouse.seal(messages([(2, entry, NOW + entry // 2 * 7) for entry in range(2, 60)], **texts_of("v")))
    warehouse.cancel([(s, 2, entry, -1, NOW + entry // 2 * 7) for entry in range(5, 40) for s in "ab"])
    for wanted in ("v", "w"):
        expected = [2, 3, 4, *range(40, 60)] if wanted == "v" else []
        assert entries(warehouse.listed(3, properties={"p": wanted})) == expected
        assert entries(warehouse.listed(3, key=wanted)) == expected
        assert entries(warehouse.listed(3, producer_name=wanted)) == expected


def test_a_page_reads_little_of_what_is_due_after_it(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_messages, "_LEAST_READ", 4)
    monkeypatch.setattr(pending_messages, "_LEAST_READ_BY_TEXT", 4)
    for day in range(30):
        rows = [(1 + day, day * 10 + i, NOW + day * 86_400_000 + i) for i in range(10)]
        warehouse.seal(messages(rows, key=f"k{day}", properties=[("day", f"{day}")]))
    for day in (0, 14, 29):
        expected = [day * 10 + i for i in range(10)]
        assert entries(warehouse.listed(3, key=f"k{day}")) == expected
        assert entries(warehouse.listed(3, properties={"day": f"{day}"})) == expected
    assert entries(warehouse.listed(7)) == list(range(300))
    for file in warehouse.files():
        if pq.read_table(file)["deliver_at"][0].as_py() > NOW + 86_400_000:
            Path(file).unlink()
    assert entries(warehouse.pending().page(5).messages) == list(range(5))
    with pytest.raises(VersionGoneError):
        warehouse.pending().page(100)


@pytest.mark.parametrize("wanted", [PendingFilter(key="5"), PendingFilter(properties={"p": "5"})])
def test_a_listing_reads_on_where_it_has_stopped(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, wanted: PendingFilter
) -> None:
    """Also for its next page. Here files go as soon as it has been past them."""
    monkeypatch.setattr(pending_messages, "_LEAST_READ_BY_TEXT", 4)
    for day in range(60):
        rows = [(1 + day, day * 10 + i, NOW + day * 86_400_000 + i) for i in range(10)]
        warehouse.seal(messages(rows, key=f"{day % 40}", properties=[("p", f"{day % 40}")]))
    files = {path: int64(pq.read_table(path), "deliver_at").max() for path in warehouse.files()}
    end_of, starts = PendingRows.end_of, []

    def remove_what_is_past(pending: PendingRows, n: int, start: int) -> int | None:
        starts.append(start)
        for path in [path for path, last in files.items() if last < start]:
            Path(path).unlink()
            del files[path]
        return end_of(pending, n, start)

    monkeypatch.setattr(PendingRows, "end_of", remove_what_is_past)
    page = warehouse.pending(wanted).page(13)
    assert entries(page.messages) == [*range(50, 60), 450, 451, 452]
    assert len(files) < 40
    starts.clear()
    assert entries(warehouse.pending(wanted, page.cursor).page(13).messages) == list(range(453, 460))
    assert starts[0] == page.messages[-1].deliver_at, "the next page goes on there"


def test_a_partition_is_listed_by_its_name(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 1)], partition=0))
    warehouse.seal(messages([(2, 0, NOW + 2)], partition=1))
    assert [m.ref.ledger_id for m in warehouse.pending(topic=f"{TOPIC}-partition-1").page(10).messages] == [2]
    assert [m.ref.ledger_id for m in warehouse.pending().page(10).messages] == [1, 2]


def test_the_statistics_count_by_subscription(warehouse: Warehouse) -> None:
    times = [30_000, 1_800_000, 7_200_000, 90_000_000]
    warehouse.seal(messages([(1, i, NOW + millis) for i, millis in enumerate(times)]))
    warehouse.cancel([("b", 1, 0, -1, NOW + times[0]), ("b", 1, 0, -1, NOW + times[0]), ("b", 7, 7, -1, NOW + 9)])
    stats = warehouse.pending().stats()
    a, b = stats["subscriptions"]
    assert a == {
        "subscription": "a",
        "pending": 4,
        "dueWithinMinute": 1,
        "dueWithinHour": 2,
        "dueWithinDay": 3,
        "earliest": NOW + 30_000,
        "latest": NOW + 90_000_000,
        "held": 0,
        "isPaused": False,
        "takenBack": 0,
    }
    assert (b["pending"], b["dueWithinMinute"], b["earliest"], b["takenBack"]) == (3, 0, NOW + 1_800_000, 2)
    assert stats["messages"] == warehouse.pending().count() == 4
    assert (stats["version"], stats["asOf"]) == (warehouse.tables.version("delayed_index"), NOW)
    written_at = DeltaTable(warehouse.tables.path("delayed_index")).history(1)[0]["timestamp"]
    assert stats["lastWriteAgeMillis"] == max(0, NOW - written_at)


def test_wrong_questions_are_one_line(warehouse: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(PendingError, match="no route with the source persistent://public/default/none"):
        warehouse.pending(topic="persistent://public/default/none")
    with pytest.raises(PendingError, match="no subscription c of"):
        warehouse.pending(PendingFilter(subscription="c"))
    with pytest.raises(PendingError, match="no tables in"):
        Pending(warehouse.settings.model_copy(update={"warehouse": str(tmp_path / "none")}), TOPIC)
    for wrong in ({"entry_id": 1}, {"ledger_id": -1}, {"due_from": 2**63}, {"key": 1}, {"color": "red"}):
        with pytest.raises(ValidationError):
            PendingFilter(**wrong)


texts = st.text(st.one_of(st.sampled_from("'\"\\;-%$\0\n ]}"), st.characters(exclude_categories=["Cs"])), max_size=8)


@settings(max_examples=examples(60), deadline=None)
@given(texts, texts, texts, texts)
def test_no_text_of_a_filter_means_anything_but_itself(key: str, name: str, value: str, producer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        warehouse = Warehouse(Path(folder))
        warehouse.seal(messages([(1, 0, NOW + 1)], key="other", producer_name="other", properties=[("x", "other")]))
        rows = [(1, 1, NOW + 2)]
        warehouse.seal(messages(rows, key=key, producer_name=producer, properties=[(name, value)]))
        assert 1 in entries(warehouse.listed(key=key, properties={name: value}, producer_name=producer))
        assert entries(warehouse.listed(key=key)) == ([0, 1] if key == "other" else [1])
        assert entries(warehouse.listed(properties={name: value + "'"})) == []
        assert warehouse.listed(key=f"{key}' OR '1'='1") == []


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Entries of one or more messages, and what was done with them for each subscription."""
    chance = draw(st.randoms(use_true_random=False))
    rows, cancels, deliveries = [], [], []
    for entry in range(draw(st.integers(0, 12))):
        ledger, size = chance.choice([1, 2]), chance.choice([1, 1, 2, 3])
        # Few times, so that many messages share one.
        dues = [NOW + chance.choice([-5_000, 0, 1, 1, 2, 60_000]) for _ in range(size)]
        parts = [(ledger, entry, -1 if size == 1 else i, size, due) for i, due in enumerate(dues)]
        sealed = [row for row in parts if chance.random() < 0.9]
        rows += sealed
        for subscription in SUBSCRIPTIONS:
            fate = chance.choice(["waits", "waits", "whole", "parts", "vain"])
            if fate == "whole":
                cancels.append((subscription, ledger, entry, -1, max(dues)))
            if fate == "vain":
                cancels.append((subscription, ledger, entry, -1, min(dues) - 1))
            for _, _, index, _, due in sealed:
                if fate == "parts" and chance.random() < 0.5:
                    cancels.append((subscription, ledger, entry, index, max(dues)))
                elif fate == "waits" and due <= NOW and chance.random() < 0.5:
                    deliveries.append((subscription, ledger, entry, index, due))
    chance.shuffle(rows)
    return {"rows": rows, "cancels": cancels, "deliveries": deliveries, "files": chance.randint(1, 3)}


@settings(max_examples=examples(60), deadline=None)
@given(
    histories(),
    st.integers(1, 5),
    st.sampled_from([None, *SUBSCRIPTIONS]),
    st.sampled_from([None, NOW, NOW + 2]),
    st.sampled_from([1, 20_000]),
)
def test_as_a_naive_model_has_it(
    history: dict[str, Any], limit: int, subscription: str | None, due_before: int | None, least_read: int
) -> None:
    rows, cancels = history["rows"], history["cancels"]
    expected = []
    for ledger, entry, index, _, due in sorted(rows, key=lambda r: (r[4], r[0], r[1], r[2])):
        waits = tuple(
            s
            for s in SUBSCRIPTIONS
            if not any(c[:3] == (s, ledger, entry) and c[3] in (-1, index) and c[4] >= due for c in cancels)
            and (s, ledger, entry, index, due) not in history["deliveries"]
            and subscription in (None, s)
        )
        if waits and (due_before is None or due < due_before):
            expected.append((due, ledger, entry, index, waits))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_messages, "_LEAST_READ", least_read)
        warehouse = Warehouse(Path(folder))
        for i in range(history["files"]):
            if part := rows[i :: history["files"]]:
                warehouse.seal(batches(part))
        warehouse.cancel(cancels)
        warehouse.deliver(history["deliveries"])
        wanted: dict[str, Any] = {"subscription": subscription, "due_before": due_before}
        found = warehouse.listed(limit, **wanted)
        assert [
            (m.deliver_at, m.ref.ledger_id, m.ref.entry_id, m.ref.batch_index, m.subscriptions) for m in found
        ] == expected
        assert warehouse.pending(PendingFilter(**wanted)).count() == len(expected)
        counts = {
            s["subscription"]: s["pending"] for s in warehouse.pending(PendingFilter(**wanted)).stats()["subscriptions"]
        }
        assert counts == {s: sum(s in e[4] for e in expected) for s in SUBSCRIPTIONS if subscription in (None, s)}


@given(st.lists(st.integers(0, 1_000), max_size=60).map(sorted), st.sampled_from([1, 2, 20]))
def test_ranges_have_all_times_and_leave_the_widest_gaps_out(times: list[int], most: int) -> None:
    ranges = ranges_of(times, most)
    assert len(ranges) <= most
    assert all(any(first <= time <= last for first, last in ranges) for time in times)
    between = [b[0] - a[1] for a, b in itertools.pairwise(ranges)]
    within = [b - a for a, b in itertools.pairwise(times) if any(f <= a and b <= u for f, u in ranges)]
    assert len(ranges) < most or min(between, default=1_000) >= max(within, default=0)


def test_no_times_are_in_no_range() -> None:
    assert ranges_of([], 20) == []
