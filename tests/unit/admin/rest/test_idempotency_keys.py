"""Whose an idempotency key is: with authentication the role's and the topic's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from delaylake.control import ControlRequest
from delaylake.message_ids import MessageId, Outcome
from starlette.testclient import TestClient

from admin.app import create_app
from conf.settings import Settings
from tests.support.clients.tokens import SECRET, encoded, token

pytestmark = pytest.mark.slow

TOPICS = ("persistent://public/default/orders", "persistent://public/default/bills")


class FakeControl:
    """Notes request ids, and answers each command as done."""

    is_connected = True

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def partitions(self, topic: str) -> list[str] | None:
        """Returns None: the broker does not answer."""
        return None

    async def send(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> list[Outcome]:
        self.request_ids += [request.request_id for request in requests]
        return [Outcome("a", MessageId(1, 2), "APPLIED", "", True)]


def request_ids(folder: Path, auth: dict[str, Any], *calls: tuple[str, str]) -> list[str]:
    """Returns the request ids of the calls of roles for topics under the key `mine`."""
    settings = Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}",
            "auth": auth,
            "routes": [{"source": topic, "subscriptions": [{"name": "a"}]} for topic in TOPICS],
        }
    )
    app = create_app(settings)
    with TestClient(app, base_url="http://localhost") as client:
        app.state.control = control = FakeControl()
        for role, topic in calls:
            path = f"/admin/v2/{topic.replace('://', '/')}/acknowledgeMessage?ledgerId=1&entryId=2"
            headers = {"Idempotency-Key": "mine", "Authorization": f"Bearer {token(role)}"}
            assert client.post(path, headers=headers).status_code == 204
    return control.request_ids


def test_a_key_is_that_of_a_role_and_a_topic(tmp_path: Path) -> None:
    roles = [{"role": "*", "operations": ["admin"], "topics": ["*"]}]
    auth = {"enabled": True, "token_secret_key": encoded(SECRET), "roles": roles}
    orders, bills = TOPICS
    asked = [("shop", orders), ("shop", orders), ("bank", orders), ("shop", bills), ("shop", f"{orders}-partition-3")]
    first, again, other_role, other_topic, partition = request_ids(tmp_path, auth, *asked)
    assert first.startswith("mine~")
    assert first == again == partition
    assert len({first, other_role, other_topic}) == 3


def test_without_authentication_the_key_is_the_request_id(tmp_path: Path) -> None:
    assert request_ids(tmp_path, {}, ("shop", TOPICS[0])) == ["mine"]
