"""Under which names the API may be called, and whose address counts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import ProcessCollector
from pydantic import ValidationError
from starlette.testclient import TestClient

from admin.app import create_app
from admin.security.hosts import host_name
from conf.api_settings import ApiSettings
from conf.settings import MetricsSettings, Settings
from jobs.metrics_server import serve_metrics
from tests.support.clients.tokens import SECRET, encoded, token
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.slow

PAUSE = "/admin/v2/persistent/public/default/orders/subscription/a/pause"
AUTH = {"enabled": True, "token_secret_key": encoded(SECRET)}


def settings(folder: Path, api: dict[str, Any] | None = None, **sections: Any) -> Settings:
    return Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}",
            "api": api or {},
            "routes": [{"source": "persistent://public/default/orders", "subscriptions": [{"name": "a"}]}],
            **sections,
        }
    )


def client(made: Settings, address: str = "127.0.0.1") -> TestClient:
    return TestClient(
        create_app(made), base_url="http://localhost", client=(address, 4711), raise_server_exceptions=False
    )


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A client of an API whose settings name no hosts."""
    return client(settings(tmp_path_factory.mktemp("api")))


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8081", "localhost"),
        ("localhost.:8081", "localhost"),
        ("127.0.0.1:8081", "127.0.0.1"),
        ("[::1]:8081", "::1"),
        ("[::1]", "::1"),
        ("evil.example:80", "evil.example"),
        ("", ""),
    ],
)
def test_a_name_is_without_its_port(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8081", "LOCALHOST.", "127.0.0.1:1", "127.8.8.8", "[::1]:8081"]
)
@pytest.mark.parametrize("path", ["/healthz", "/", "/metrics", "/docs", "/ui/login"])
def test_loopback_names_are_served(by_default: TestClient, host: str, path: str) -> None:
    assert by_default.get(path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8081", "localhost.evil.example", "localhost@evil.example", "xlocalhost", "",
     "192.0.2.1", "127.0.0.1.evil.example", "[::2]", "0"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/healthz", "/", "/metrics", "/ui/static/app.js", "/nonsense", "/openapi.json"])
def test_a_name_that_only_points_here_is_not(by_default: TestClient, host: str, path: str) -> None:
    answer = by_default.get(path, headers={"Host": host, "Accept": "text/html"})
    assert answer.status_code == 421
    assert list(answer.json()) == ["reason"]
    assert "api.allowed_hosts" in answer.json()["reason"]


def test_the_jobs_metrics_are_served_under_the_same_names(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = settings(tmp_path).model_copy(
        update={"metrics": MetricsSettings(port=port), "api": ApiSettings(allowed_hosts=("*.monitoring",))}
    )
    server, thread = serve_metrics(made, ProcessCollector(registry=None))
    try:
        for host, code in (
            ("localhost", 200), (f"127.0.0.1:{port}", 200), ("job.monitoring:9", 200),
            ("evil.example", 421), (f"127.0.0.1.evil.example:{port}", 421), ("", 421),
        ):  # fmt: skip
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
            assert answer.status_code == code, host
            assert ("api.allowed_hosts" in answer.text, "# HELP" in answer.text) == (code == 421, code == 200)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_rebound_page_changes_nothing_and_is_written_down(tmp_path: Path) -> None:
    """As such a page calls: its origin and the name that it calls are the same."""
    with client(settings(tmp_path)) as http:
        answer = http.post(PAUSE, headers={"Host": "evil.example:8081", "Origin": "http://evil.example:8081"})
        assert answer.status_code == 421
    [kept] = Tables(f"{tmp_path}").query("refusals", "SELECT * FROM refusals").to_pylist()
    assert (kept["code"], kept["role"], kept["address"], kept["method"]) == (421, None, "127.0.0.1", "POST")
    assert "evil.example" in kept["reason"]


def test_two_names_in_one_call_are_none(tmp_path: Path) -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example")]
    assert client(settings(tmp_path)).get("/healthz", headers=headers).status_code == 421


def test_names_of_the_settings_are_served(tmp_path: Path) -> None:
    made = settings(tmp_path, {"host": "desk.example", "allowed_hosts": ["Delay.Example", "*.shop.example"]})
    names = ["desk.example", "delay.example:443", "a.shop.example", "localhost"]
    others = ["shop.example", "delay.example.evil", "a.shop.example.evil"]
    assert {client(made).get("/healthz", headers={"Host": name}).status_code for name in names} == {200}
    assert {client(made).get("/healthz", headers={"Host": name}).status_code for name in others} == {421}


def test_the_address_at_which_a_call_comes_in_is_served(tmp_path: Path) -> None:
    """As probes and scrapers call."""
    http = TestClient(create_app(settings(tmp_path)), base_url="http://192.0.2.7:8081")
    assert http.get("/healthz").status_code == 200
    assert http.get("/healthz", headers={"Host": "192.0.2.8:8081"}).status_code == 421


def test_with_authentication_names_are_checked_where_they_are_set(tmp_path: Path) -> None:
    open_to_names = client(settings(tmp_path, auth=AUTH))
    assert open_to_names.get("/healthz", headers={"Host": "api.example"}).status_code == 200
    assert open_to_names.post(PAUSE, headers={"Host": "api.example"}).status_code == 401
    named = client(settings(tmp_path, {"allowed_hosts": ["api.example"]}, auth=AUTH))
    assert named.get("/healthz", headers={"Host": "api.example"}).status_code == 200
    assert named.get("/healthz", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "[::1]", "a b"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ValidationError):
        ApiSettings(allowed_hosts=(name,))


def codes_of(made: Settings, *calls: tuple[str, list[tuple[str, str]]]) -> list[int]:
    """What calls without a token, by peer and headers, are answered."""
    app = create_app(made)
    return [
        TestClient(app, client=(peer, 4711), raise_server_exceptions=False).post(PAUSE, headers=headers).status_code
        for peer, headers in calls
    ]


PROXIED = {"rate_limit": "2/day", "trusted_proxies": ["10.0.0.0/8", "2001:db8::1"]}


def forwarded(*lines: str) -> list[tuple[str, str]]:
    return [("X-Forwarded-For", line) for line in lines]


def test_behind_a_trusted_proxy_each_caller_has_a_rate_of_its_own(tmp_path: Path) -> None:
    one, other = forwarded("192.0.2.1"), forwarded("192.0.2.2")
    made = settings(tmp_path, PROXIED, auth=AUTH)
    proxy = "10.1.2.3"
    calls = [(proxy, one)] * 3 + [(proxy, other)] * 2 + [("2001:db8::1", one), ("2001:db8::1", other)]
    assert codes_of(made, *calls) == [401, 401, 429, 401, 401, 429, 429]


@pytest.mark.parametrize(
    "lines",
    [
        ["203.0.113.{n}, 192.0.2.1"],  # written by the caller, then by the proxy
        ["203.0.113.{n}", "192.0.2.1"],  # the proxy added a line
        ["203.0.113.{n}, 192.0.2.1, 10.9.9.9"],  # two proxies
        ["192.0.2.1:{n}"],
        ["nonsense{n}, 192.0.2.1"],
        ["10.0.0.{n}, 192.0.2.1"],  # the caller pretends to be a proxy
        ["::ffff:192.0.2.1"],
    ],
)
def test_no_caller_can_pretend_to_be_others(tmp_path: Path, lines: list[str]) -> None:
    made = settings(tmp_path, PROXIED, auth=AUTH)
    calls = [("10.1.2.3", forwarded(*(line.format(n=n) for line in lines))) for n in range(1, 4)]
    assert codes_of(made, *calls, ("10.1.2.3", forwarded("192.0.2.2"))) == [401, 401, 429, 401]


@pytest.mark.parametrize("lines", [[], [""], ["nonsense"], ["unknown, "], ["10.9.9.9, "]])
def test_a_proxy_that_tells_nothing_is_the_caller_itself(tmp_path: Path, lines: list[str]) -> None:
    made = settings(tmp_path, PROXIED, auth=AUTH)
    assert codes_of(made, *[("10.1.2.3", forwarded(*lines))] * 3) == [401, 401, 429]


def test_others_are_not_believed(tmp_path: Path) -> None:
    calls = [("192.0.2.9", forwarded(f"192.0.2.{n}")) for n in range(1, 4)]
    assert codes_of(settings(tmp_path, PROXIED, auth=AUTH), *calls) == [401, 401, 429]
    assert codes_of(settings(tmp_path, {"rate_limit": "2/day"}, auth=AUTH), *calls) == [401, 401, 429]


def test_a_refused_call_is_written_down_with_its_callers_address(tmp_path: Path) -> None:
    with client(settings(tmp_path, PROXIED, auth=AUTH), "10.1.2.3") as http:
        assert http.post(PAUSE, headers=forwarded("192.0.2.1")).status_code == 401
    [kept] = Tables(f"{tmp_path}").query("refusals", "SELECT * FROM refusals").to_pylist()
    assert kept["address"] == "192.0.2.1"


@pytest.mark.parametrize(("proto", "is_secure"), [("https", True), ("http", False), ("nonsense", False)])
def test_a_cookie_is_secure_where_the_proxy_serves_https(tmp_path: Path, proto: str, is_secure: bool) -> None:
    made = settings(tmp_path, PROXIED, auth=AUTH)
    for peer, expected in (("10.1.2.3", is_secure), ("192.0.2.9", False)):
        headers = {"X-Forwarded-Proto": proto}
        login = {"data": {"token": token("reader")}, "headers": headers, "follow_redirects": False}
        answer = client(made, peer).post("/ui/login", **login)
        assert answer.status_code == 303
        assert ("Secure" in answer.headers["set-cookie"]) is expected


def test_no_page_of_another_site_logs_in_or_out(tmp_path: Path) -> None:
    http = client(settings(tmp_path, auth=AUTH))
    login = {"data": {"token": token("attacker")}, "follow_redirects": False}
    for path, own in (("/ui/login", 303), ("/ui/logout", 303)):
        foreign = http.post(path, headers={"Origin": "https://evil.example"}, **login)
        assert foreign.status_code == 403
        assert "set-cookie" not in foreign.headers
        assert http.post(path, headers={"Origin": "http://localhost"}, **login).status_code == own


@pytest.mark.parametrize("value", ["nonsense", "10.0.0.1/8", "*", ""])
def test_a_trusted_proxy_is_an_address_or_a_network(value: str) -> None:
    with pytest.raises(ValidationError):
        ApiSettings(trusted_proxies=(value,))  # type: ignore[arg-type]


SPARK = {
    "spark.hadoop.fs.s3a.access.key": "AKIAXXXX",
    "spark.hadoop.fs.s3a.secret.key": "s3cr3t-1",
    "spark.executorEnv.AWS_SESSION_TOKEN": "s3cr3t-2",
    "spark.ssl.keyPassword": "s3cr3t-3",
    "spark.driver.extraJavaOptions": "-Djavax.net.ssl.keyStorePassword=s3cr3t-4",
    "spark.jars.repositories": "https://user:s3cr3t-5@repo.example/x",
    "spark.hadoop.fs.azure.sas.box.account": "sv=2024&sig=s3cr3t-6",
    "spark.ssl.pw": "s3cr3t-7",
    "spark.executorEnv.PGPASS": "s3cr3t-9",
    "spark.executorEnv.DB_PWD": "s3cr3t-10",
    "spark.executorEnv.OTEL_EXPORTER_OTLP_HEADERS": "x-api=s3cr3t-11",
    "spark.executorEnv.DSN": "s3cr3t-12",
    "spark.sql.catalog.prod.jdbc.login": "s3cr3t-13",
    "spark.anything.new": "s3cr3t-14",
    "spark.sql.shuffle.partitions": "217",
    "spark.executor.extraJavaOptions": "-Daws_access=s3cr3t-8",
    "spark.driver.memory": "4g",
}


def test_settings_are_shown_to_administrators_without_secrets(tmp_path: Path) -> None:
    roles = [
        {"role": "read", "operations": ["read"], "topics": ["*"]},
        {"role": "admin", "operations": ["admin"], "topics": ["*"]},
        {"role": "admin of one", "operations": ["admin"], "topics": ["persistent://public/default/orders"]},
    ]
    files = {"token_file": "/etc/pulsar/token"}
    auth = {**AUTH, "roles": roles}
    made = settings(tmp_path, auth=auth, spark={"conf": SPARK}, pulsar=files)
    http = client(made)

    def get(path: str, role: str) -> Any:
        return http.get(path, headers={"Authorization": f"Bearer {token(role)}"})

    for role in ("read", "admin of one"):
        assert get("/ui/settings", role).status_code == 403
        assert "/ui/settings" not in get("/ui/schedule", role).text
    assert "/ui/settings" in get("/ui/schedule", "admin").text
    shown = get("/ui/settings", "admin")
    assert shown.status_code == 200
    for secret in ("s3cr3t", "AKIAXXXX", SECRET.decode(errors="replace")):
        assert secret not in shown.text
    for plain in ("spark.driver.memory", "4g", "217", "/etc/pulsar/token", "spark.ssl.keyPassword"):
        assert plain in shown.text


def test_calls_under_other_names_are_limited_and_counted(tmp_path: Path) -> None:
    with client(settings(tmp_path, {"rate_limit": "3/day"})) as http:
        codes = [http.post(PAUSE, headers={"Host": "evil.example"}).status_code for _ in range(5)]
    assert codes == [421, 421, 421, 429, 429]
    [kept] = Tables(f"{tmp_path}").query("refusals", "SELECT * FROM refusals").to_pylist()
    assert (kept["code"], kept["calls"]) == (421, 3)
