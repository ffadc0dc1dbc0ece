"""What waits, asked over HTTP; without a broker, so that nothing can be cancelled."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from google.protobuf.proto import parse_length_prefixed

from admin.rest import pending_api
from conf.settings import Settings
from tests.support.service.admin_api import ORDERS, reason, served
from tests.support.tracker.messages import batches, messages
from tracker.schemas import CANCEL_ROWS
from tracker.wire.delayed_index_pb2 import CANCEL, DELAY, DelayedIndex
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import cancels_to_index, to_index

TOPIC = "persistent://public/default/orders"
DELAYED = f"{ORDERS}/delayed"
DUE = time.time_ns() // 1_000_000 + 3_600_000


def settings_of(folder: Path, **api: int) -> Settings:
    subscriptions = [{"name": "a"}, {"name": "x", "type": "Exclusive"}]
    return Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}",
            "api": api,
            "routes": [{"source": TOPIC, "subscriptions": subscriptions}],
        }
    )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Five messages, with the keys k0, k1, k0, k1, k0, of which the first is cancelled for `a`."""
    folder = tmp_path_factory.mktemp("warehouse")
    tables = Tables(str(folder))
    tables.create()
    for i in range(5):
        rows = messages([(1, i, DUE + i)], topic=TOPIC, key=f"k{i % 2}", properties=[("n", f"={i}")])
        tables.append("delayed_index", to_index(rows, 1), {"test": i + 1})
    cancel = {"operation": "CANCEL", "topic": TOPIC, "partition": -1, "ledger_id": 1, "entry_id": 0, "batch_index": -1}
    cancels = pa.Table.from_pylist([cancel | {"subscription": "a", "deliver_at": DUE}], schema=CANCEL_ROWS)
    tables.append("delayed_index", cancels_to_index(cancels, 1), {"test": 6})
    with served(settings_of(folder)) as client:
        yield client


def delayed_indexes(data: bytes) -> list[tuple[int, int, int, int]]:
    """Read as protobuf's own programs read length-delimited messages."""
    stream, found = io.BytesIO(data), []
    while (one := parse_length_prefixed(DelayedIndex, stream)) is not None:
        found.append((one.timestamp, one.ledger_id, one.entry_id, one.delayed_operation_type))
    return found


@pytest.mark.slow
def test_a_program_gets_all_entries_as_pulsars_delayed_indexes(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_api, "_STREAMED_AT_ONCE", 2)
    accept = {"Accept": "application/x-protobuf"}
    answer = client.get(DELAYED, headers=accept)
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert delayed_indexes(answer.content) == [(DUE + i, 1, i, DELAY) for i in range(5)]
    assert delayed_indexes(client.get(f"{DELAYED}?limit=3&subscription=a", headers=accept).content) == [
        (DUE + i, 1, i, DELAY) for i in (1, 2, 3)
    ]
    for state in ("takenBack", "cancelled"):
        cancelled = client.get(DELAYED, params={"state": state, "subscription": "a"}, headers=accept)
        assert delayed_indexes(cancelled.content) == [(DUE, 1, 0, CANCEL)]
    assert client.get(f"{DELAYED}?key=none", headers=accept).content == b""
    page = client.get(f"{DELAYED}?limit=2").json()
    rest = client.get(DELAYED, params={"cursor": page["nextCursor"]}, headers=accept)
    assert [entry for _, _, entry, _ in delayed_indexes(rest.content)] == [2, 3, 4]


@pytest.mark.slow
def test_a_batch_is_an_entry_and_a_partition_has_to_be_named(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    for partition in range(2):
        made = [(1 + partition, entry, i, 3, DUE + entry) for entry in range(2) for i in range(3)]
        rows = batches(made, topic=TOPIC, partition=partition)
        tables.append("delayed_index", to_index(rows, 1), {"test": partition + 1})
    accept = {"Accept": "application/x-protobuf"}
    with served(settings_of(tmp_path)) as client:
        assert client.get(DELAYED, headers=accept).status_code == 405
        found = client.get(f"{ORDERS}-partition-1/delayed", headers=accept)
        assert delayed_indexes(found.content) == [(DUE, 2, 0, DELAY), (DUE + 1, 2, 1, DELAY)]


def test_a_listing_in_pages(client: httpx.Client) -> None:
    page = client.get(f"{DELAYED}?limit=3").json()
    assert list(page) == ["version", "asOf", "messages", "nextCursor", "note"]
    assert page["note"].startswith("what came in within the last seconds may be missing: "), "there is no broker"
    assert page["messages"][0] == {
        "messageId": "1:0:-1:-1",
        "ledgerId": 1,
        "entryId": 0,
        "partitionIndex": -1,
        "batchIndex": -1,
        "deliverAt": DUE,
        "isHeld": False,
        "isPaused": False,
        "shapedFrom": None,
        "subscriptions": ["x"],
        "key": "k0",
        "orderingKey": None,
        "properties": {"n": "=0"},
        "eventTime": 0,
        "publishTime": 0,
        "producerName": "p",
        "attempt": None,
    }
    rest = client.get(DELAYED, params={"cursor": page["nextCursor"]}).json()
    assert [m["entryId"] for m in page["messages"] + rest["messages"]] == [0, 1, 2, 3, 4]
    assert (rest["version"], rest["asOf"], rest["nextCursor"]) == (page["version"], page["asOf"], None)


@pytest.mark.parametrize(
    ("query", "entries"),
    [
        ({"key": "k0"}, [0, 2, 4]),
        ({"key": "k0", "subscription": "a"}, [2, 4]),
        ({"property": "n==3"}, [3]),
        ({"property": ["n==3", "other="]}, []),
        ({"dueFrom": DUE + 1, "dueBefore": DUE + 3}, [1, 2]),
        ({"ledgerId": 1, "entryId": 4}, [4]),
        ({"producerName": "nobody"}, []),
    ],
)
def test_filters(client: httpx.Client, query: dict[str, str], entries: list[int]) -> None:
    assert [m["entryId"] for m in client.get(DELAYED, params=query).json()["messages"]] == entries


def test_statistics(client: httpx.Client) -> None:
    stats = client.get(f"{DELAYED}/stats?key=k0").json()
    assert [(s["subscription"], s["pending"]) for s in stats["subscriptions"]] == [("a", 2), ("x", 3)]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"{DELAYED}?limit=0", 400),
        (f"{DELAYED}?limit=1001", 400),
        (f"{DELAYED}?dueBefore=soon", 400),
        (f"{DELAYED}?dueBefore=-1", 400),
        (f"{DELAYED}?entryId=1", 400),
        (f"{DELAYED}?ledgerId=9223372036854775808", 400),
        (f"{DELAYED}?property=x", 400),
        (f"{DELAYED}?cursor=x", 400),
        (f"{DELAYED}?subscription=nobody", 404),
        (DELAYED.replace("orders", "none"), 404),
        (f"{DELAYED}/stats?subscription=nobody", 404),
    ],
)
def test_wrong_questions(client: httpx.Client, path: str, code: int) -> None:
    reason(client.get(path), code)


@pytest.mark.slow
def test_a_dry_run_shows_what_would_be_cancelled(client: httpx.Client) -> None:
    for operation, subscription, entries in (("cancel", "x", [0, 2, 4]), ("skip", "a", [2, 4])):
        path = f"{ORDERS}/subscription/{subscription}/{operation}"
        would = client.post(path, json={"filter": {"key": "k0"}, "dryRun": True}).json()
        assert list(would) == ["matched", "messages"]
        assert would["matched"] == len(entries)
        assert [m["entryId"] for m in would["messages"]] == entries
        assert "broker" in reason(client.post(path, json={"filter": {"key": "k0"}}), 503)


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("a/cancel", {}, 400),
        ("a/cancel", {"filter": {}}, 400),
        ("a/cancel", {"filter": {"subscription": "a"}}, 400),
        ("a/cancel", {"filter": {"key": "k0", "subscription": "x"}}, 400),
        ("a/cancel", {"filter": {"key": "k0", "color": "red"}}, 400),
        ("a/cancel", {"filter": {"key": "k0"}, "dry_run": True}, 400),
        ("a/cancel", {"filter": {"key": "k0"}, "dryRun": "true"}, 400),
        ("a/cancel", {"filter": {"key": "k0"}, "max": 0}, 400),
        ("a/cancel", {"filter": {"key": 1}}, 400),
        ("a/cancel", {"filter": {"dueFrom": True}}, 400),
        ("a/reschedule", {"filter": {"key": "k0"}, "deliverAt": 2**62}, 400),
        ("a/postpone", {"filter": {"key": "k0"}}, 400),
        ("a/postpone", {"filter": {"key": "k0"}, "byMillis": 0}, 400),
        ("a/postpone", {"filter": {"key": "k0"}, "byMillis": 1.5}, 400),
        ("nobody/cancel", {"filter": {"key": "k0"}}, 404),
        ("x/skip", {"filter": {"key": "k0"}}, 405),
        ("x/skip", {"filter": {"key": "k0"}, "dryRun": True}, 405),
        ("x/cancel", {"filter": {"key": "k0"}, "max": 2}, 412),
    ],
)
def test_wrong_orders(client: httpx.Client, path: str, body: dict[str, object], code: int) -> None:
    reason(client.post(f"{ORDERS}/subscription/{path}", json=body), code)


@pytest.mark.parametrize(
    ("operation", "state", "matched"),
    [
        ("cancel", "held", 0),
        ("skip", "waiting", 4),
        ("restore", "takenBack", 1),
        ("restore", "cancelled", 1),
        ("postpone", "waiting", 4),
    ],
)
def test_the_state_of_what_is_to_be_changed_may_be_named(
    client: httpx.Client, operation: str, state: str, matched: int
) -> None:
    body = {"filter": {"dueFrom": 0, "state": state}, "dryRun": True}
    body |= {"byMillis": 1_000} if operation == "postpone" else {}
    answer = client.post(f"{ORDERS}/subscription/a/{operation}", json=body)
    assert (answer.status_code, answer.json().get("matched")) == (200, matched), answer.text


def test_nothing_to_cancel_is_done(client: httpx.Client) -> None:
    answer = client.post(f"{ORDERS}/subscription/a/skip", json={"filter": {"key": "none"}})
    assert (answer.status_code, answer.json()) == (200, {"matched": 0, "applied": 0, "tooLate": 0})


@pytest.mark.slow
def test_the_settings_bound_what_one_filter_is_for(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    for i in range(4):
        tables.append("delayed_index", to_index(messages([(1, i, DUE + i)], topic=TOPIC), 1), {"test": i + 1})
    filtered: dict[str, object] = {"filter": {"dueFrom": 0}}
    more = {"reschedule": {"deliverAt": DUE}, "postpone": {"byMillis": 1}}
    with served(settings_of(tmp_path, max_matched_per_filter=3)) as client:
        for operation in ("cancel", "skip", "restore", "deliverNow", "reschedule", "postpone"):
            body = filtered | {"max": 4} | more.get(operation, {})
            told = reason(client.post(f"{ORDERS}/subscription/a/{operation}", json=body), 413)
            assert told == "one call may be for at most 3 messages (api.max_matched_per_filter)"
        letters = {"filter": {"subscription": "a", "reason": "no"}, "max": 4}
        assert "at most 3" in reason(client.post(f"{ORDERS}/dlq/redrive", json=letters), 413)
        # Without a `max` of its own a call has that of the settings.
        assert "at most 3 may" in reason(client.post(f"{ORDERS}/subscription/a/skip", json=filtered), 412)
        assert "at most 3" in reason(client.post(f"{ORDERS}/subscription/a/skip/4"), 413)
        reason(client.post(f"{ORDERS}/subscription/a/skip/3"), 503)  # no broker is there


@pytest.mark.slow
def test_part_of_a_batch_can_not_be_cancelled(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    with served(settings_of(tmp_path)) as client:
        reason(client.get(DELAYED), 503)
        tables.create()
        rows = batches([(1, 0, 0, 2, DUE)], topic=TOPIC, key="k")
        tables.append("delayed_index", to_index(rows, 1), {"test": 1})
        answer = client.post(f"{ORDERS}/subscription/x/cancel", json={"filter": {"key": "k"}})
        assert answer.json() == {"matched": 1, "applied": 0, "tooLate": 0, "notAllowed": 1}
