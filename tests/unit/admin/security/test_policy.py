"""Every route of the API, held against every kind of caller. No broker is there: what passes ends otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.testclient import TestClient

from admin.app import create_app
from admin.security.policy import OPEN_PATHS, PolicyError, check_policies, open_to_all, policy_of, requires
from conf.api_settings import Operation
from conf.settings import Settings
from tests.support.clients.tokens import der, encoded, forged, pem, token
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow

KEY = rsa.generate_private_key(65537, 2048)
OTHER_KEY = rsa.generate_private_key(65537, 2048)
NOW = int(time.time())

SHOP = "persistent://shop/web/*"
ROLES = [
    *({"role": f"{operation}-role", "operations": [operation], "topics": [SHOP]} for operation in Operation),
    {
        "role": "neighbour",
        "operations": list(Operation),
        "topics": ["persistent://shop2/*", "persistent://shop/web2/*"],
    },
    {"role": "root", "operations": ["admin"], "topics": ["*"]},
    {"role": "look-alike", "operations": ["admin"], "topics": ["persistent://shop/web/orders-*"]},
    {"role": "one-partition", "operations": ["admin"], "topics": ["persistent://shop/web/orders-partition-0"]},
]

STRANGERS = {
    "no token": None,
    "no bearer": signed if (signed := token("root", KEY, "RS256")) else None,
    "basic": f"Basic {signed}",
    "unparsable": "Bearer x.y.z",
    "blank": "Bearer  ",
    "bad signature": f"Bearer {signed[:-8]}AAAAAAAA",
    "wrong key": f"Bearer {token('root', OTHER_KEY, 'RS256')}",
    "expired": f"Bearer {token('root', KEY, 'RS256', exp=NOW - 60)}",
    "not yet valid": f"Bearer {token('root', KEY, 'RS256', nbf=NOW + 3600)}",
    "alg none": f"Bearer {token('root', None, 'none')}",
    "HS256 by the public key, DER": f"Bearer {forged({'alg': 'HS256'}, {'sub': 'root'}, der(KEY))}",
    "HS256 by the public key, PEM": f"Bearer {forged({'alg': 'HS256'}, {'sub': 'root'}, pem(KEY))}",
    "no role": f"Bearer {token('', KEY, 'RS256')}",
}

NOBODY = "a role that the settings do not name"


def settings(folder: Path, **sections: Any) -> Settings:
    return Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}/warehouse",
            "auth": {"enabled": True, "token_public_key": encoded(der(KEY)), "roles": ROLES},
            "routes": [{"source": "persistent://shop/web/orders", "subscriptions": [{"name": "billing"}]}],
            **sections,
        }
    )


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token(role, KEY, 'RS256')}"}


class Calls:
    """Calls every route, and counts what the table of refusals is to have."""

    def __init__(self, client: TestClient) -> None:
        self._client = client
        self.refused = 0

    def routes(self) -> Iterator[tuple[RouteContext, str]]:
        for route in iter_route_contexts(cast("FastAPI", self._client.app).routes):
            for method in sorted(route.methods or ()):
                yield route, method

    def call(
        self,
        route: RouteContext,
        method: str,
        headers: dict[str, str],
        topic: str = "orders",
        params: dict[str, str] | None = None,
    ) -> httpx.Response:
        assert route.path
        path = route.path.replace(":path", "")
        path = path.format(
            tenant="shop", namespace="web", topic=topic, subscription="billing", rest="x", n="5", id="7:0"
        )
        answer = self._client.request(method, path, headers=headers, params=params)
        if answer.status_code in (401, 403) and method in ("POST", "DELETE"):
            self.refused += 1
        return answer


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    folder = tmp_path_factory.mktemp("api")
    app = create_app(settings(folder))
    with TestClient(app, raise_server_exceptions=False) as client:
        calls = Calls(client)
        yield calls
    kept = Tables(f"{folder}/warehouse").query(
        "refusals", "SELECT code, role, reason, path, topic, calls FROM refusals"
    )
    assert sum(kept["calls"].to_pylist()) == calls.refused > 0
    text = str(kept.to_pylist())
    assert signed.rpartition(".")[2] not in text


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_is_not_known_is_answered_401(calls: Calls, stranger: str) -> None:
    value = STRANGERS[stranger]
    for route, method in calls.routes():
        answer = calls.call(route, method, {"Authorization": value} if value else {})
        if policy_of(route) is None:
            assert answer.status_code not in (401, 403), route.path
        else:
            assert answer.status_code == 401, route.path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert method == "HEAD" or set(answer.json()) == {"reason"}


@pytest.mark.parametrize("role", [*(f"{operation}-role" for operation in Operation), "neighbour", "root", NOBODY])
@pytest.mark.parametrize("topic", ["orders", "orders-partition-0", "nowhere"])
def test_who_is_known_may_what_the_role_may(calls: Calls, role: str, topic: str) -> None:
    for route, method in calls.routes():
        answer = calls.call(route, method, bearer(role), topic)
        needed = policy_of(route)
        path = route.path or ""
        if path == "/ui/settings":  # the settings are those of all topics
            assert (answer.status_code == 200) is (role == "root")
            continue
        # A page shows of all topics those that the caller may read.
        is_for_some = "{topic}" in path or path == "/" or path.startswith("/ui/")
        enough = {f"{needed}-role", f"{Operation.ADMIN}-role"}
        if needed is Operation.ACKNOWLEDGE:
            enough.add(f"{Operation.SKIP}-role")
        may = needed is None or role == "root" or (is_for_some and role in enough)
        assert (answer.status_code not in (401, 403)) is may, (route.path, method, answer.text)
        if not may:
            assert answer.status_code == 403


@pytest.mark.parametrize("topic", ["orders", "orders-partition-0"])
def test_a_rule_for_other_topics_is_not_for_the_partitions_of_one_whose_name_begins_alike(
    calls: Calls, topic: str
) -> None:
    for route, method in calls.routes():
        if "{topic}" in (route.path or ""):
            assert calls.call(route, method, bearer("look-alike"), topic).status_code == 403, route.path


def test_a_rule_for_one_partition_allows_nothing_that_is_for_the_whole_topic(calls: Calls) -> None:
    subscription = "/admin/v2/persistent/shop/web/{}/subscription/billing"
    schedules = "/admin/v2/persistent/shop/web/{}/schedules"
    by_key = {"scheduleKeys": ["order-7"]}
    asked: list[tuple[str, str, Any]] = [
        ("POST", f"{subscription}/pause", None),
        ("POST", f"{subscription}/resume", None),
        ("POST", f"{subscription}/skipByMessageIds", by_key),
        ("POST", f"{subscription}/deliverNow", by_key),
        ("POST", f"{subscription}/reschedule", {**by_key, "deliverAt": 1}),
        ("POST", f"{subscription}/postpone", {**by_key, "byMillis": 1}),
        ("POST", "/admin/v2/persistent/shop/web/{}/cancelDelayedMessage?scheduleKey=order-7", None),
        ("POST", "/admin/v2/persistent/shop/web/{}/acknowledgeMessage?scheduleKey=order-7", None),
        ("DELETE", f"{schedules}/7:0", None),
        *(
            ("POST", f"{schedules}{path}", None)
            for verb in ("pause", "resume", "skipNext")
            for path in (f"/7:0/{verb}", f"/{verb}?scheduleKey=order-7")
        ),
    ]
    for method, path, body in asked:
        for topic, whole in (("orders-partition-0", "orders"), ("orders", "orders")):
            answer = calls._client.request(method, path.format(topic), json=body, headers=bearer("one-partition"))
            assert answer.status_code == 403, (path, answer.text)
            assert whole in answer.json()["reason"]
            calls.refused += 1
        for role in ("admin-role", "root"):
            answer = calls._client.request(method, path.format("orders-partition-0"), json=body, headers=bearer(role))
            assert answer.status_code == 503, (path, answer.text)  # no broker is there, and no tables
    for path in ("skipByMessageIds", "deliverNow"):
        path = f"{subscription.format('orders-partition-0')}/{path}"
        assert calls._client.post(path, json=["7:0"], headers=bearer("one-partition")).status_code == 503
    other = f"{subscription.format('orders-partition-1')}/deliverNow"
    assert calls._client.post(other, json=["7:0"], headers=bearer("one-partition")).status_code == 403
    calls.refused += 1


def test_the_routes_that_take_messages_back_are_there(calls: Calls) -> None:
    """That the tables above do not pass because there is nothing to call."""
    policies = {(route.path or "").rpartition("/")[2]: policy_of(route) for route, _ in calls.routes()}
    assert policies["cancelDelayedMessage"] is Operation.CANCEL
    assert policies["acknowledgeMessage"] is Operation.ACKNOWLEDGE
    assert policies["skipByMessageIds"] is Operation.SKIP
    assert {policies[path] for path in ("deliverNow", "reschedule", "postpone", "retry", "redrive")} == {
        Operation.DELIVER
    }
    assert policies["getMessageIdByIndex"] is Operation.READ
    assert policies["healthz"] is None


@pytest.mark.parametrize(
    "path",
    [
        "/admin/v2/persistent/shop2/web/orders/acknowledgeMessage",
        "/admin/v2/persistent/shop/web/..%2F..%2F..%2Fshop2%2Fweb%2Forders/acknowledgeMessage",
        "/admin/persistent/shop/cluster/web2/orders/acknowledgeMessage",
        "/admin/v1/persistent/shop2/cluster/web/orders/acknowledgeMessage",
        "/admin/v2/persistent/shop%2Fweb/web/orders/acknowledgeMessage",
    ],
)
def test_no_other_spelling_reaches_another_tenant(calls: Calls, path: str) -> None:
    answer = calls._client.post(path, headers=bearer("skip-role"))
    calls.refused += answer.status_code == 403
    assert answer.status_code == 403 or "no such" in answer.text, answer.text


def test_the_v1_path_is_the_same_topic(calls: Calls) -> None:
    answer = calls._client.post("/admin/persistent/shop/any/web/orders/acknowledgeMessage", headers=bearer("skip-role"))
    assert answer.status_code == 412  # the ids are missing


def test_a_token_may_be_in_the_query_as_at_the_broker(calls: Calls) -> None:
    path = "/admin/v2/persistent/shop/web/orders/acknowledgeMessage"
    assert calls._client.post(path, params={"token": token("skip-role", KEY, "RS256")}).status_code == 412
    assert calls._client.post(path, params={"token": "x"}).status_code == 401
    calls.refused += 1


ELSEWHERE = [
    {"Origin": "http://testserver:3000"},
    {"Origin": "https://example.org"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-site"},  # another port of the same host
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://testserver"},
]
ON_ITS_PAGES = [
    {},
    {"Origin": "http://testserver"},
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]
BY_BROWSER = ["cookie", "cookie and a wrong token in the query", "cookie and a token in the query"]


def shown_as(how: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns headers and query of a call of root, who shows its token in a way."""
    shown = token("root", KEY, "RS256")
    cookie = {"Cookie": f"delaylake_token={shown}"}
    return {
        "cookie": (cookie, {}),
        "cookie and a wrong token in the query": (cookie, {"token": "x"}),
        "cookie and a token in the query": (cookie, {"token": shown}),
        "header": (bearer("root"), {}),
        "header and cookie": (cookie | bearer("root"), {}),
        "query": ({}, {"token": shown}),
    }[how]


@pytest.mark.parametrize("how", [*BY_BROWSER, "header", "header and cookie", "query"])
def test_no_page_of_another_origin_changes_anything_with_a_browsers_cookie(calls: Calls, how: str) -> None:
    headers, query = shown_as(how)
    for route, method in calls.routes():
        needed = policy_of(route)
        if needed is None or needed is Operation.READ or "/ui/" in (route.path or ""):
            continue
        for elsewhere in ELSEWHERE:
            answer = calls.call(route, method, headers | elsewhere, params=query)
            assert (answer.status_code == 403) is (how in BY_BROWSER), (route.path, elsewhere, answer.text)
        for on_its_pages in ON_ITS_PAGES:
            answer = calls.call(route, method, headers | on_its_pages, params=query)
            assert answer.status_code not in (401, 403), (route.path, on_its_pages, answer.text)


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_no_page_of_another_origin_logs_anyone_in_or_out(calls: Calls, elsewhere: dict[str, str]) -> None:
    shown = {"token": token("root", KEY, "RS256")}
    for path in ("/ui/login", "/ui/logout"):
        answer = calls._client.post(path, data=shown, headers=elsewhere, follow_redirects=False)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_a_page_that_came_without_tls_is_another_origin_of_one_with_it(calls: Calls) -> None:
    path = "https://testserver/admin/v2/persistent/shop/web/orders/acknowledgeMessage"
    headers, _ = shown_as("cookie")
    assert calls._client.post(path, headers=headers | {"Origin": "http://testserver"}).status_code == 403
    assert calls._client.post(path, headers=headers | {"Origin": "https://testserver"}).status_code == 412
    calls.refused += 1


def test_a_route_without_a_policy_is_not_served(tmp_path: Path) -> None:
    app = create_app(settings(tmp_path))
    check_policies(app)
    router = APIRouter(prefix="/admin/v2")
    router.add_api_route("/open", lambda: None, dependencies=[Depends(open_to_all)])
    router.add_api_route("/declared", lambda: None, dependencies=[Depends(requires(Operation.ADMIN))])
    app.include_router(router)
    check_policies(app)
    router.add_api_route("/forgotten", lambda: None)
    with pytest.raises(PolicyError, match="/admin/v2/forgotten"):
        check_policies(app)


@pytest.mark.parametrize("method", ["mount", "add_route", "add_api_websocket_route"])
def test_no_kind_of_route_goes_without_a_policy(tmp_path: Path, method: str) -> None:
    app = create_app(settings(tmp_path))
    getattr(app, method)("/forgotten", lambda request: None)
    with pytest.raises(PolicyError, match="/forgotten"):
        check_policies(app)


def test_what_is_open_is_little(calls: Calls) -> None:
    found = {route.path for route, _ in calls.routes() if policy_of(route) is None}
    health = {"/healthz", "/readyz", "/metrics"}
    ui = {"/docs", "/ui/login", "/ui/logout", "/ui/static/{rest}"}
    assert found == OPEN_PATHS | health | ui | {"/admin/v2/non-persistent/{rest:path}"}


def test_too_many_calls_are_answered_429(tmp_path: Path) -> None:
    path = "/admin/v2/persistent/shop/web/orders/acknowledgeMessage"
    app = create_app(settings(tmp_path, api={"rate_limit": "2/day"}))
    with TestClient(app) as client:
        codes = [client.post(path, headers=bearer(role)).status_code for role in ["skip-role"] * 3 + ["read-role"]]
        assert codes == [412, 412, 429, 403]
        assert [client.post(path).status_code for _ in range(3)] == [401, 401, 429]
        last = client.post(path, headers=bearer("skip-role"))
        assert 1 <= int(last.headers["Retry-After"]) <= 86_400
        assert last.json() == {"reason": "too many calls: wait, and call again"}
        assert client.get("/healthz").status_code == 200
    kept = Tables(f"{tmp_path}/warehouse").query("refusals", "SELECT code, calls FROM refusals ORDER BY code")
    assert kept.to_pylist() == [{"code": 401, "calls": 2}, {"code": 403, "calls": 1}]


def test_a_refusal_is_kept_as_it_was(tmp_path: Path) -> None:
    path = "/admin/v2/persistent/shop/web/orders/acknowledgeMessage"
    with TestClient(create_app(settings(tmp_path))) as client:
        client.post(f"{path}?ledgerId=1", headers=bearer("read-role"))
        client.get("/admin/v2/persistent/shop/web/orders/getMessageIdByIndex")
    (row,) = Tables(f"{tmp_path}/warehouse").query("refusals", "SELECT * FROM refusals").to_pylist()
    assert abs(row.pop("refused_at") - time.time() * 1000) < 60_000
    topic = "persistent://shop/web/orders"
    assert row == {
        "role": "read-role",
        "address": "testclient",
        "method": "POST",
        "path": path,
        "topic": topic,
        "operation": "acknowledge",
        "code": 403,
        "reason": f"the role read-role may not acknowledge on {topic}",
        "calls": 1,
    }


def test_without_authentication_everyone_may_all_but_not_from_another_site(tmp_path: Path) -> None:
    path = "/admin/v2/persistent/shop/web/orders/acknowledgeMessage"
    index = "/admin/v2/persistent/shop/web/orders/getMessageIdByIndex"
    with TestClient(create_app(settings(tmp_path, auth={})), base_url="http://127.0.0.1:8081") as client:
        assert client.post(path).status_code == 412
        assert client.post(path, headers={"Authorization": "Bearer x"}).status_code == 412
        assert client.post(path, headers={"Origin": "http://127.0.0.1:8081"}).status_code == 412
        for origin in ("https://example.org", "http://127.0.0.1:9999", "null"):
            assert client.post(f"{path}?token=x", headers={"Origin": origin}).status_code == 403
            assert client.get(index, headers={"Origin": origin}).status_code == 404
    kept = Tables(f"{tmp_path}/warehouse").query("refusals", "SELECT role, code, calls FROM refusals").to_pylist()
    assert kept == [{"role": "anonymous", "code": 403, "calls": 3}]
