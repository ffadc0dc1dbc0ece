"""Re-drives over HTTP; without a broker, so that nothing can be sent back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from admin.control import redrive
from admin.control.bulk import TooManyError
from tests.support.service.admin_api import ORDERS, served, settings_of

REDRIVE = f"{ORDERS}/dlq/redrive"
NAMED = {"subscription": "a"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = settings_of(tmp_path_factory.mktemp("warehouse"))
    nowhere = settings.pulsar.model_copy(update={"admin_url": "http://127.0.0.1:1"})
    with served(settings.model_copy(update={"pulsar": nowhere})) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"filter": {}}, 400, "body.filter.subscription: Field required"),
        ({"filter": NAMED, "dryrun": True}, 400, "body.dryrun"),
        ({"filter": NAMED | {"messageIds": ["x"]}}, 400, "no message id: 'x'"),
        ({"filter": NAMED, "max": 0}, 400, "body.max"),
        ({"filter": {"subscription": "nobody"}}, 404, "no such subscription: 'nobody'"),
        ({"filter": NAMED}, 503, "the dead letters can't be re-driven now"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, body: dict[str, Any], code: int, says: str) -> None:
    answer = client.post(REDRIVE, json=body)
    assert (answer.status_code, says in answer.json()["reason"]) == (code, True), answer.text


def test_a_request_id_has_no_spaces(client: httpx.Client) -> None:
    answer = client.post(REDRIVE, json={"filter": NAMED}, headers={"Idempotency-Key": "a b"})
    assert (answer.status_code, "Idempotency-Key" in answer.json()["reason"]) == (400, True)


@pytest.mark.slow
def test_its_answers_are_counts_or_codes(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(self: redrive.Redrive) -> dict[str, Any]:
        asked.append((self.issued_by, self.request_id, self.topic, self.wanted.reason, self.max_matched))
        if len(asked) == 1:
            return {"matched": 3}
        raise redrive.RedriveBusyError("another") if len(asked) == 2 else TooManyError("more")

    monkeypatch.setattr(redrive.Redrive, "run", run)
    body = {"filter": NAMED | {"reason": "no"}, "max": 5}
    answers = [client.post(REDRIVE, json=body, headers={"Idempotency-Key": "mine"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 409, 412]
    assert answers[0].json() == {"matched": 3}
    assert asked[0] == ("anonymous", "mine", "persistent://public/default/orders", "no", 5)
