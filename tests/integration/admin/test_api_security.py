"""The API as it is served: over TLS, with tokens, and with the caller's role in what it sends."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any, cast

import httpx
import pulsar
import pytest
import yaml
from fastapi import FastAPI
from starlette.testclient import TestClient

from admin.app import create_app
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from tests.conftest import PROGRAM, Run
from tests.support.clients.tokens import SECRET, certificate, encoded, token
from tests.support.service.harness import wait_until
from tracker.wire.delaylake_pb2 import ControlCommand
from warehouse.delta.tables import Tables

ORDERS = "persistent://public/default/orders"
ACKNOWLEDGE = "/admin/v2/persistent/public/default/orders/acknowledgeMessage"


def content(folder: Path, **sections: Any) -> dict[str, Any]:
    roles = [{"role": "ops-*", "operations": ["skip"], "topics": ["persistent://public/default/*"]}]
    return {
        "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
        "warehouse": f"file:{folder}/warehouse",
        "auth": {"enabled": True, "token_secret_key": encoded(SECRET), "roles": roles},
        "routes": [{"source": ORDERS, "subscriptions": [{"name": "billing"}]}],
        **sections,
    }


def test_the_api_is_served_with_tls_and_tokens(delaylake: Run, tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    files = {"tls_certificate_file": str(tls.tls_certificate_file), "tls_key_file": str(tls.tls_key_file)}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(content(tmp_path, api={**files, "host": "0.0.0.0", "port": 0})))
    api = subprocess.Popen([str(PROGRAM), "--config", str(file), "api"], stdout=subprocess.PIPE, text=True)
    try:
        assert api.stdout is not None
        url = api.stdout.readline().strip()
        assert url.startswith("https://0.0.0.0:")
        trusted = ssl.create_default_context(cafile=tls.tls_certificate_file)
        with httpx.Client(base_url=url.replace("0.0.0.0", "127.0.0.1"), verify=trusted, trust_env=False) as http:
            assert http.get("/healthz").status_code == 200
            assert http.post(ACKNOWLEDGE).status_code == 401
            assert http.post(ACKNOWLEDGE, headers={"Authorization": f"Bearer {token('dev')}"}).status_code == 403
            assert http.post(ACKNOWLEDGE, headers={"Authorization": f"Bearer {token('ops-1')}"}).status_code == 412
        with httpx.Client(trust_env=False) as http, pytest.raises(httpx.HTTPError):
            http.get(url.replace("https://0.0.0.0", "http://127.0.0.1") + "/healthz")
        client = tmp_path / "client.yaml"
        own_token = tmp_path / "token"
        pulsar_section = {"token_file": str(own_token), "trust_certs_file": files["tls_certificate_file"]}
        client.write_text(yaml.safe_dump({"pulsar": pulsar_section}))
        for role, code in (("dev", 403), ("ops-1", 503)):
            own_token.write_text(token(role))
            url = url.replace("0.0.0.0", "127.0.0.1")
            command = ["topics", "acknowledgeMessage", ORDERS, "-l", "1", "-e", "2", "--admin-url", url]
            assert f"error: {code}: " in delaylake("--config", str(client), *command).stderr
        api.terminate()
        assert api.wait(120) == 0
    finally:
        api.kill()
        api.communicate()
    kept = Tables(f"file:{tmp_path}/warehouse").query("refusals", "SELECT * FROM refusals ORDER BY code").to_pylist()
    assert sum(row["calls"] for row in kept) == 3
    assert {(row["code"], row["role"], row["address"]) for row in kept} == {
        (401, None, "127.0.0.1"),
        (403, "dev", "127.0.0.1"),
    }


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"auth": {}}, "0.0.0.0 can be reached from other machines: set auth.enabled, or serve on 127.0.0.1"),
        ({"auth": {"enabled": True, "token_secret_key": "c2hvcnQ="}}, "auth.token_secret_key has 5 bytes"),
        ({"api": {"tls_certificate_file": "a.pem", "tls_key_file": "b.pem"}}, "can't serve https with"),
    ],
)
def test_what_is_not_safe_is_not_served(
    delaylake: Run, tmp_path: Path, sections: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(content(tmp_path, **sections)))
    done = delaylake("--config", str(file), "api", "--host", "0.0.0.0", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {expected}")
    assert done.stderr.count("\n") == 1


def test_a_command_says_which_role_sent_it(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    settings = Settings.model_validate(
        content(
            tmp_path,
            pulsar={"service_url": broker.settings.service_url, "admin_url": broker.settings.admin_url},
            control={"topic": topic, "outcome_topic": f"{topic}_outcomes"},
            api={"answer_timeout_millis": 100},
        )
    )
    commands = pulsar_client.subscribe(topic, "test", initial_position=pulsar.InitialPosition.Earliest)
    with TestClient(create_app(settings)) as http:
        wait_until(lambda: cast("FastAPI", http.app).state.control.is_connected, 30, "the API's connection")
        headers = {"Authorization": f"Bearer {token('ops-1')}"}
        answer = http.post(ACKNOWLEDGE, params={"ledgerId": 1, "entryId": 2}, headers=headers)
        assert answer.status_code == 504  # no job runs
    assert ControlCommand.FromString(commands.receive(60_000).data()).issued_by == "ops-1"
