"""The service in memory, for an application's tests: the clients' methods, and a clock that moves when a test says so.

```python
def test_an_order_that_is_not_paid_is_reminded_of(fake_lake: FakeClient) -> None:
    place_order(fake_lake, "7")
    fake_lake.assert_scheduled("orders", key="7", at=fake_lake.now + timedelta(hours=1))
    [reminder] = fake_lake.advance(timedelta(hours=1))
    assert reminder.payload == b"pay"
```

There is no broker and no thread: `advance` delivers what is due, and returns it. The clients' own code checks
arguments, and commands are answered as the service answers them. `fake_lake` is a fixture of the package's pytest
plugin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from delaylake import paging, rest
from delaylake.commands import Command
from delaylake.fake_service import MILLI, Backoff, Delivery, Expired, FakeService, Rejected, Subscriptions
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.methods import Methods
from delaylake.scheduled import Scheduled
from delaylake.times import clock, millis, moment

__all__ = ["AsyncFakeClient", "Backoff", "Delivery", "Expired", "FakeClient", "Rejected"]

_LOOKAHEAD = timedelta(milliseconds=2_500)
_BACKOFF = Backoff()

_Sent = TypeVar("_Sent")
_Outcomes = TypeVar("_Outcomes")
_Counts = TypeVar("_Counts")
_Messages = TypeVar("_Messages")
_Schedules = TypeVar("_Schedules")
_Listed = TypeVar("_Listed")


class _Fake(
    Methods[_Sent, _Outcomes, _Counts, _Messages, _Schedules],
    Generic[_Sent, _Outcomes, _Counts, _Messages, _Schedules],
):
    """What both fakes have beside the clients' methods.

    Args:
        subscriptions: by topic the names of its subscriptions, or these with their types, as {"orders": ["billing"]};
            None: any topic has one subscription, `default`.
        now: the time at the beginning; None: the machine's.
        lookahead: a message is dispatched this long before it is due: then a command is TooLate.
        backoff: the delays of retries.
    """

    def __init__(
        self,
        subscriptions: Subscriptions | None = None,
        *,
        now: datetime | None = None,
        lookahead: timedelta = _LOOKAHEAD,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._service = FakeService(subscriptions, now, lookahead, backoff)

    @property
    def now(self) -> datetime:
        """The time by the fake's clock."""
        return moment(self._service.now)

    @property
    def deliveries(self) -> list[Delivery]:
        """All deliveries so far, in order."""
        return list(self._service.deliveries)

    @property
    def dead_letters(self) -> list[Delivery]:
        """What was retried more often than the backoff allows."""
        return list(self._service.dead_letters)

    @property
    def expired(self) -> list[Expired]:
        """All messages so far that could not be sent by their end, in order."""
        return list(self._service.expired)

    @property
    def rejects(self) -> list[Rejected]:
        """The messages that can't be delivered, as those with a rule that can't be read."""
        return list(self._service.rejects)

    def advance(self, by: timedelta = timedelta(0)) -> list[Delivery]:
        """Moves the clock on, and delivers what is due by then; returns these deliveries, in order.

        Raises:
            ValueError: the time is negative.
        """
        if by < timedelta(0):
            raise ValueError(f"the clock does not go back: {by!r}")
        return self._service.advance(self._service.now + by // MILLI)

    def advance_to(self, time: datetime) -> list[Delivery]:
        """As `advance`, to a time with a zone.

        Raises:
            ValueError: the time is past, or has no zone.
        """
        return self.advance(time - self.now)

    def assert_scheduled(
        self,
        topic: str,
        *,
        key: str | None = None,
        at: datetime | None = None,
        payload: bytes | str | None = None,
        schedule_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        subscription: str | None = None,
    ) -> PendingMessage:
        """Returns the soonest message that waits and has all that is given.

        Raises:
            AssertionError: there is none; it says what waits.
        """
        waiting = list(self._waiting(topic, subscription))
        wanted = payload.encode() if isinstance(payload, str) else payload
        for found in waiting:
            if (
                key in (None, found.key)
                and (at is None or found.deliver_at == moment(millis("at", at)))
                and (wanted is None or self._service.payload_of(topic, found.id) == wanted)
                and schedule_key in (None, found.properties.get("scheduleKey"))
                and (properties or {}).items() <= found.properties.items()
            ):
                return found
        named = {"key": key, "at": at, "payload": payload, "schedule_key": schedule_key, "properties": properties}
        given = ", ".join(f"{name}={value!r}" for name, value in named.items() if value is not None)
        lines = [f"  {m.deliver_at}  {m.id}  key={m.key!r}  {self._service.payload_of(topic, m.id)!r}" for m in waiting]
        raise AssertionError(
            "\n".join([f"nothing waits on {topic} with {given}", *(lines or ["  nothing at all waits"])])
        )

    def assert_nothing_scheduled(self, topic: str, *, key: str | None = None) -> None:
        """Raises AssertionError if anything waits on a topic, or with a key."""
        if found := [message for message in self._waiting(topic, None) if key in (None, message.key)]:
            raise AssertionError(f"{len(found)} wait on {topic}, the first {found[0].id}, due {found[0].deliver_at}")

    def _waiting(self, topic: str, subscription: str | None) -> Iterator[PendingMessage]:
        return self._service.listed(paging.listing(topic, subscription, None, None, None, None, "waiting", None))

    def _sent(self, make: Callable[[], Scheduled]) -> MessageId:
        with clock(lambda: self.now):
            return self._service.send(make())

    def _answered(self, make: Callable[[], Command]) -> list[Outcome]:
        with clock(lambda: self.now):
            command = make()
        with command.time_in_errors():
            return self._service.answer(command)

    def _state(self, topic: str, message: MessageId | str) -> MessageState:
        message_id = MessageId.of(message)
        listed = [
            list(self._service.listed(paging.entry_listing(topic, message_id, s))) for s in ("waiting", "cancelled")
        ]
        return paging.state_of(message_id, *listed)


class FakeClient(_Fake[MessageId, list[Outcome], Redriven, Iterator[PendingMessage], Iterator[Schedule]]):
    """`Client`, with the service in memory. Its arguments are optional.

    ```python
    lake = FakeClient({"orders": ["billing", "audit"]})
    message = lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
    billing, audit = lake.advance(timedelta(minutes=10))
    ```
    """

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing."""

    def get(self, topic: str, message: MessageId | str) -> MessageState:
        """As `Client.get`, up to date."""
        return self._state(topic, message)

    def _pages(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        yield from self._service.listed(listing)

    def _send(self, make: Callable[[], Scheduled]) -> MessageId:
        return self._sent(make)

    def _do(self, make: Callable[[], Command]) -> list[Outcome]:
        return self._answered(make)

    def _redrive(self, make: Callable[[], rest.Call]) -> Redriven:
        return self._service.redrive(make())


class AsyncFakeClient(
    _Fake[
        Coroutine[Any, Any, MessageId],
        Coroutine[Any, Any, list[Outcome]],
        Coroutine[Any, Any, Redriven],
        AsyncIterator[PendingMessage],
        AsyncIterator[Schedule],
    ]
):
    """`AsyncClient`, with the service in memory. `advance` and what else it has beside that are not awaited."""

    async def __aenter__(self) -> AsyncFakeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Does nothing."""

    async def get(self, topic: str, message: MessageId | str) -> MessageState:
        """As `AsyncClient.get`, up to date."""
        return self._state(topic, message)

    async def _pages(self, listing: paging.Listing[_Listed]) -> AsyncIterator[_Listed]:
        for one in self._service.listed(listing):
            yield one

    async def _send(self, make: Callable[[], Scheduled]) -> MessageId:
        return self._sent(make)

    async def _do(self, make: Callable[[], Command]) -> list[Outcome]:
        return self._answered(make)

    async def _redrive(self, make: Callable[[], rest.Call]) -> Redriven:
        return self._service.redrive(make())
