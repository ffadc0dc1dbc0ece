"""The admin API without a broker: what is wrong with a call is said with the right code and a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from admin.rest.topics_schema import TOPIC_PATH
from tests.support.service.admin_api import ORDERS, reason, served, settings_of
from tracker.entry_log import ENTRIES
from warehouse.delta.tables import Tables

SKIP = f"{ORDERS}/subscription/a/skipByMessageIds"
CANCEL = f"{ORDERS}/cancelDelayedMessage"
ACKNOWLEDGE = f"{ORDERS}/acknowledgeMessage"
INDEX = f"{ORDERS}/getMessageIdByIndex"
MESSAGE = "?ledgerId=1&entryId=2"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(f"file:{tmp_path_factory.mktemp('warehouse')}")


@pytest.fixture(scope="module")
def client(tables: Tables) -> Iterator[httpx.Client]:
    settings = settings_of(Path(tables.path("entries")).parent)
    tables.create()
    with served(settings) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "code"), [(f"{ORDERS}/nonsense", 404), (INDEX, 404), (f"{ORDERS}/delayed?limit=0", 400), (CANCEL, 405)]
)
def test_whoever_takes_pages_gets_a_reason_of_the_api_and_a_page_elsewhere(
    client: httpx.Client, path: str, code: int
) -> None:
    takes = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    reason(client.get(path, headers=takes), code)
    elsewhere = client.get("/nonsense", headers=takes)
    assert elsewhere.status_code == 404
    assert elsewhere.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/nonsense", 404),
        ("GET", f"{ORDERS}/nonsense", 404),
        ("POST", f"{ORDERS}/subscription/a/skip/five", 400),
        ("POST", f"{ORDERS}/subscription/a/skip/-1", 400),
        ("POST", f"{ORDERS}/subscription/a/skip/9223372036854775808", 400),
        ("POST", f"{ORDERS}/subscription/nobody/skip/5", 404),
        ("POST", f"{ORDERS.replace('orders', 'none')}/subscription/a/skip/5", 404),
        ("POST", "/admin/v2/non-persistent/public/default/orders/subscription/a/skip/5", 405),
        ("POST", "/admin/non-persistent/public/local/default/orders/subscription/a/skip/5", 405),
        ("GET", f"{ORDERS}/subscription/a/skip/5", 405),
        ("POST", f"{CANCEL}/", 404),
        ("GET", CANCEL, 405),
        ("DELETE", SKIP, 405),
        ("POST", INDEX, 405),
        ("PUT", "/healthz", 405),
        ("POST", CANCEL.replace("orders", "none") + MESSAGE + "&deliverAt=3", 404),
        ("POST", CANCEL.replace("orders", "orders-partition-x") + MESSAGE + "&deliverAt=3", 404),
        ("POST", CANCEL.replace("/default/", "/default%2F") + MESSAGE + "&deliverAt=3", 404),
        ("POST", CANCEL.replace("orders", "a%2Forders") + MESSAGE + "&deliverAt=3", 404),
        ("POST", CANCEL.replace("orders", "%00%ff%0a") + MESSAGE + "&deliverAt=3", 404),
        ("POST", f"{CANCEL}{MESSAGE}&deliverAt=3&subscriptionNames=a,nobody", 404),
        ("POST", f"{ACKNOWLEDGE}{MESSAGE}&subscriptionNames=a&subscriptionNames=nobody", 404),
        ("POST", SKIP.replace("/a/", "/nobody/"), 404),
        ("POST", SKIP.replace("/a/", "/a%2Fb/"), 404),
        ("GET", INDEX.replace("orders", "none") + "?index=0", 404),
        ("GET", INDEX, 404),
        ("GET", f"{INDEX}?index=", 404),
        ("GET", f"{INDEX}?index=x", 404),
        ("GET", f"{INDEX}?index=99999999999999999999", 404),
        ("POST", CANCEL, 412),
        ("POST", CANCEL + MESSAGE, 412),
        ("POST", f"{CANCEL}?ledgerId=-1&entryId=2&deliverAt=3", 412),
        ("POST", f"{CANCEL}?ledgerId=1&entryId=-2&deliverAt=3", 412),
        ("POST", f"{CANCEL}{MESSAGE}&deliverAt=0", 412),
        ("POST", f"{CANCEL}{MESSAGE}&deliverAt=-3", 412),
        ("POST", f"{CANCEL}{MESSAGE}&deliverAt=9223372036854775808", 412),
        ("POST", f"{CANCEL}?ledgerId=one&entryId=2&deliverAt=3", 412),
        ("POST", f"{ACKNOWLEDGE}?ledgerId=1", 412),
        ("POST", f"{ACKNOWLEDGE}?ledgerId=-1&entryId=2", 412),
        ("POST", "/admin/v2/non-persistent/public/default/orders/cancelDelayedMessage" + MESSAGE, 405),
        ("POST", "/admin/v2/non-persistent/public/default/orders/subscription/a/skipByMessageIds", 405),
        ("POST", "/admin/non-persistent/public/local/default/orders/acknowledgeMessage", 405),
        ("GET", "/admin/v2/non-persistent/public/default/orders/getMessageIdByIndex?index=0", 406),
    ],
)
def test_what_can_not_be(client: httpx.Client, method: str, path: str, code: int) -> None:
    reason(client.request(method, path), code)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/", f"{ORDERS}/delayed", "/nonsense", CANCEL])
def test_head_is_answered_as_get_without_the_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        CANCEL,
        CANCEL.replace("orders", "orders-partition-7"),
        CANCEL.replace("orders", "%6Frders"),
        "/admin/persistent/public/local/default/orders/cancelDelayedMessage",
        "/admin/v1/persistent/public/local/default/orders/acknowledgeMessage",
    ],
)
def test_without_a_broker_a_right_call_is_answered_503(client: httpx.Client, path: str) -> None:
    assert "broker" in reason(client.post(f"{path}{MESSAGE}&deliverAt=3&authoritative=true"), 503)
    assert client.get("/healthz").status_code == 200
    assert "broker" in reason(client.get("/readyz"), 503)


def test_later_subscriptions_can_be_named(client: httpx.Client) -> None:
    there = f"{CANCEL}{MESSAGE}&deliverAt=3&subscriptionNames="
    assert client.post(there + "*").status_code == 503, "there is no broker"
    assert client.post(there + "**").status_code == 404


@pytest.mark.slow
def test_parameters_come_in_the_query_a_form_or_json(client: httpx.Client) -> None:
    given = {"ledgerId": "1", "entryId": "2", "deliverAt": "3"}
    names: dict[str, Any] = {"subscriptionNames": ["a", "nobody"]}
    contents: list[dict[str, Any]] = [
        {"data": given},
        {"json": given},
        {"files": {k: (None, v) for k, v in given.items()}},
    ]
    for content in contents:
        reason(client.post(CANCEL, **content), 503)
        assert "deliverAt" in reason(client.post(f"{CANCEL}?deliverAt=0", **content), 412)
    for content in ({"data": given | names}, {"json": given | names}):
        assert "nobody" in reason(client.post(CANCEL, **content), 404)  # type: ignore[arg-type]
    assert "entryId" in reason(client.post(CANCEL, json={"ledgerId": 1, "entryId": False, "deliverAt": 3}), 412)
    for body in (b"{", b"[1]", b"nonsense", b"\xff\xfe"):
        reason(client.post(CANCEL, content=body), 412)
    text = {"content-type": "text/plain"}  # nobody reads a form in it
    given_as_text = client.post(f"{CANCEL}{MESSAGE}&deliverAt=3", content=b"subscriptionNames=a", headers=text)
    assert "neither a form nor JSON" in reason(given_as_text, 412)
    broken = {"content-type": "multipart/form-data; boundary=x"}
    reason(client.post(CANCEL, content=b"--y\r\n", headers=broken), 412)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", f"{CANCEL}{MESSAGE}&deliverAt=3&subscriptionName=a", 412),
        ("POST", f"{ACKNOWLEDGE}{MESSAGE}&subscriptions=a", 412),
        ("POST", f"{ORDERS}/schedules/1:2/pause?subscription=a", 400),
        ("DELETE", f"{ORDERS}/schedules/1:2?subscription=a", 400),
        ("POST", f"{ORDERS}/subscription/a/pause?key=k", 400),
        ("GET", f"{ORDERS}/delayed?dueAfter=3", 400),
        ("GET", f"{ORDERS}/delayed/stats?subscriptionNames=a", 400),
    ],
)
def test_a_parameter_that_a_call_does_not_have_is_refused_and_never_passed_over(
    client: httpx.Client, method: str, path: str, code: int
) -> None:
    assert "no parameter" in reason(client.request(method, path), code)


def test_what_pulsar_passes_over_is_passed_over(client: httpx.Client) -> None:
    reason(client.post(f"{ACKNOWLEDGE}{MESSAGE}&deliverAt=3&authoritative=false&token=x"), 503)
    reason(client.post(f"{ORDERS}/subscription/a/pause?authoritative=false"), 503)


@pytest.mark.slow
def test_a_misspelt_field_of_a_cancel_is_not_for_all_subscriptions(client: httpx.Client) -> None:
    given = {"ledgerId": "1", "entryId": "2", "deliverAt": "3", "subscriptionName": "a"}
    for path in (CANCEL, ACKNOWLEDGE):
        for content in ({"data": given}, {"json": given}):
            assert "subscriptionName" in reason(client.post(path, **content), 412)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/subscription/a/pause", "/subscription/a/resume", "/schedules/1:2/pause"])
def test_a_body_that_nobody_reads_is_refused(client: httpx.Client, path: str) -> None:
    assert "without a body" in reason(client.post(ORDERS + path, json={"subscriptionNames": ["a"]}), 400)
    for content in (b"", b"{}", b"null"):
        reason(client.post(ORDERS + path, content=content), 503)


@pytest.mark.slow
def test_skip_bodies(client: httpx.Client) -> None:
    reason(client.post(SKIP, json=["1:2:3"]), 503)
    reason(client.post(SKIP, json={"1": "2"}), 503)
    reason(client.post(f"{ORDERS}/subscription/a/skip/0", json={"1": "2"}), 503)
    reason(client.post(f"{ORDERS}/subscription/a/skip/0", json=["1:2:3"]), 400)
    assert reason(client.post(SKIP), 400) == "the body is missing"
    for content in (b"", b"{", b"[]", b"[false]", b'["\\ud800"]', b'{"\\ud800": 1}', b'{"type": "x\\ud800"}'):
        reason(client.post(SKIP, content=content), 400)


def test_a_retry_for_all_subscriptions_says_which_there_are(client: httpx.Client) -> None:
    body = {"messageIds": ["1:2"]}
    assert "not for *: the topic has a" in reason(client.post(f"{ORDERS}/subscription/*/retry", json=body), 412)
    reason(client.post(f"{ORDERS}/subscription/a/retry", json=body), 503)


@pytest.mark.slow
def test_the_id_of_a_request_must_be_one_and_is_for_calls_that_name_messages(client: httpx.Client) -> None:
    actions = f"{ORDERS}/subscription/a"
    for key, code in (
        ("0b7e~!", 503),
        ("k" * 128, 503),
        ("k" * 129, 400),
        ("a b", 400),
        ("\xe9", 400),
        ("", 400),
        ("superseded", 400),
        ("redrive-7", 400),
    ):
        for path, content in ((f"{CANCEL}{MESSAGE}&deliverAt=3", None), (SKIP, ["1:2"]), (f"{actions}/pause", None)):
            headers = {b"Idempotency-Key": key.encode("latin-1")}
            assert client.post(path, json=content, headers=headers).status_code == code, (key, path)
    named = {"Idempotency-Key": "x"}
    for path in (f"{actions}/cancel", f"{actions}/deliverNow"):
        refused = client.post(path, json={"filter": {"key": "k"}, "dryRun": True}, headers=named)
        assert "by their ids" in reason(refused, 400)
    assert "by their ids" in reason(client.post(f"{actions}/skip/5", headers=named), 400)


@pytest.mark.slow
def test_too_much_is_413(client: httpx.Client) -> None:
    assert "10" in reason(client.post(SKIP, json=[f"1:{i}" for i in range(11)]), 413)
    large = json.dumps(["1:2:3"] * 1_000).encode()
    for path in (SKIP, CANCEL, f"{CANCEL.replace('orders', 'none')}", "/nonsense"):
        reason(client.post(path, content=large), 413)
    reason(client.post(SKIP, content=(large[i : i + 100] for i in range(0, len(large), 100))), 413)


def test_every_route_is_described_with_its_errors_and_v1_paths_are_not(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len(operations) == 31
    assert "ValidationError" not in json.dumps([operation["responses"] for operation in operations])
    cancel = described["paths"][f"{TOPIC_PATH}/cancelDelayedMessage"]["post"]
    assert {"204", "401", "403", "404", "405", "412", "500", "504"} <= set(cancel["responses"])
    assert {p["name"] for p in cancel["parameters"]} >= {"ledgerId", "entryId", "deliverAt", "subscriptionNames"}


def test_each_reference_in_the_description_leads_somewhere(client: httpx.Client) -> None:
    """A generator of clients refuses the whole description otherwise."""
    text = client.get("/openapi.json").text
    named = set(re.findall(r'"\$ref":\s*"#/([^"]+)"', text))
    assert "components/schemas/ScheduleRequest" in named

    def leads_somewhere(path: str) -> bool:
        found = json.loads(text)
        for part in path.split("/"):
            if part not in found:
                return False
            found = found[part]
        return True

    assert [path for path in named if not leads_somewhere(path)] == []


def test_the_description_is_a_page_that_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    shown = client.get("/docs")
    assert shown.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", shown.text)
    assert f"POST {TOPIC_PATH}/cancelDelayedMessage" in shown.text
    assert "deliverAt" in shown.text
    assert "With the header <code>Idempotency-Key</code>" in shown.text
    assert "`" not in shown.text.split("<main")[1]


@pytest.mark.slow
def test_a_topic_without_a_route_is_404_whatever_the_call(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in described.items() if path.startswith(TOPIC_PATH) for method in methods]
    assert len(calls) >= 12
    for method, path in calls:
        names = {
            "tenant": "public",
            "namespace": "default",
            "topic": "nobody",
            "subscription": "a",
            "n": "5",
            "id": "7:0",
        }
        there = path.format(**names)
        for query in ("", MESSAGE):
            for body in (None, b"{", b'["1:2:3"]'):
                answer = client.request(method, there + query, content=body)
                assert answer.status_code == 404, (method, there, body, answer.text)
                assert "no such topic" in answer.json()["reason"]


def entries(*rows: tuple[int, int, int, int | None, int]) -> pa.Table:
    """Rows of (ledger, entry, batch size, first index, partition)."""
    return pa.Table.from_pylist(
        [
            {
                "topic": "persistent://public/default/orders",
                "partition": partition,
                "ledger_id": ledger,
                "entry_id": entry,
                "batch_size": size,
                "first_index": first,
                "publish_time": 0,
            }
            for ledger, entry, size, first, partition in rows
        ],
        schema=ENTRIES,
    )


@pytest.mark.slow
def test_an_index_gives_its_entry(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    with served(settings_of(tmp_path)) as client:

        def at(index: int, topic: str = "orders") -> tuple[int, int, int]:
            response = client.get(f"{INDEX.replace('orders', topic)}?index={index}")
            assert response.status_code == 200, response.text
            assert list(response.json()) == ["ledgerId", "entryId", "partitionIndex"]
            return tuple(response.json().values())

        assert "not run" in reason(client.get(f"{INDEX}?index=0"), 503)
        tables.create()
        reason(client.get(f"{INDEX}?index=0"), 404)
        # Indexes 0 to 2 were trimmed, 8 is no user message.
        tables.append("entries", entries((5, 0, 3, 3, -1), (5, 1, 2, 6, -1), (6, 0, 1, 9, -1)), {"a": 1})
        assert [at(i) for i in range(10)] == [
            *[(-1, -1, -1)] * 3,
            *[(5, 0, -1)] * 3,
            *[(5, 1, -1)] * 2,
            *[(6, 0, -1)] * 2,
        ]
        for index in (-1, 10, 2**63 - 1):
            reason(client.get(f"{INDEX}?index={index}"), 404)
        reason(client.get(f"{INDEX.replace('orders', 'orders-partition-0')}?index=3"), 404)
        tables.append("entries", entries((6, 1, 1, None, -1)), {"a": 2})
        assert at(9) == (6, 0, -1)
        for index in (0, 10):
            assert "index" in reason(client.get(f"{INDEX}?index={index}"), 412)


@pytest.mark.slow
def test_a_partitioned_topic_has_indexes_by_partition(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create()
    tables.append("entries", entries((5, 0, 1, 0, 0), (6, 0, 2, 0, 1)), {"a": 1})
    with served(settings_of(tmp_path)) as client:
        assert "partition" in reason(client.get(f"{INDEX}?index=0"), 405)
        found = client.get(f"{INDEX.replace('orders', 'orders-partition-1')}?index=1").json()
        assert found == {"ledgerId": 6, "entryId": 0, "partitionIndex": 1}
        reason(client.get(f"{INDEX.replace('orders', 'orders-partition-0')}?index=1"), 404)


@pytest.mark.slow
def test_an_unexpected_error_is_a_500_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("warehouse.queries.message_index.MessageIndex.find", fail)
    with served(settings_of(tmp_path)) as client:
        assert "secret" not in reason(client.get(f"{INDEX}?index=0"), 500)
