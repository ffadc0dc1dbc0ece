"""The client for programs with an event loop: the same methods, to be awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta

from delaylake import commands, paging, rest
from delaylake.connections import AsyncConnections
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.scheduled import KeyRule, Misfire, Repeat, ScheduleMode, scheduled


class AsyncClient(AsyncConnections):
    """As `Client`, for asyncio. An asynchronous context manager; for one event loop.

    ```python
    async with AsyncClient("http://127.0.0.1:8081", broker="pulsar://localhost:6650") as lake:
        message = await lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
        await lake.cancel("orders", message)
    ```
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def schedule(
        self,
        topic: str,
        payload: bytes | str,
        *,
        at: datetime | None = None,
        after: timedelta | None = None,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        schedule_key: str | None = None,
        schedule_mode: ScheduleMode | None = None,
        debounce_max: timedelta | None = None,
        repeat: str | None = None,
        time_zone: str | None = None,
        repeat_until: datetime | None = None,
        repeat_times: int | None = None,
        misfire: Misfire | None = None,
    ) -> MessageId:
        """See `Client.schedule`."""
        recurs = Repeat.of(repeat, time_zone, repeat_until, repeat_times, misfire)
        keyed = KeyRule.of(schedule_key, schedule_mode, debounce_max)
        message = scheduled(topic, payload, at, after, key, ordering_key, properties, event_time, recurs, keyed)
        return await self._send(message)

    async def cancel(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        deliver_at: datetime | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.cancel`."""
        return await self._do(commands.cancel(topic, message, subscription, request_id, deliver_at, schedule_key))

    async def skip(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.skip`."""
        return await self._do(commands.command("skip", topic, message, subscription, request_id, schedule_key))

    async def reschedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        at: datetime | None = None,
        after: timedelta | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.reschedule`."""
        return await self._do(commands.reschedule(topic, message, subscription, request_id, at, after, schedule_key))

    async def postpone(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        by: timedelta,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.postpone`."""
        return await self._do(commands.postpone(topic, message, subscription, request_id, by, schedule_key))

    async def retry(
        self,
        topic: str,
        message: MessageId | str,
        *,
        subscription: str,
        reason: str = "",
        after: timedelta | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.retry`."""
        return await self._do(commands.retry(topic, message, subscription, reason, after, request_id))

    async def redrive(
        self,
        topic: str,
        *,
        subscription: str,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        messages: Sequence[MessageId | str] | None = None,
        reason: str | None = None,
        published_from: datetime | None = None,
        published_before: datetime | None = None,
        dry_run: bool = False,
        limit: int = 10_000,
        request_id: str | None = None,
    ) -> Redriven:
        """See `Client.redrive`."""
        call = rest.redrive(
            topic,
            subscription,
            key,
            properties,
            messages,
            reason,
            published_from,
            published_before,
            dry_run,
            limit,
            request_id,
        )
        return rest.redriven(call, await self._call(call))

    async def deliver_now(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.deliver_now`."""
        return await self._do(commands.command("deliverNow", topic, message, subscription, request_id, schedule_key))

    async def restore(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """See `Client.restore`."""
        return await self._do(commands.command("restore", topic, message, subscription, request_id))

    async def skip_next(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.skip_next`."""
        return await self._do(commands.command("skipNext", topic, message, subscription, request_id, schedule_key))

    async def pause_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.pause_schedule`."""
        return await self._do(commands.command("pauseSchedule", topic, message, subscription, request_id, schedule_key))

    async def resume_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """See `Client.resume_schedule`."""
        return await self._do(
            commands.command("resumeSchedule", topic, message, subscription, request_id, schedule_key)
        )

    async def end_schedule(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """See `Client.end_schedule`."""
        command = commands.command("endSchedule", topic, message, subscription, request_id)
        return rest.outcomes(command, await self._call(rest.call(command)))

    def pending(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        key: str | None = None,
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        properties: Mapping[str, str] | None = None,
        state: str = "waiting",
        limit: int | None = None,
    ) -> AsyncIterator[PendingMessage]:
        """As `Client.pending`, for `async for`."""
        return self._pages(paging.listing(topic, subscription, key, due_from, due_before, properties, state, limit))

    def schedules(
        self, topic: str, *, subscription: str | None = None, with_ended: bool = False, limit: int | None = None
    ) -> AsyncIterator[Schedule]:
        """As `Client.schedules`, for `async for`."""
        return self._pages(paging.schedules(topic, subscription, with_ended, limit))

    async def get(self, topic: str, message: MessageId | str) -> MessageState:
        """See `Client.get`."""
        message_id = MessageId.of(message)
        waiting = [one async for one in self._pages(paging.entry_listing(topic, message_id, "waiting"))]
        cancelled = [one async for one in self._pages(paging.entry_listing(topic, message_id, "cancelled"))]
        return paging.state_of(message_id, waiting, cancelled)
