"""The route that schedules messages: its statuses, one by one and for an array, and whose keys are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from admin.app import create_app
from admin.control.async_client import ControlUnavailableError, NoOutcomeError
from admin.control.scheduling import MessageRefusedError, MessageTooLargeError, NewMessage, ScheduledMessage
from conf.settings import Settings
from tests.support.clients.tokens import SECRET, encoded, token

pytestmark = pytest.mark.slow

ORDERS, BILLS = "persistent://public/default/orders", "persistent://public/default/bills"
ERRORS = {
    "refused": (MessageRefusedError, 422),
    "large": (MessageTooLargeError, 413),
    "away": (ControlUnavailableError, 503),
    "silent": (NoOutcomeError, 504),
}


class FakeScheduler:
    """Notes messages; one whose payload names an error has that."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, NewMessage]] = []

    async def schedule(self, source: str, topic: str, message: NewMessage) -> ScheduledMessage:
        self.messages.append((source, topic, message))
        if message.payload.decode() in ERRORS:
            raise ERRORS[message.payload.decode()][0](f"why {message.payload.decode()}")
        return ScheduledMessage(f"7:{len(self.messages)}:-1:-1", message.deliver_at)


class Control:
    """The connection, of which only the partitions are asked for."""

    is_connected = True

    def partitions(self, topic: str) -> list[str]:
        return [f"{ORDERS}-partition-0", f"{ORDERS}-partition-1"] if topic == ORDERS else [topic]


class Api:
    def __init__(self, folder: Path, **auth: Any) -> None:
        settings = Settings.model_validate(
            {
                "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
                "warehouse": f"file:{folder}",
                "api": {"max_ids_per_call": 4},
                "auth": auth,
                "routes": [{"source": topic, "subscriptions": [{"name": "a"}]} for topic in (ORDERS, BILLS)],
            }
        )
        self.app = create_app(settings)

    def __enter__(self) -> Api:
        self.http = TestClient(self.app, base_url="http://localhost").__enter__()
        self.scheduler = self.app.state.scheduler = FakeScheduler()
        self.app.state.control = Control()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.__exit__()

    def post(self, content: Any, topic: str = ORDERS, role: str = "", key: str = "") -> Any:
        headers = ({"Authorization": f"Bearer {token(role)}"} if role else {}) | (
            {"Idempotency-Key": key} if key else {}
        )
        return self.http.post(f"/admin/v2/{topic.replace('://', '/')}/delayed", json=content, headers=headers)


def test_a_message_and_an_array_of_them(tmp_path: Path) -> None:
    with Api(tmp_path) as api:
        one = api.post({"payload": "x", "deliverAt": 5_000})
        assert (one.status_code, one.json()) == (201, {"messageId": "7:1:-1:-1", "deliverAt": 5_000})
        for payload, (_, status) in ERRORS.items():
            refused = api.post({"payload": payload})
            assert (refused.status_code, refused.json()) == (status, {"reason": f"why {payload}"})
        several = api.post(
            [{"payload": "x", "deliverAt": 1}, {"payload": "silent"}, 3, {"payload": "x", "deliverAt": 2}]
        )
        assert several.status_code == 200
        first, second, third, fourth = several.json()
        assert first | {"messageId": ""} == {"status": 201, "messageId": "", "deliverAt": 1}
        assert second == {"status": 504, "reason": "why silent"}
        assert third == {"status": 422, "reason": "a message is a JSON object"}
        assert fourth["deliverAt"] == 2
        assert api.post([{"payload": "x"}] * 5).status_code == 413
        wrong = (
            r'{"\ud800": 1}',
            r'{"payload": "", "properties": {"a\nb": 1}}',
            r'{"payload": "", "requestId": "\ud800"}',
        )
        odd = api.http.post(f"/admin/v2/{ORDERS.replace('://', '/')}/delayed", content=f"[{','.join(wrong)}]")
        assert [one["status"] for one in odd.json()] == [422] * 3
        assert not any("\n" in one["reason"] for one in odd.json())
        assert api.post([]).json() == []
        assert api.http.post(f"/admin/v2/{ORDERS.replace('://', '/')}/delayed", content="{").status_code == 400
        assert api.http.post("/admin/v2/non-persistent/public/default/orders/delayed", json={}).status_code == 405


def test_a_topic_without_a_route_or_without_the_partition_is_404(tmp_path: Path) -> None:
    with Api(tmp_path) as api:
        assert api.post({"payload": "x"}, "persistent://public/default/none").status_code == 404
        assert api.post({"payload": "x"}, f"{ORDERS}-partition-2").status_code == 404
        assert api.post({"payload": "x"}, f"{ORDERS}-partition-1").status_code == 201
        [(source, topic, _)] = api.scheduler.messages
        assert (source, topic) == (ORDERS, f"{ORDERS}-partition-1")


def test_a_key_is_that_of_a_role_and_a_topic_and_of_a_message_of_an_array(tmp_path: Path) -> None:
    roles = [{"role": "*", "operations": ["schedule"], "topics": ["*"]}]
    with Api(tmp_path, enabled=True, token_secret_key=encoded(SECRET), roles=roles) as api:
        message = {"payload": "x"}
        for content, topic, role in (
            (message, ORDERS, "shop"),
            (message, ORDERS, "shop"),
            (message, f"{ORDERS}-partition-1", "shop"),
            (message, BILLS, "shop"),
            (message, ORDERS, "bank"),
            ([message, message], ORDERS, "shop"),
        ):
            assert api.post(content, topic, role, "mine").status_code in (200, 201)
        ids = [message.request_id for _, _, message in api.scheduler.messages]
        first, again, partition, other_topic, other_role, one, two = ids
        assert first == again == partition
        assert len({first, other_topic, other_role, one, two}) == 5
        assert all(properties == {"requestId": chosen} for chosen, properties in _properties(api))
        assert (one, two) == (f"{first}.0", f"{first}.1")
        for wrong in ("two words", "x" * 129):
            assert api.post(message, ORDERS, "shop", wrong).status_code == 400


def _properties(api: Api) -> list[tuple[str, dict[str, str]]]:
    return [
        (message.request_id, {name: value for name, value in message.properties.items() if name == "requestId"})
        for _, _, message in api.scheduler.messages
    ]


def test_who_may_do_everything_else_may_not_schedule(tmp_path: Path) -> None:
    others = ["acknowledge", "skip", "cancel", "deliver", "read"]
    roles = [
        {"role": "ops", "operations": others, "topics": ["*"]},
        {"role": "shop", "operations": ["schedule"], "topics": [ORDERS]},
    ]
    with Api(tmp_path, enabled=True, token_secret_key=encoded(SECRET), roles=roles) as api:
        assert api.post({"payload": "x"}).status_code == 401
        assert api.post({"payload": "x"}, ORDERS, "ops").status_code == 403
        assert api.post({"payload": "x"}, BILLS, "shop").status_code == 403
        assert api.scheduler.messages == []
        assert api.post({"payload": "x"}, ORDERS, "shop").status_code == 201


@pytest.mark.parametrize(
    "named",
    [{"scheduleKey": "k"}, {"requestId": "r"}, {"properties": {"requestId": "r"}}],
    ids=["key", "id", "property"],
)
def test_who_may_schedule_on_a_partition_alone_names_nothing_for_which_the_whole_topic_counts(
    named: dict[str, Any], tmp_path: Path
) -> None:
    roles = [
        {"role": "part", "operations": ["schedule"], "topics": [f"{ORDERS}-partition-0"]},
        {"role": "whole", "operations": ["schedule"], "topics": [ORDERS]},
    ]
    topic, message = f"{ORDERS}-partition-0", {"payload": "x", "deliverAfter": "1h"}
    with Api(tmp_path, enabled=True, token_secret_key=encoded(SECRET), roles=roles) as api:
        assert api.post(message, topic, "part", "own").status_code == 201
        for content in (message | named, [message, message | named]):
            assert api.post(content, topic, "part").status_code == 403
        assert len(api.scheduler.messages) == 1
        assert api.post(message | named, topic, "whole").status_code == 201
