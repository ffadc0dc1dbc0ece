"""Messages that are in no table yet, beside those of the delayed index: each once, and none that a table knows of."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker.entries.message_ids import MessageRef
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import Envelope
from conf.settings import Settings
from tests.support.servers.fake_pulsar import batch, one
from tests.support.tracker.messages import messages
from tests.support.warehouse.waiting import NOW, Warehouse
from warehouse.queries import unsealed_messages
from warehouse.queries.listing import Page, PendingFilter, PendingMessage, State
from warehouse.queries.pending_messages import Pending
from warehouse.queries.unsealed_messages import Gathered, Unacknowledged, UnacknowledgedReader

TOPIC = "persistent://public/default/t"

pytestmark = pytest.mark.slow


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def come_in(*rows: tuple[int, int], key: str | None = None) -> Unacknowledged:
    """Messages of (entry, when it is due) that the source topic still has."""
    return Unacknowledged(
        [PendingMessage(MessageRef(1, entry, -1, -1), due, (), 1, key, None, {}, 0, 0, NOW, "p") for entry, due in rows]
    )


def listed(warehouse: Warehouse, found: Unacknowledged, limit: int = 100, **wanted: Any) -> list[list[int]]:
    """The entries of each page."""
    pages, cursor = [], None
    while True:
        question = Pending(warehouse.settings, TOPIC, PendingFilter.model_validate(wanted), cursor, NOW)
        page = question.page(limit, found)
        pages.append([message.ref.entry_id for message in page.messages])
        if (cursor := page.cursor) is None:
            return pages


def test_they_are_listed_in_order_beside_the_others_and_none_twice(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, entry, NOW + 1_000 * entry) for entry in range(1, 8)]))
    found = come_in((3, NOW + 3_000), (10, NOW + 500), (11, NOW + 3_500), (12, NOW + 99_000))
    everything = [10, 1, 2, 3, 11, 4, 5, 6, 7, 12]
    assert listed(warehouse, found) == [everything]
    for limit in range(1, 10):
        pages = listed(warehouse, found, limit)
        assert [entry for page in pages for entry in page] == everything
        assert all(len(page) <= limit for page in pages)


def test_a_later_page_says_so_where_what_it_should_have_was_sealed_since_the_first_one(warehouse: Warehouse) -> None:
    def page(found: Unacknowledged, cursor: str | None = None) -> Page:
        return Pending(warehouse.settings, TOPIC, None, cursor, NOW).page(2, found)

    warehouse.seal(messages([(1, entry, NOW + 1_000 * entry) for entry in range(1, 6)]))
    few, found = come_in((10, NOW + 500)), come_in((10, NOW + 500), (11, NOW + 4_500))
    without, first = page(few), page(found)
    assert [one.ref.entry_id for one in page(found, first.cursor).messages] == [2, 3]
    assert page(found, first.cursor).note == first.note == ""
    warehouse.seal(messages([(1, 10, NOW + 500), (1, 11, NOW + 4_500)]))
    second = page(come_in(), first.cursor)
    third = page(come_in(), second.cursor)
    assert [one.ref.entry_id for one in third.messages] == [4, 5]
    said = "what had only just come in may be missing: it was written to the table since the listing began"
    assert second.note == third.note == said
    assert page(come_in(), without.cursor).note == ""


def test_what_the_tables_know_of_is_left_out(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 90_000)]))
    warehouse.deliver([("a", 1, 1, -1, NOW), ("a", 1, 2, -1, NOW), ("b", 1, 2, -1, NOW)])
    found = come_in((1, NOW), (2, NOW), (3, NOW + 4_000))
    first, second, last = Pending(warehouse.settings, TOPIC, None, None, NOW).page(9, found).messages
    assert (first.ref.entry_id, first.subscriptions, first.is_going_out) == (1, ("b",), True)
    assert (second.ref.entry_id, second.subscriptions, second.is_going_out) == (3, ("a", "b"), False)
    assert last.ref.entry_id == 0


def test_the_last_change_counts_that_no_table_has_sealed(warehouse: Warehouse) -> None:
    warehouse.seal(messages([(1, 0, NOW + 90_000)]))
    later = NOW + 60_000
    warehouse.change(
        [
            (1, "CANCEL", "a", 1, -1, None),  # for `a` alone
            (2, "RESCHEDULE", "a", 2, -1, later),
            (3, "CANCEL", "a", 3, -1, None),
            (4, "RESTORE", "a", 3, -1, None),
            (5, "RESCHEDULE", "b", 4, -1, NOW + 5_000),
            (6, "RESCHEDULE", "b", 4, -1, later),
            (7, "CANCEL", "b", 4, -1, None),
            (8, "RESTORE", "b", 4, -1, None),
            (9, "RESCHEDULE", "a", 5, 0, later),
            (10, "SKIP", "a", 5, 0, None),
            (11, "SKIP", "b", 5, 0, None),
        ]
    )
    found = come_in(*((entry, NOW + 1_000) for entry in range(1, 6)))
    page = Pending(warehouse.settings, TOPIC, None, None, NOW).page(9, found)
    waiting = [(one.ref.entry_id, one.deliver_at - NOW, one.subscriptions, one.sequence) for one in page.messages]
    assert waiting == [
        (1, 1_000, ("b",), 0),
        (2, 1_000, ("b",), 0),
        (3, 1_000, ("a", "b"), 0),
        (4, 1_000, ("a",), 0),
        (2, 60_000, ("a",), 2),
        (4, 60_000, ("b",), 6),
        (0, 90_000, ("a", "b"), 0),
    ]
    assert listed(warehouse, found, due_from=later) == [[2, 4, 0]]
    assert listed(warehouse, found, due_before=later) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("name", "end"), [("expireAfter", NOW + 63_000), ("expireAt", NOW + 4_000)])
def test_the_end_after_its_time_moves_with_a_message(warehouse: Warehouse, name: str, end: int) -> None:
    warehouse.seal(messages([]))
    [one] = come_in((1, NOW + 1_000)).messages
    text = "3000" if name == "expireAfter" else str(NOW + 4_000)
    one = replace(one, properties={name: text}, expires_at=NOW + 4_000)
    warehouse.change([(1, "RESCHEDULE", "a", 1, -1, NOW + 60_000)])
    page = Pending(warehouse.settings, TOPIC, PendingFilter(subscription="a"), None, NOW).page(9, Unacknowledged([one]))
    assert [(message.deliver_at, message.expires_at) for message in page.messages] == [(NOW + 60_000, end)]


@pytest.mark.parametrize(
    ("wanted", "entries"),
    [
        ({"key": "k"}, [1, 2]),
        ({"key": "other"}, []),
        ({"due_before": NOW + 1_500}, [1]),
        ({"due_from": NOW + 1_500}, [2]),
        ({"ledger_id": 1, "entry_id": 2}, [2]),
        ({"ledger_id": 2}, []),
        ({"properties": {"a": "b"}}, []),
        ({"state": State.CANCELLED}, []),
        ({"state": State.HELD}, []),
        ({"subscription": "b"}, [1, 2]),
    ],
)
def test_a_filter_is_for_them_too(warehouse: Warehouse, wanted: dict[str, Any], entries: Sequence[int]) -> None:
    warehouse.seal(messages([]))
    assert listed(warehouse, come_in((1, NOW + 1_000), (2, NOW + 2_000), key="k"), **wanted) == [list(entries)]


def test_without_a_broker_the_listing_says_what_may_be_missing() -> None:
    nobody = {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"}
    settings = Settings.model_validate({"pulsar": nobody})
    found = UnacknowledgedReader(settings).read(TOPIC, None)
    assert not found.messages
    assert found.note.startswith("what came in within the last seconds may be missing: ")


DUE = {"deliverAt": str(NOW)}


def gathered(entries: Sequence[ReceivedEntry], **settings: Any) -> Gathered:
    found = Gathered(Settings.model_validate(settings))
    found.add_entries(iter(entries), -1)
    return found


def test_of_what_has_come_in_as_much_is_read_as_the_bounds_allow() -> None:
    def entries(n: int, size: int = 2, payload: bytes = b"x") -> list[ReceivedEntry]:
        return [entry for number in range(n) for entry in batch(number, size, props=DUE, payload=payload)]

    few = gathered(entries(100, 100))
    assert (len(few.messages), few.note) == (10_000, "")
    many = gathered(entries(101, 100))
    assert (len(many.messages), many.note) == (10_000, "more than 10,000 messages have only just come in")
    small = gathered(entries(2_001))
    assert (len(small.messages), small.note) == (4_000, "more than 2,000 entries have only just come in")
    large = gathered(entries(17, 1, payload=bytes(4 << 20)))
    assert (len(large.messages), large.note) == (15, "more than 64 MiB have only just come in")


def test_an_entry_that_says_it_is_huge_when_decompressed_is_not_read() -> None:
    [entry] = one(1, props=DUE)
    assert isinstance(entry.envelope, Envelope)
    entry.envelope.metadata.uncompressed_size = 100 << 20
    assert gathered([entry]).note == "more than 64 MiB have only just come in"


def test_all_partitions_together_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsealed_messages, "_MOST_SECONDS", 0.0)
    found = gathered(one(1, props=DUE))
    assert not found.messages
    assert found.is_late()
    assert found.note == "what came in within the last seconds may be missing: it takes over 0 s to read"


@pytest.mark.parametrize(("replicated", "n"), [("local-only", 1), ("all", 2)])
def test_what_was_replicated_is_listed_only_where_the_job_takes_it(replicated: str, n: int) -> None:
    entries = [*one(1, props=DUE), *one(2, props=DUE)]
    assert isinstance(entries[1].envelope, Envelope)
    entries[1].envelope.metadata.replicated_from = b"west"
    assert [message.ref.entry_id for message in gathered(entries, replicated=replicated).messages] == [1, 2][:n]


@pytest.fixture
def admin() -> Iterator[ThreadingHTTPServer]:
    """An admin API that knows no topic, and counts the questions."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        asked: list[str] = []

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_who_asks_while_a_topic_is_read_gets_the_same_answer_and_old_ones_are_forgotten(admin: Any) -> None:
    settings = Settings.model_validate({"pulsar": {"admin_url": f"http://127.0.0.1:{admin.server_port}"}})
    reader = UnacknowledgedReader(settings, keep_seconds=60.0)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: reader.read(TOPIC, None), range(8)))
    assert len({id(one) for one in found}) == len(admin.asked) == 1
    reader = UnacknowledgedReader(settings)
    for partition in range(5):
        reader.read(TOPIC, partition)
    assert len(admin.asked) == 6
    assert len(reader._answers) == 1
