"""The service in memory, as an application's tests use it."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from delaylake import AsyncClient, Client, Invalid, NotAllowed, NotFound, TooLate
from delaylake.testing import AsyncFakeClient, Backoff, FakeClient

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def orders(**options: object) -> FakeClient:
    """A service with a topic of two subscriptions, at noon."""
    types = {"orders": {"billing": "Shared", "audit": "Exclusive"}}
    return FakeClient(types, now=NOON, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("real", "fake"), [(Client, FakeClient), (AsyncClient, AsyncFakeClient)])
def test_it_has_all_methods_of_the_client(real: type, fake: type) -> None:
    methods = [name for name, _ in inspect.getmembers(real, inspect.isfunction) if not name.startswith("_")]
    assert {"schedule", "cancel", "pending", "retry", "redrive", "close"} <= set(methods)
    for name in methods:
        ours, theirs = inspect.signature(getattr(fake, name)), inspect.signature(getattr(real, name))
        assert [*ours.parameters.values()] == [*theirs.parameters.values()], name


def test_what_is_due_is_delivered_in_order_and_never_early() -> None:
    lake = orders()
    late = lake.schedule("orders", "late", after=2 * MINUTE, properties={"a": "b"}, key="k", ordering_key="o")
    soon = lake.schedule("orders", b"soon", at=NOON + MINUTE)
    assert lake.advance(MINUTE - timedelta(milliseconds=1)) == []
    first = lake.advance(timedelta(milliseconds=1))
    assert [(d.subscription, d.id, d.payload) for d in first] == [("audit", soon, b"soon"), ("billing", soon, b"soon")]
    audit, billing = lake.advance_to(NOON + timedelta(hours=1))
    assert lake.now == NOON + timedelta(hours=1)
    assert (audit.deliver_at, audit.delivered_at) == (NOON + 2 * MINUTE, NOON + 2 * MINUTE)
    assert (billing.key, billing.ordering_key) == ("k", "o")
    assert (
        billing.properties.items()
        >= {
            "a": "b",
            "delaylake.source": "persistent://public/default/orders",
            "delaylake.messageId": str(late),
        }.items()
    )
    assert lake.deliveries == [*first, audit, billing]
    with pytest.raises(ValueError, match="does not go back"):
        lake.advance(-MINUTE)


def test_what_waits_can_be_changed_until_it_is_dispatched() -> None:
    lake = orders(lookahead=timedelta(seconds=10))
    message = lake.schedule("orders", b"x", after=MINUTE)
    with pytest.raises(NotAllowed, match="cumulatively"):
        lake.skip("orders", message, subscription="audit")
    [outcome] = lake.cancel("orders", message, subscription="audit", request_id="r")
    assert (outcome.subscription, outcome.result, outcome.message) == ("audit", "APPLIED", message)
    assert lake.cancel("orders", message, subscription="audit", request_id="r") == [outcome]
    with pytest.raises(Invalid, match="request id"):
        lake.restore("orders", message, request_id="r")
    [again] = lake.cancel("orders", message, subscription="audit")
    assert again.result == "ALREADY_APPLIED"
    assert lake.get("orders", message).cancelled_for == ("audit",)
    lake.restore("orders", message, subscription="audit")
    lake.postpone("orders", message, by=MINUTE, subscription="audit")
    lake.reschedule("orders", message, after=3 * MINUTE, subscription="billing")
    assert [m.deliver_at for m in lake.pending("orders")] == [NOON + 2 * MINUTE, NOON + 3 * MINUTE]
    lake.advance(2 * MINUTE - timedelta(seconds=10))
    with pytest.raises(TooLate, match="released"):
        lake.cancel("orders", message, subscription="audit")
    lake.deliver_now("orders", message, subscription="billing")
    assert [d.subscription for d in lake.advance()] == ["billing"]
    assert [d.subscription for d in lake.advance(MINUTE)] == ["audit"]
    with pytest.raises(NotFound):
        lake.get("orders", message)


def test_names_that_there_are_not() -> None:
    lake = orders()
    for call in (
        lambda: lake.schedule("other", b"x", after=MINUTE),
        lambda: list(lake.pending("other")),
        lambda: lake.cancel("orders", "7:0", deliver_at=NOON + MINUTE, subscription="nobody"),
        lambda: lake.skip("orders", "7:0", subscription="billing"),
        lambda: lake.reschedule("orders", schedule_key="none", after=MINUTE),
    ):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(ValueError, match="no time zone"):
        lake.schedule("orders", b"x", at=datetime(2026, 11, 27))
    waits = lake.cancel("orders", "7:0", deliver_at=NOON + MINUTE, subscription="billing")
    assert [o.result for o in waits] == ["WAITING"]


def test_a_message_that_is_sent_again_under_its_request_id_comes_once() -> None:
    lake = orders()
    first = lake.schedule("orders", b"x", after=MINUTE, request_id="r")
    lake.advance(timedelta(seconds=1))
    again = lake.schedule("orders", b"x", after=MINUTE, request_id="r")
    assert (again, again.deliver_at) == (first, NOON + MINUTE)
    with pytest.raises(Invalid, match="request id"):
        lake.schedule("orders", b"y", after=MINUTE, request_id="r")
    assert len(lake.advance(2 * MINUTE)) == 2


def test_one_message_of_a_schedule_key_waits() -> None:
    lake = FakeClient(now=NOON)
    lake.schedule("carts", b"1", after=10 * MINUTE, schedule_key="c")
    lake.schedule("carts", b"2", after=20 * MINUTE, schedule_key="c")
    lake.schedule("carts", b"3", after=5 * MINUTE, schedule_key="c", schedule_mode="keep")
    assert [d.payload for d in lake.advance(15 * MINUTE)] == []
    lake.reschedule("carts", schedule_key="c", after=MINUTE)
    assert [d.payload for d in lake.advance(MINUTE)] == [b"2"]
    for i in range(4):  # put off by each, but not for longer than the limit
        options = {"schedule_mode": "debounce", "debounce_max": 3 * MINUTE}
        lake.schedule("carts", str(i), after=2 * MINUTE, schedule_key="d", **options)  # type: ignore[arg-type]
        assert lake.advance(MINUTE) == [] or i == 2
    assert [d.payload for d in lake.deliveries] == [b"2", b"2"]


def test_a_recurring_message_goes_on_until_it_ends() -> None:
    lake = FakeClient({"reports": ["a"]}, now=NOON)
    daily = lake.schedule("reports", b"r", repeat="0 9 * * *", time_zone="Europe/Berlin", repeat_times=3)
    [schedule] = lake.schedules("reports")
    assert schedule.next_deliver_at == datetime(2026, 11, 28, 8, tzinfo=UTC)
    lake.skip_next("reports", daily)
    lake.pause_schedule("reports", daily)
    assert lake.advance(timedelta(days=2)) == []
    lake.resume_schedule("reports", daily)
    [made_up] = lake.advance()
    assert made_up.occurrence == 2
    [last] = lake.advance(timedelta(days=5))
    assert (last.occurrence, last.deliver_at) == (3, datetime(2026, 11, 30, 8, tzinfo=UTC))
    assert [s.state for s in lake.schedules("reports", with_ended=True)] == ["ended"]
    ticks = lake.schedule("reports", b"t", after=MINUTE, repeat="@every 90s")
    assert len(lake.advance(MINUTE * 4)) == 3
    lake.end_schedule("reports", ticks)
    assert lake.advance(timedelta(days=1)) == []
    lake.schedule("reports", b"m", repeat="FREQ=MONTHLY;BYDAY=1MO;BYHOUR=9;BYMINUTE=0;BYSECOND=0")
    assert lake.advance(timedelta(days=40))[0].deliver_at == datetime(2026, 12, 7, 9, tzinfo=UTC)
    lake.schedule("reports", b"w", repeat="99 9 * * *")
    assert lake.rejects[0].reason.startswith("repeat: ")


def test_a_paused_subscription_gets_what_came_due_meanwhile() -> None:
    lake = orders()
    lake.schedule("orders", b"x", after=MINUTE)
    lake.pause("orders", subscription="billing")
    assert [d.subscription for d in lake.advance(2 * MINUTE)] == ["audit"]
    assert [(m.deliver_at, m.subscriptions) for m in lake.pending("orders", state="held")] == [(None, ("billing",))]
    lake.resume("orders", subscription="billing")
    [delivery] = lake.advance()
    assert (delivery.subscription, delivery.delivered_at) == ("billing", NOON + 2 * MINUTE)


def test_what_fails_is_retried_and_then_a_dead_letter() -> None:
    lake = FakeClient({"orders": ["a"]}, now=NOON, backoff=Backoff(first=MINUTE, attempts=2))
    message = lake.schedule("orders", b"x", after=MINUTE)
    with pytest.raises(NotFound):
        lake.retry("orders", "9:9", subscription="a")
    lake.advance(MINUTE)
    lake.retry("orders", message, subscription="a", request_id="1")
    lake.retry("orders", message, subscription="a", request_id="1")
    [again] = lake.advance(MINUTE)
    assert (again.attempt, again.properties["delaylake.attempt"]) == (1, "1")
    lake.retry("orders", message, subscription="a", after=timedelta(hours=1))
    assert [d.attempt for d in lake.advance(timedelta(hours=1))] == [2]
    lake.retry("orders", message, subscription="a")
    assert [d.id for d in lake.dead_letters] == [message]
    assert lake.redrive("orders", subscription="a", dry_run=True).matched == 1
    assert lake.redrive("orders", subscription="a", request_id="r").redriven == 1
    assert [d.payload for d in lake.advance()] == [b"x"]
    assert lake.dead_letters == []


def test_assertions_say_what_waits() -> None:
    lake = FakeClient(now=NOON)
    lake.assert_nothing_scheduled("orders")
    with pytest.raises(AssertionError, match="nothing at all waits"):
        lake.assert_scheduled("orders")
    lake.schedule("orders", b"pay", after=MINUTE, key="7", properties={"a": "b", "c": "d"})
    found = lake.assert_scheduled("orders", key="7", at=NOON + MINUTE, payload="pay", properties={"a": "b"})
    assert found.properties["c"] == "d"
    with pytest.raises(AssertionError, match=r"key='8'(.|\n)*12:01:00.*key='7'  b'pay'"):
        lake.assert_scheduled("orders", key="8")
    with pytest.raises(AssertionError, match="1 wait on orders"):
        lake.assert_nothing_scheduled("orders", key="7")


def test_the_asynchronous_one_does_the_same() -> None:
    async def use() -> None:
        async with AsyncFakeClient({"orders": ["a"]}, now=NOON) as lake:
            message = await lake.schedule("orders", b"x", after=MINUTE)
            await lake.postpone("orders", message, by=MINUTE)
            assert [m.id async for m in lake.pending("orders")] == [message]
            assert (await lake.get("orders", message)).waiting_for == ("a",)
            assert [s async for s in lake.schedules("orders")] == []
            assert [d.payload for d in lake.advance(2 * MINUTE)] == [b"x"]
            with pytest.raises(TooLate):
                await lake.cancel("orders", message)

    asyncio.run(use())


def test_the_plugin_has_fixtures(fake_lake: FakeClient, async_fake_lake: AsyncFakeClient) -> None:
    assert isinstance(fake_lake, FakeClient)
    assert isinstance(async_fake_lake, AsyncFakeClient)


def test_what_the_documents_show_is_done() -> None:
    text = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "delaylake.testing" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    [test] = [value for name, value in names.items() if name.startswith("test_")]
    test()


@pytest.mark.slow
def test_it_needs_neither_pulsar_nor_a_rule_library() -> None:
    heavy = {"pulsar", "google", "cronsim", "dateutil", "pytest"}
    code = f"import sys, delaylake.testing; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_not_sent_by_its_end_expires() -> None:
    lake = FakeClient({"orders": ["a", "b"]})
    lake.pause("orders", subscription="a")
    parked = lake.schedule("orders", b"1", after=MINUTE, expire_after=MINUTE)
    assert [one.subscription for one in lake.advance(2 * MINUTE - timedelta(milliseconds=1))] == ["b"]
    assert not lake.expired
    assert not lake.advance(MINUTE)
    [gone] = lake.expired
    assert (gone.id, gone.subscription, gone.occurrence) == (parked, "a", None)
    lake.resume("orders", subscription="a")
    assert not lake.advance(MINUTE)
    lake.schedule("orders", b"2", at=lake.now - 2 * MINUTE, expire_at=lake.now - MINUTE)
    assert not lake.advance(MINUTE)
    assert len(lake.expired) == 3


def test_a_retry_keeps_the_end_and_each_occurrence_has_its_own() -> None:
    lake = FakeClient({"orders": ["a"]})
    message = lake.schedule("orders", b"1", after=MINUTE, expire_after=10 * MINUTE)
    [first] = lake.advance(MINUTE)
    assert first.properties["delaylake.expiresAt"] == str(int((first.deliver_at + 10 * MINUTE).timestamp() * 1000))
    lake.retry("orders", message, subscription="a", after=30 * MINUTE)
    assert not lake.advance(timedelta(hours=1))
    assert [one.id for one in lake.expired] == [message]
    lake.schedule("orders", b"2", repeat="@every 1h", expire_after=10 * MINUTE)
    lake.pause("orders", subscription="a")
    lake.advance(timedelta(hours=2))
    lake.resume("orders", subscription="a")
    assert [one.occurrence for one in lake.expired[1:]] == [1]
    assert [one.occurrence for one in lake.advance(timedelta(hours=1))] == [2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"expire_after": timedelta(0), "after": MINUTE},
        {"expire_at": datetime(2020, 1, 1, tzinfo=UTC), "after": MINUTE},
        {"expire_at": datetime(2090, 1, 1), "after": MINUTE},
        {"expire_at": datetime(2090, 1, 1, tzinfo=UTC), "repeat": "@every 1h"},
    ],
)
def test_a_wrong_end_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expire_"):
        FakeClient().schedule("orders", b"1", **options)
