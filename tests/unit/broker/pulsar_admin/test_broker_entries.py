"""What the broker's admin API is taken to say of an entry, when it answers, when it does not, and when it is away."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from broker.client import PulsarError
from broker.entries.continuity import Gap
from broker.position import Position, SourceTopic
from broker.pulsar_admin import admin_rest
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from conf.settings import PulsarSettings
from tests.support.service.harness import now
from warehouse.unseen_entries import UNREADABLE, find_not_seen

TOPIC = "persistent://public/default/t"
SOURCE = SourceTopic(TOPIC, TOPIC, -1)
STATS = {
    "ledgers": [{"ledgerId": 5, "entries": 0}],
    "currentLedgerEntries": 9,
    "cursors": {"s": {"markDeletePosition": "5:-1", "readPosition": "5:9"}},
    "lastConfirmedEntry": "5:8",
}

Answer = Callable[[httpx.Request], httpx.Response]


def admin(answer: Answer, stats: int = 200) -> AdminClient:
    """A broker whose topic has the entries 5:0 to 5:8, and answers for them as told."""

    def all_answers(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("internalStats"):
            return httpx.Response(stats, json=STATS)
        return answer(request)

    made = AdminClient(PulsarSettings())
    made._admin._http = httpx.Client(transport=httpx.MockTransport(all_answers), base_url="http://broker/admin/v2/")
    return made


def never(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("timed out", request=request)


def failed(request: httpx.Request) -> httpx.Response:
    return httpx.Response(500, text="Response Header Fields Too Large")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_rest, "_AGAIN_SECONDS", 0.0)


@pytest.mark.parametrize("answer", [never, failed])
def test_that_it_is_told_nothing_is_certain_only_where_the_broker_answers_and_has_the_entry(answer: Answer) -> None:
    with pytest.raises(UnreadableEntryError):
        admin(answer).entry(TOPIC, 5, 8)
    assert admin(answer).entry(TOPIC, 5, 9) is None
    assert admin(answer).entry(TOPIC, 4, 0) is None
    with pytest.raises(PulsarError) as error:
        admin(answer, 503).entry(TOPIC, 5, 8)
    assert not isinstance(error.value, UnreadableEntryError)


def test_what_fails_once_is_asked_again() -> None:
    answers = [httpx.Response(500), httpx.Response(200, content=b"x")]
    found = admin(lambda _: answers.pop(0)).entry(TOPIC, 5, 0)
    assert found is not None
    assert found[1] == b"x"


def test_an_entry_that_the_broker_has_and_does_not_tell_of_is_not_gone() -> None:
    silent = admin(failed)
    with pytest.raises(UnreadableEntryError):
        silent.entry_metadata(TOPIC, 5, 1)
    assert silent.entry_metadata(TOPIC, 5, 9) is None
    found = find_not_seen(silent, SOURCE, Gap(Position(5, 0), Position(5, 2)), lambda _: None)
    assert [UNREADABLE in reason for reason in found.rows["reason"].to_pylist()] == [True]


def test_what_is_put_aside_lacks_its_bytes_where_the_broker_does_not_tell_them() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return never(request)
        return httpx.Response(200, headers={"X-Pulsar-publish-time": "2026-11-22T12:00:00Z"})

    found = find_not_seen(admin(answer), SOURCE, Gap(Position(5, 0), Position(5, 2)), lambda _: None)
    assert found.rows["payload"].to_pylist() == [None]


@pytest.mark.parametrize("time", ["+10000-01-01T00:00:00Z", "-0001-01-01T00:00:00Z", "1969-01-01T00:00:00Z", ""])
def test_a_publish_time_that_is_no_time_is_not_known_and_its_row_is_of_now(time: str) -> None:
    odd = admin(lambda _: httpx.Response(200, headers={"X-Pulsar-publish-time": time}))
    entry = odd.entry_metadata(TOPIC, 5, 1)
    assert entry is not None
    assert entry.publish_time is None
    found = find_not_seen(odd, SOURCE, Gap(Position(5, 0), Position(5, 2)), lambda _: None)
    assert found.rows["publish_time"].to_pylist() == [pytest.approx(now(), abs=60_000)]
