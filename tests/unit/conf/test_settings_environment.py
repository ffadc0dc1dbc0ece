"""Settings from the environment, as people write them there: what is wrong is told with the variable's name."""

from __future__ import annotations

import pytest

from conf.settings import SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("clean_environment")

LIST = "must be a list: [...], in the environment as JSON"
MAPPING = "must be a mapping: {name: value}, in the environment as JSON"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("API__ALLOWED_HOSTS", "a.example,b.example", f"api.allowed_hosts = 'a.example,b.example': {LIST}"),
        ("ROUTES", "orders", f"routes = 'orders': {LIST}"),
        ("ROUTES__0__SOURCE", "persistent://public/default/orders", f"routes: {LIST}"),
        ("TRACKER", "4", f"tracker = 4: {MAPPING}"),
        ("TRACKER", "four", f"tracker = 'four': {MAPPING}"),
        ("AUTH", '{"token_secret_key": "hunter2', f"auth: {MAPPING}"),
        ("SPARK__CONF", '{"spark.password": "hunter2', f"spark.conf: {MAPPING}"),
        ("TRACKER_SHARDS", "4", "no such setting: write DELAYLAKE_TRACKER__SHARDS"),
        ("PULSAR_SERVICE_URL", "pulsar://b:6650", "no such setting: write DELAYLAKE_PULSAR__SERVICE_URL"),
        ("WAREHOUSE", "null", "warehouse = None: input should be a valid string"),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(f"DELAYLAKE_{name}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    [line] = caught.value.lines
    assert line.removeprefix(f"DELAYLAKE_{name}: ") == told


def test_null_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYLAKE_API__RATE_LIMIT", "null")
    monkeypatch.setenv("DELAYLAKE_PULSAR__TOKEN_FILE", "null")
    settings = load_settings()
    assert (settings.api.rate_limit, settings.pulsar.token_file) == (None, None)


def test_lists_and_mappings_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = "persistent://public/default/orders"
    monkeypatch.setenv("DELAYLAKE_API__ALLOWED_HOSTS", '["a.example"]')
    monkeypatch.setenv("DELAYLAKE_SPARK__CONF", '{"spark.driver.memory": "4g"}')
    monkeypatch.setenv("DELAYLAKE_ROUTES", f'[{{"source": "{topic}", "subscriptions": [{{"name": "a"}}]}}]')
    settings = load_settings()
    assert settings.api.allowed_hosts == ("a.example",)
    assert settings.spark.conf == {"spark.driver.memory": "4g"}
    assert [route.source for route in settings.routes] == [topic]


def test_what_kubernetes_sets_for_a_service_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "API_PORT": "tcp://10.0.0.1:8081",
        "API_SERVICE_HOST": "10.0.0.1",
        "API_SERVICE_PORT": "8081",
        "API_PORT_8081_TCP": "tcp://10.0.0.1:8081",
        "METRICS_PORT": "tcp://10.0.0.2:9000",
    }.items():
        monkeypatch.setenv(f"DELAYLAKE_{name}", value)
    load_settings()
