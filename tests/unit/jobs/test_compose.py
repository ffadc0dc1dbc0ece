"""The compose file fits the program and its own parts: files, commands, ports, names, metrics' address, secrets."""

from __future__ import annotations

import fnmatch
import json
import re
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_spec import PyCompose
from fastapi.testclient import TestClient
from httpx import HTTPStatusError

from admin.app import create_app
from admin.security.authentication import check_address
from conf.settings import Settings, load_settings, local_path
from jobs import cli

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "conf" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {name: service for name, service in SERVICES.items() if service["image"].startswith("delaylake:")}
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "conf/kubernetes/Dockerfile").read_text())


@pytest.fixture
def settings() -> Settings:
    return load_settings(FOLDER / "delaylake.yaml")


def mounts(service: str) -> dict[str, str]:
    """What a service has from outside, by path."""
    pairs = (volume.split(":")[:2] for volume in SERVICES[service].get("volumes", []))
    return {path: source for source, path in pairs}


def ports(service: str) -> dict[int, int]:
    """The service's ports that can be reached from this machine, and where."""
    found = {}
    for port in SERVICES[service].get("ports", []):
        host, outside, inside = port.split(":")
        assert host == "127.0.0.1", "it is for this machine"
        found[int(inside)] = int(outside)
    return found


def is_ignored(path: str) -> bool:
    """Whether .dockerignore leaves a file or folder out of the image's context: the last line that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if line and line[0] != "#" and any(fnmatch.fnmatchcase(head, pattern) for head in [*heads, parts[-1]]):
            ignored = not line.startswith("!")
    return ignored


def test_it_is_as_compose_s_specification_has_it() -> None:
    """Names of keys, durations, ports, volumes and secrets that are declared: what `docker compose config` checks."""

    def check(content: dict[str, Any]) -> None:
        PyCompose.from_json(json.dumps(content)).validate()

    check(COMPOSE)
    wrong: dict[str, Any] = {"heathcheck": {}, "restart": "sometimes", "secrets": ["none"], "stop_grace_period": "soon"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=r"heathcheck|unless-stopped|none|duration"):
            check(COMPOSE | {"services": SERVICES | {"job": SERVICES["job"] | {name: value}}})


def test_there_is_a_broker_a_job_an_api_prometheus_and_grafana() -> None:
    assert set(SERVICES) == {"broker", "job", "api", "prometheus", "grafana"}
    assert {name: service["image"] for name, service in PROGRAMS.items()} == dict.fromkeys(
        ("job", "api"), f"delaylake:{version('delaylake')}"
    )
    # Each of the others is of one version; the broker of the one that all else is tested with.
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]) for service in SERVICES.values())
    [pulsar] = re.findall(r"<pulsar.version>(.*)<", (ROOT / "conf/broker/pom.xml").read_text())
    assert SERVICES["broker"]["image"] == f"apachepulsar/pulsar:{pulsar}"


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_is_given_is_there(service: str) -> None:
    for path, source in mounts(service).items():
        assert PurePosixPath(path).is_absolute()
        assert (FOLDER / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    assert set(SERVICES[service].get("secrets", [])) <= set(COMPOSE["secrets"])
    assert set(SERVICES[service].get("depends_on", [])) <= set(SERVICES)


def test_the_key_is_made_as_the_docs_say_and_is_in_neither_repository_nor_image() -> None:
    key = (FOLDER / COMPOSE["secrets"]["api_key"]["file"]).relative_to(ROOT).as_posix()
    docs = (ROOT / "docs/deployment.md").read_text()
    assert f"> {key}\n" in docs
    assert "bin/pulsar tokens create --secret-key file:///run/secrets/api_key" in docs
    assert key in (ROOT / ".gitignore").read_text().splitlines()
    assert is_ignored(key)


def test_the_image_is_built_of_what_docker_is_given() -> None:
    for service in PROGRAMS.values():
        context = (FOLDER / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
    sources = [line.split()[:-1] for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)]
    paths = {path for line in sources for path in line if not path.startswith("--")}
    assert len(paths) > 10
    assert all((ROOT / path).exists() for path in paths)
    assert {path for path in paths if is_ignored(path)} == set()
    assert all(map(is_ignored, [".venv", ".git", ".delaylake", "tests", "conf/__pycache__"]))


@pytest.mark.parametrize("service", PROGRAMS)
def test_the_program_is_started_on_the_settings(service: str, capsys: Any, monkeypatch: Any) -> None:
    program, *arguments = PROGRAMS[service]["command"]
    monkeypatch.setattr("sys.argv", [program, *arguments, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert f"Usage: {program} {arguments[0]}" in capsys.readouterr().out
    file = PROGRAMS[service]["environment"]["DELAYLAKE_CONFIG"]
    assert mounts(service)[file] == "./delaylake.yaml"


def test_what_asks_whether_job_and_api_are_well_asks_what_there_is(
    settings: Settings, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    kind, program, *arguments = PROGRAMS["job"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "delaylake")
    monkeypatch.setattr("sys.argv", [program, *arguments, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, f"Usage: {program} {arguments[0]}" in capsys.readouterr().out) == (0, True)

    kind, program, option, code = PROGRAMS["api"]["healthcheck"]["test"]
    assert (kind, program, option) == ("CMD", "python", "-c")
    [url] = re.findall(r"http://[^']+", code)
    assert urlsplit(url).port == settings.api.port
    auth = {**settings.auth.model_dump(), "token_secret_key": "data:;base64," + "a" * 44}
    made = Settings(warehouse=str(tmp_path), checkpoint=f"{tmp_path}/checkpoint", auth=auth, api=settings.api)  # type: ignore[arg-type]
    with TestClient(create_app(made), base_url=url) as client:
        monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: client.get(url).raise_for_status())
        exec(code, {})
        with pytest.raises(HTTPStatusError):
            exec(code.replace("/healthz", "/nothing"), {})


def test_the_settings_name_what_the_services_have(settings: Settings) -> None:
    check_address(settings.api.host, settings.auth)
    assert ports("api") == {settings.api.port: settings.api.port}
    for name in PROGRAMS:
        for uri in (settings.warehouse, settings.checkpoint):
            volume = str(PurePosixPath(local_path(uri)).parent)
            assert mounts(name)[volume] == "data"
            assert re.search(rf"install -d -o delaylake .*{volume}\b", DOCKERFILE), "a new volume is the user's"
    assert settings.auth.token_secret_key is not None
    [secret] = SERVICES["api"]["secrets"]
    assert settings.auth.token_secret_key.get_secret_value() == f"file:///run/secrets/{secret}"
    urls = (settings.pulsar.service_url, settings.pulsar.admin_url)
    assert [urlsplit(url).netloc for url in urls] == ["broker:6650", "broker:8080"]


def test_the_broker_is_set_as_the_embedded_one_and_sends_clients_to_its_name() -> None:
    embedded = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "conf/broker/standalone.conf").read_text(), re.MULTILINE))
    given = {k.removeprefix("PULSAR_PREFIX_"): v for k, v in SERVICES["broker"]["environment"].items()}
    assert given.items() <= embedded.items()
    assert {"brokerDeduplicationEnabled", "brokerEntryMetadataInterceptors"} == set(given)
    assert SERVICES["broker"]["command"][-1].endswith("--advertised-address broker")


def test_prometheus_asks_the_api_where_it_answers_without_a_token(settings: Settings, tmp_path: Path) -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    [scraped] = prometheus["scrape_configs"]
    [[target]] = [static["targets"] for static in scraped["static_configs"]]
    assert target == f"api:{settings.api.port}"
    assert prometheus["rule_files"] == [path for path, source in mounts("prometheus").items() if "alerts" in source]
    auth = {**settings.auth.model_dump(), "token_secret_key": "data:;base64," + "a" * 44}
    made = Settings(warehouse=str(tmp_path), checkpoint=f"{tmp_path}/checkpoint", auth=auth, api=settings.api)  # type: ignore[arg-type]
    with TestClient(create_app(made), base_url=f"http://{target}") as client:
        answer = client.get(scraped["metrics_path"])
    assert (answer.status_code, "delaylake_job_up" in answer.text) == (200, True)


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    """That its panels, and the alerts, ask for metrics that there are, is in tests/unit/status/test_metrics.py."""
    [source] = yaml.safe_load((FOLDER / "grafana/datasources.yaml").read_text())["datasources"]
    address = urlsplit(source["url"])
    assert (source["type"], source["isDefault"], address.hostname) == ("prometheus", True, "prometheus")
    assert address.port in ports("prometheus")
    [provider] = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    [board] = [path for path in mounts("grafana") if path.endswith(".json")]
    assert provider["options"]["path"] == str(PurePosixPath(board).parent)
