"""The settings are checked once, at the start, and what is wrong is said in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from conf.errors import DelayLakeError
from conf.settings import (
    DEFAULT_SETTINGS_FILE,
    Settings,
    SettingsError,
    SubscriptionType,
    load_settings,
    local_path,
    settings_from_json,
)

pytestmark = pytest.mark.usefixtures("clean_environment")

ORDERS = "persistent://public/default/orders"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "settings.yaml"
        file.write_text(text)
        return file

    return write


def message(file: Path | None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_default_file_names_every_setting_with_its_default() -> None:
    assert load_settings().model_dump(exclude={"routes"}) == Settings().model_dump(exclude={"routes"})
    text = DEFAULT_SETTINGS_FILE.read_text()
    for section, model in Settings.model_fields.items():
        assert f"\n{section}:" in text
        for name in getattr(model.annotation, "model_fields", {}):
            assert f"\n  {name}:" in text


def test_the_jars_of_delta_are_those_of_the_locked_package() -> None:
    pom = (DEFAULT_SETTINGS_FILE.parent / "spark/pom.xml").read_text()
    [found] = re.findall(r"<artifactId>delta-spark_[^<]*</artifactId>\s*<version>([^<]*)</version>", pom)
    assert found == version("delta-spark")


def test_an_unknown_setting_is_named(write: Callable[[str], Path]) -> None:
    file = write("tracker: {shrads: 4}")
    assert message(file) == f"{file}:1: tracker.shrads = 4: no such setting"


def test_a_setting_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "tracker: {shards: 2, shards: 3}\n"
        "routes:\n- {source: persistent://a/b/c, subscriptions: [{name: x, name: y}]}\n"
        "tracker: {shards: 4}\n"
    )
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert caught.value.lines == [
        f"{file}:1: tracker.shards is there twice, first in line 1",
        f"{file}:3: routes.0.subscriptions.0.name is there twice, first in line 3",
        f"{file}:4: tracker is there twice, first in line 1",
    ]


def test_all_that_is_wrong_is_said_at_once_with_its_line(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(f"""
tracker:
  shards: many
  shrads: 4
routes:
- source: {ORDERS}
  subscriptions:
  - {{name: a}}
  - name: b
    type: Bogus
- subscriptions: [{{name: a}}]
release: {{lookahead_millis: 500}}
""")
    monkeypatch.setenv("DELAYLAKE_API__PORT", "none")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert {tuple(line.split(": ")[:2]) for line in caught.value.lines} == {
        ("DELAYLAKE_API__PORT", "api.port = 'none'"),
        (f"{file}:3", "tracker.shards = 'many'"),
        (f"{file}:4", "tracker.shrads = 4"),
        (f"{file}:10", "routes.0.subscriptions.1.type = 'Bogus'"),
        (f"{file}:11", "routes.1.source"),
        (f"{file}:12", "release"),
    }


def test_an_unknown_section_is_named(write: Callable[[str], Path]) -> None:
    assert "trakcer" in message(write("trakcer: {shards: 4}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tracker: {shards: many}", "tracker.shards = 'many': "),
        ("tracker: {shards: 0}", "tracker.shards = 0: must be a number from 1 to 1024, or auto"),
        ("tracker: {shards: yes}", "tracker.shards = True: must be a number"),
        ("warehouse: ''", "warehouse = ''"),
        ("{warehouse: x, checkpoint: 'file:./x'}", "warehouse and checkpoint must be different folders"),
        (f"control: {{topic: '{ORDERS}', outcome_topic: '{ORDERS}'}}", "control: topic and outcome_topic must differ"),
        (
            f"{{control: {{topic: '{ORDERS}'}}, routes: [{{source: '{ORDERS}', subscriptions: [{{name: a}}]}}]}}",
            "control.topic must not be the source of a route",
        ),
        (f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: 'a,b'}}]}}]", "must be a name without blanks"),
        ("pulsar: {service_url: localhost}", "pulsar.service_url = 'localhost': "),
        ("checkpoint: s3a://bucket/x", "checkpoint = 's3a://bucket/x': must be a folder, file:... or a path, that all"),
        ("control: {topic: orders}", "control.topic = 'orders': must be a topic's full name: persistent://"),
        ("release: {lookahead_millis: 500}", "release: min_lookahead_millis must not be above lookahead_millis"),
        ("routes: [{source: orders, subscriptions: [{name: a}]}]", "routes.0.source = 'orders': must be"),
        (f"routes: [{{source: '{ORDERS}', subscriptions: []}}]", "routes.0.subscriptions"),
        (f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a}}, {{name: a}}]}}]", "names must differ"),
        (f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a, type: Bogus}}]}}]", "'Bogus': "),
        ("api: {rate_limit: lots}", "api.rate_limit = 'lots': "),
        ("api: {rate_limit: 0/second}", "api.rate_limit = '0/second': "),
        ("api: {tls_key_file: key.pem}", "api: tls_certificate_file and tls_key_file go together"),
        ("auth: {enabled: true}", "auth: enabled needs either token_secret_key or token_public_key"),
        ("auth: {enabled: true, token_secret_key: a, token_public_key: b}", "auth: enabled needs either"),
        ("auth: {token_public_alg: HS256}", "auth.token_public_alg = 'HS256': "),
        ("auth: {token_public_alg: none}", "auth.token_public_alg = 'none': "),
        ("auth: {token_audience: pulsar}", "auth: token_audience_claim and token_audience go together"),
        ("auth: {roles: [{role: a, operations: [write], topics: ['*']}]}", "auth.roles.0.operations.0 = 'write': "),
        ("auth: {roles: [{role: a, operations: [skip], topics: [orders]}]}", "auth.roles.0.topics.0 = 'orders': "),
        ("auth: {roles: [{role: a, operations: [], topics: ['*']}]}", "auth.roles.0.operations"),
        ("warehouse: ~/warehouse", "warehouse = '~/warehouse': must be a path, as /folder or file:./folder; neither ~"),
        ("warehouse: file://./warehouse", "warehouse = 'file://./warehouse': must be a path"),
        ("warehouse: s3://", "warehouse = 's3://': must have a bucket"),
        ("checkpoint: ''", "checkpoint = '': must be a path"),
        ("checkpoint: ' '", "checkpoint = ' ': must be a path"),
        ("tracker: {tick_time_millis: 9000000000000000000}", "less than or equal to 1000000000000000"),
        ("retention: {entries_millis: 9000000000000000000}", "less than or equal to 1000000000000000"),
        ("spark: {conf: {spark.x: null}}", ":1: spark.conf: spark.x must be a text, a number, true or false"),
        ("spark: {conf: {spark: {driver: {memory: 4g}}}}", ":1: spark.conf: spark must be a text, a number"),
        ("api: {allowed_hosts: x}", "api.allowed_hosts = 'x': must be a list: [...]"),
        ("tracker:", "tracker = None: must be a mapping: {name: value}"),
        (f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a, rate: 5}}]}}]", "rate = 5: must be a mapping"),
        (
            f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a, rate: {{messages_per_second: yes}}}}]}}]",
            "messages_per_second = True: must be a number",
        ),
        (
            f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a, rate: "
            "{messages_per_second: 5, burst: yes}}]}]",
            "burst = True: must be a number",
        ),
        (f'routes: [{{source: "{ORDERS}\\n", subscriptions: [{{name: a}}]}}]', "must be a topic's full name"),
        (f'routes: [{{source: "{ORDERS}\\0", subscriptions: [{{name: a}}]}}]', "must be a topic's full name"),
        (f'routes: [{{source: "{ORDERS}", subscriptions: [{{name: "a\\0"}}]}}]', "must be a name without blanks"),
        (
            f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: a}}]}}, "
            f"{{source: '{ORDERS}-partition-3', subscriptions: [{{name: b}}]}}]",
            f"the source {ORDERS}-partition-3 is a partition of another route's: it would be read twice",
        ),
    ],
)
def test_a_wrong_value_is_said_with_its_name_and_what_is_allowed(
    write: Callable[[str], Path], text: str, expected: str
) -> None:
    assert expected in message(write(text))


def routes_of(*pairs: tuple[str, str]) -> str:
    """Routes from topics to others, by their short names."""
    topic = "persistent://public/default/"
    sources = dict.fromkeys(source for source, _ in pairs)
    routes = [
        f"{{source: '{topic}{source}', subscriptions: ["
        + ", ".join(f"{{name: s{n}, destination: '{topic}{to}'}}" for n, (of, to) in enumerate(pairs) if of == source)
        + "]}"
        for source in sources
    ]
    return f"routes: [{', '.join(routes)}]"


@pytest.mark.parametrize(
    ("routes", "circle"),
    [
        ([("a", "b"), ("b", "a")], ["a", "b", "a"]),
        ([("x", "a"), ("a", "b"), ("b", "c"), ("c", "a")], ["a", "b", "c", "a"]),
        ([("a", "d"), ("a", "b"), ("b", "d"), ("b", "a")], ["a", "b", "a"]),
        ([("a", "a-partition-0")], ["a", "a"]),
        ([("a", "b-partition-1"), ("b", "a-partition-0")], ["a", "b", "a"]),
        ([("a", "b"), ("a-rejects", "a")], ["a", "a-rejects", "a"]),
        ([("a", "b"), ("b-dlq", "a")], ["a", "b-dlq", "a"]),
        (
            [("a", "b"), ("b-dlq", "c"), ("c", "d"), ("c-rejects", "a")],
            ["a", "b-dlq", "c", "c-rejects", "a"],
        ),
    ],
)
def test_a_circle_of_routes_is_named_in_a_line(
    write: Callable[[str], Path], routes: list[tuple[str, str]], circle: list[str]
) -> None:
    said = message(write(routes_of(*routes)))
    path = " -> ".join(f"persistent://public/default/{topic}" for topic in circle)
    assert said.endswith(f"routes go round in a circle, for ever: {path}")
    assert "\n" not in said


def test_routes_that_meet_again_but_go_round_nowhere_are_taken(write: Callable[[str], Path]) -> None:
    pairs = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "e"), ("a-rejects", "f"), ("e-dlq", "f")]
    assert len(load_settings(write(routes_of(*pairs))).routes) == 6


@pytest.mark.parametrize(
    ("routes", "what"),
    [
        ([("a", "delaylake-control")], "delaylake-control, which is control.topic"),
        ([("a", "delaylake-outcomes")], "delaylake-outcomes, which is control.outcome_topic"),
        ([("a", "delaylake-control-partition-0")], "delaylake-control, which is control.topic"),
    ],
)
def test_a_destination_that_is_a_topic_of_the_service_is_refused(
    write: Callable[[str], Path], routes: list[tuple[str, str]], what: str
) -> None:
    said = message(write(routes_of(*routes)))
    assert said.endswith(f"the route of persistent://public/default/a writes persistent://public/default/{what}")


def test_the_rejects_of_a_route_are_no_commands(write: Callable[[str], Path]) -> None:
    control = "control: {topic: 'persistent://public/default/a-rejects'}"
    assert "a-rejects, which is control.topic" in message(write(f"{control}\n{routes_of(('a', 'b'))}"))


def test_a_file_that_is_missing_or_no_yaml_is_said(write: Callable[[str], Path], tmp_path: Path) -> None:
    assert str(tmp_path / "nope.yaml") in message(tmp_path / "nope.yaml")
    assert "settings.yaml" in message(write("tracker: [unclosed"))


def test_the_environment_comes_before_the_file(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("tracker: {shards: 4, max_num_buckets: 7}")
    monkeypatch.setenv("DELAYLAKE_TRACKER__SHARDS", "8")
    settings = load_settings(file)
    assert (settings.tracker.shards, settings.tracker.max_num_buckets) == (8, 7)


def test_a_wrong_value_from_the_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYLAKE_TRACKER__SHARDS", "none")
    assert "tracker.shards = 'none'" in message(None)


@pytest.mark.parametrize("name", ["TRAKER__SHARDS", "TRACKER__SHRADS", "WAREHOUSE__X", "__SHARDS"])
def test_a_variable_of_an_unknown_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"DELAYLAKE_{name}", "4")
    setting = name.lower().replace("__", ".")
    assert message(None) == f"DELAYLAKE_{name}: {setting} = '4': no such setting"


def test_unknown_variables_are_named_with_all_else_that_is_wrong(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("tracker: {shards: many}")
    monkeypatch.setenv("DELAYLAKE_TRAKER__SHARDS", "4")
    monkeypatch.setenv("DELAYLAKE_OUTH__TOKEN_SECRET_KEY", "hunter2")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert [line.split(": ")[0] for line in caught.value.lines] == [
        "DELAYLAKE_OUTH__TOKEN_SECRET_KEY", "DELAYLAKE_TRAKER__SHARDS", f"{file}:1"
    ]  # fmt: skip
    assert "hunter2" not in str(caught.value)


def test_variables_without_a_section_may_be_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "IMPORT_URL", "API_SERVICE_HOST"):
        monkeypatch.setenv(f"DELAYLAKE_{name}", "4")
    load_settings()


def test_the_working_folders_file_comes_before_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings().tracker.shards == 2
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/delaylake.yaml").write_text("tracker: {shards: 7}")
    assert load_settings().tracker.shards == 7
    assert load_settings().file == tmp_path / "conf/delaylake.yaml"
    monkeypatch.setenv("DELAYLAKE_CONFIG", str(DEFAULT_SETTINGS_FILE))
    assert load_settings().tracker.shards == 2
    assert load_settings().file == DEFAULT_SETTINGS_FILE
    assert Settings().file is None


def test_the_key_reader_is_another_name_of_the_private_key(write: Callable[[str], Path]) -> None:
    settings = load_settings(
        write("pulsar: {crypto_private_key_file: null, crypto_key_reader: {private_key_file: a.pem}}")
    )
    assert settings.pulsar.crypto_private_key_file == Path("a.pem")
    assert load_settings(write("pulsar: {crypto_key_reader: null}")).pulsar.crypto_private_key_file is None
    for reader in ("a.pem", "{}", "{private_key_file: a.pem, public_key_file: b.pem}"):
        assert "crypto_key_reader has private_key_file" in message(write(f"pulsar: {{crypto_key_reader: {reader}}}"))
    both = "pulsar: {crypto_private_key_file: b.pem, crypto_key_reader: {private_key_file: a.pem}}"
    assert "name one" in message(write(both))


def test_delaylake_config_names_the_file(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYLAKE_CONFIG", str(write("tracker: {shards: 3}")))
    assert load_settings().tracker.shards == 3


def test_a_subscription_without_a_destination_gets_one_named_after_it(write: Callable[[str], Path]) -> None:
    route = load_settings(
        write(f"routes: [{{source: '{ORDERS}', subscriptions: [{{name: audit, type: Exclusive}}]}}]")
    ).routes[0]
    assert route.subscriptions[0].destination == f"{ORDERS}-audit"
    assert route.subscriptions[0].type is SubscriptionType.EXCLUSIVE
    assert route.rejects_topic == f"{ORDERS}-rejects"


def test_a_settings_error_is_one_of_the_errors_that_users_see() -> None:
    assert issubclass(SettingsError, DelayLakeError)


def test_a_file_uri_is_a_local_path_and_any_other_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("file:./warehouse") == str(tmp_path / "warehouse")
    assert local_path("file:///data/x") == "/data/x"
    assert local_path("s3a://bucket/x") == "s3a://bucket/x"


def test_a_secret_is_in_no_error_and_not_in_what_the_job_hands_on(write: Callable[[str], Path]) -> None:
    assert message(write("auth: {token_secret_key: [hunter2]}")).endswith(
        "auth.token_secret_key: input should be a valid string"
    )
    assert "hunter2" not in message(write("auth: {token_secret_key: hunter2, enabled: maybe}"))
    settings = load_settings(write("auth: {token_secret_key: hunter2}"))
    assert settings.auth.token_secret_key is not None
    assert settings.auth.token_secret_key.get_secret_value() == "hunter2"
    assert "hunter2" not in settings.model_dump_json() + repr(settings)
    assert Settings.model_validate_json(settings.model_dump_json()).routes == settings.routes


def test_settings_as_text_are_checked_once_for_all_tasks_of_a_process() -> None:
    one, other = (Settings(warehouse=folder) for folder in ("/tables", "/others"))
    first = settings_from_json(one.model_dump_json())
    assert first == one
    assert settings_from_json(one.model_dump_json()) is first
    assert settings_from_json(other.model_dump_json()) == other
