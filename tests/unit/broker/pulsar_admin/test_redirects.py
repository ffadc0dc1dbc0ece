"""A broker that does not own a topic names the one that does: the admin client asks that one, with its token."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import PulsarSettings

PATH = "/admin/v2/persistent/public/default/orders/partitions"


def client(tmp_path: Path, answers: dict[str, httpx.Response], asked: list[httpx.Request], url: str) -> AdminClient:
    (tmp_path / "token").write_text("secret")
    admin = AdminClient(PulsarSettings(admin_url=url, token_file=tmp_path / "token"))

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[f"{request.url.scheme}://{request.url.host}"]

    admin._admin._http._transport = httpx.MockTransport(answer)
    return admin


def to(url: str) -> httpx.Response:
    return httpx.Response(307, headers={"Location": url})


def test_the_owner_of_a_topic_is_asked_with_the_method_the_body_and_the_token(tmp_path: Path) -> None:
    asked: list[httpx.Request] = []
    answers = {"http://one": to(f"http://two:8080{PATH}?authoritative=true"), "http://two": httpx.Response(204)}
    with client(tmp_path, answers, asked, "http://one:8080") as admin:
        admin.create_partitioned_topic("persistent://public/default/orders", 4)
    first, second = asked
    assert str(second.url) == f"http://two:8080{PATH}?authoritative=true"
    assert [(r.method, r.content, r.headers["Authorization"]) for r in asked] == [("PUT", b"4", "Bearer secret")] * 2
    assert second.headers["Host"] == "two:8080" != first.headers["Host"]


@pytest.mark.parametrize("place", ["http://two:8080/", "ftp://two/"])
def test_a_token_is_not_sent_in_the_clear_where_it_was_not_before(tmp_path: Path, place: str) -> None:
    asked: list[httpx.Request] = []
    with (
        client(tmp_path, {"https://one": to(place)}, asked, "https://one:8443") as admin,
        pytest.raises(PulsarError, match="the token is not sent there"),
    ):
        admin.partitions("persistent://public/default/orders")
    assert len(asked) == 1


def test_brokers_that_name_each_other_are_an_error(tmp_path: Path) -> None:
    asked: list[httpx.Request] = []
    answers = {"http://one": to("http://two:8080/"), "http://two": to("http://one:8080/")}
    with client(tmp_path, answers, asked, "http://one:8080") as admin, pytest.raises(PulsarError, match="307"):
        admin.partitions("persistent://public/default/orders")
    assert len(asked) == 6
