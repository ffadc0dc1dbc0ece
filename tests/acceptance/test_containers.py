"""The image, and the containers of conf/compose, as docs/deployment.md starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.service.harness import wait_until

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).parents[2]
TOPIC = "persistent://public/default/orders"
BUILD_SECONDS, START_SECONDS = 3_600, 600


def container_tool() -> str:
    """Returns Docker's or Podman's command; skips the test where neither works."""
    for tool in ("docker", "podman"):
        if shutil.which(tool) and all(
            subprocess.run([tool, *words], capture_output=True, timeout=60).returncode == 0
            for words in (["info"], ["compose", "version"])
        ):
            return tool
    pytest.skip("no containers here: neither docker nor podman is there with compose, and answers")


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A command of compose, with the containers running."""
    tool = container_tool()
    key, own = tmp_path / "api.key", tmp_path / "key.yaml"
    key.write_bytes(os.urandom(32))
    own.write_text(yaml.safe_dump({"secrets": {"api_key": {"file": str(key)}}}))
    files = ["-f", str(ROOT / "conf/compose/compose.yaml"), "-f", str(own)]

    def run(*words: str, seconds: float = START_SECONDS) -> str:
        done = subprocess.run(
            [tool, "compose", "-p", "delaylake-test", *files, *words], capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    try:
        run("build", seconds=BUILD_SECONDS)
        run("up", "--detach")
        yield run
    finally:
        run("down", "--volumes")


def answer(url: str, **parameters: str) -> httpx.Response | None:
    try:
        return httpx.get(url, params=parameters, timeout=10)
    except httpx.TransportError:
        return None


def test_the_containers_deliver_a_message_and_show_it(compose: Callable[..., str]) -> None:
    def is_ready() -> bool:
        found = answer("http://127.0.0.1:8081/metrics")
        return found is not None and "delaylake_job_up 1.0" in found.text

    def delivered() -> float:
        query = 'sum(delaylake_delivered_messages_total{job="delaylake"})'
        found = answer("http://127.0.0.1:9090/api/v1/query", query=query)
        values = found.json()["data"]["result"] if found is not None and found.status_code == 200 else []
        return float(values[0]["value"][1]) if values else 0

    wait_until(is_ready, START_SECONDS, "the API, and a job that reads")
    compose("exec", "-T", "job", "delaylake", "produce", TOPIC, "-m", "hello", "--deliver-after", "5s")
    wait_until(lambda: delivered() == 2, START_SECONDS, "the message, for each subscription, in Prometheus")
    found = answer("http://127.0.0.1:3000/api/dashboards/uid/delaylake")
    assert found is not None
    assert found.json()["dashboard"]["title"] == "delaylake"
    secret = "file:///run/secrets/api_key"
    token = compose(
        "exec", "-T", "broker", "bin/pulsar", "tokens", "create", "--secret-key", secret, "--subject", "admin"
    )
    listing = httpx.get(
        f"http://127.0.0.1:8081/admin/v2/{TOPIC.replace('://', '/')}/delayed",
        headers={"Authorization": f"Bearer {token.strip().splitlines()[-1]}"},
    )
    assert (listing.status_code, listing.json()["messages"]) == (200, [])
    compose("exec", "-T", "job", "delaylake", "audit")
