"""The client for programs that wait for each call."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

import httpx

from delaylake import commands, paging, rest
from delaylake.commands import Command
from delaylake.connections import Connections
from delaylake.errors import Unavailable
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.scheduled import KeyRule, Misfire, Repeat, ScheduleMode, scheduled
from delaylake.threads import in_thread

_Listed = TypeVar("_Listed")


class Client(Connections[httpx.Client]):
    """Schedules messages, and changes and lists what waits. A context manager; thread-safe.

    ```python
    with Client("http://127.0.0.1:8081", broker="pulsar://localhost:6650") as lake:
        message = lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
        lake.cancel("orders", message)
    ```

    Commands return what became of the message, an outcome for each subscription, or raise the error of the gravest:
    then what could be done for the other subscriptions is done. Without a subscription they are for all that the topic
    has, and for those that it is given later; over the control topic one has to be named.

    `cancel`, `skip`, `reschedule`, `deliver_now`, `skip_next`, `pause_schedule` and `resume_schedule` are for a message
    by its id, or with `schedule_key=` for the one that waits under that key: where none does it is NotFound.

    A call that fails on its way is made again until its time is over. To make a command again after that, or in another
    process, choose its `request_id`, or take that of the error: it is applied once.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections. What is called after that is a RuntimeError."""
        self._is_closed = True
        if self._is_own_http:
            self._http.close()
        if self._broker:
            self._broker.close()

    def schedule(
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
        """Sends a message that is to be delivered later, or with `repeat` again and again.

        Args:
            at: when, with a time zone; one that is past: at once. Of a recurring message the first time; without it the
                rule says that, too.
            after: instead: how long from now.
            key: as Pulsar's partition key.
            schedule_key: of the messages of a topic that have this one, one waits: at most 512 bytes.
            schedule_mode: what the message does to the one that waits: `replace` it, the default; `keep` it, and yield
                to it; or `debounce`: replace it, and be put off no further than `debounce_max` lets it.
            debounce_max: how long after the first message of the key was published.
            repeat: how it recurs: a cron expression of five fields, or of six with seconds, `@every 90s`, or an RRULE.
            time_zone: the IANA name of the zone that the rule means; UTC where it is not given.
            repeat_until: no occurrence is later.
            repeat_times: how many occurrences there are.
            misfire: what becomes of occurrences that were missed: `once` (for all of them one), `all`, or `skip`.

        Returns:
            its id, with the time where one was given.

        Raises:
            ValueError: an argument, which it names, can't be what it is for, or a property is the service's own. The
                service reads the rule in full: one that it can't read goes to the topic's rejects.
            NoAnswer: it may have been sent. There is no id to send it again with: a copy would be another message.
            Unavailable, NotFound, Forbidden, Invalid: the broker does not take it.
        """
        recurs = Repeat.of(repeat, time_zone, repeat_until, repeat_times, misfire)
        keyed = KeyRule.of(schedule_key, schedule_mode, debounce_max)
        message = scheduled(topic, payload, at, after, key, ordering_key, properties, event_time, recurs, keyed)
        deadline, broker = self._deadline(), self._pulsar()
        sent = broker.schedule(message, deadline)
        try:
            return sent.result(self._seconds_until(deadline))
        except concurrent.futures.TimeoutError:
            raise broker.not_in_time(message.topic) from None

    def cancel(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        deliver_at: datetime | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Cancels a message. By its id it may come before the message: then it waits for it, until just after its time.

        Args:
            deliver_at: when the message is due, where its id does not say it.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.cancel(topic, message, subscription, request_id, deliver_at, schedule_key))

    def skip(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Cancels a message, which may be one of a batch, and whose time need not be known.

        Raises:
            NotAllowed: the subscription is an Exclusive or Failover one.
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("skip", topic, message, subscription, request_id, schedule_key))

    def reschedule(
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
        """Delivers a message that waits at another time, earlier or later. It keeps its id.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there. To ask again under the error's
                `request_id`, give its `deliver_at` as `at`.
        """
        return self._do(commands.reschedule(topic, message, subscription, request_id, at, after, schedule_key))

    def retry(
        self,
        topic: str,
        message: MessageId | str,
        *,
        subscription: str,
        reason: str = "",
        after: timedelta | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Delivers a message once more to a subscription whose consumer failed on it.

        Args:
            topic: the source topic: the delivered message's property `delaylake.source`.
            message: the property `delaylake.messageId`.
            subscription: the consumer's.
            reason: why it failed, for the attempts and the dead letters.
            after: how long to wait; None: as the subscription's backoff says.
            request_id: with one for each message and attempt, a consumer that asks twice gets one retry.

        Raises:
            NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there. NotFound where its payload is not kept, too.
        """
        return self._do(commands.retry(topic, message, subscription, reason, after, request_id))

    def redrive(
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
        """Delivers the dead letters of a subscription once more that match; needs the admin API.

        Args:
            topic: the source topic.
            messages: these alone, by their property `delaylake.messageId`.
            reason: a part of one of the reasons for their retries.
            published_from, published_before: when they became dead letters.
            dry_run: only counts them.
            limit: nothing is done where more match.
            request_id: of a call that was broken off: what that has sent back is not sent again.

        Raises:
            NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
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
        return rest.redriven(call, self._call(call))

    def deliver_now(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Delivers a message that waits at once.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("deliverNow", topic, message, subscription, request_id, schedule_key))

    def restore(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Undoes a cancel or skip of a message whose time has not come.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("restore", topic, message, subscription, request_id))

    def skip_next(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Skips the next occurrence of a recurring message: the one after it is next.

        Raises:
            Invalid: also where the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("skipNext", topic, message, subscription, request_id, schedule_key))

    def pause_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Pauses a schedule: the next occurrence of the recurring message waits until it is resumed.

        It can be paused again, which does nothing more.

        Raises:
            Invalid: also where the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("pauseSchedule", topic, message, subscription, request_id, schedule_key))

    def resume_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Resumes a schedule that was paused: it goes on by its rule. What was missed is as its `misfire` says.

        Raises:
            Invalid: also where the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("resumeSchedule", topic, message, subscription, request_id, schedule_key))

    def end_schedule(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Ends a schedule: no further occurrence of the recurring message is delivered. Needs the admin API.

        It can be ended again, which does nothing more.

        Raises:
            NotFound: also where it has only just come.
            TooLate, NotAllowed, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        command = commands.command("endSchedule", topic, message, subscription, request_id)
        return rest.outcomes(command, self._call(rest.call(command)))

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
    ) -> Iterator[PendingMessage]:
        """Yields what waits, soonest first, a few seconds behind; needs the admin API.

        Args:
            subscription: waits for this one; None: for any.
            properties: has all of these; by a name with `=` nothing can be found.
            state: `waiting`, `held` (back by a pause, of what waits) or `cancelled`.
            limit: the most messages; None: all.

        Raises:
            ValueError: an argument, which it names, can't be what it is for.
            Gone, NotFound, Forbidden, Unavailable: see there.
        """
        return self._pages(paging.listing(topic, subscription, key, due_from, due_before, properties, state, limit))

    def schedules(
        self, topic: str, *, subscription: str | None = None, with_ended: bool = False, limit: int | None = None
    ) -> Iterator[Schedule]:
        """Yields the recurring messages, in the order in which they came; needs the admin API.

        Args:
            subscription: how far they have got for this one; None: for all.
            with_ended: also those that are over, as far as the tables still have them.
            limit: the most schedules; None: all.

        Raises:
            NotFound, Forbidden, Unavailable: see there.
        """
        return self._pages(paging.schedules(topic, subscription, with_ended, limit))

    def get(self, topic: str, message: MessageId | str) -> MessageState:
        """Returns a message that is not delivered to all its subscriptions, as far as the tables know; needs the API.

        Raises:
            NotFound: it is delivered, or has come within the last seconds, or never was.
            Invalid, Forbidden, Unavailable: see there.
        """
        meant = MessageId.of(message)
        waiting = list(self._pages(paging.entry_listing(topic, meant, "waiting")))
        cancelled = list(self._pages(paging.entry_listing(topic, meant, "cancelled")))
        return paging.state_of(meant, waiting, cancelled)

    def _make_http(self) -> httpx.Client:
        return httpx.Client()

    def _do(self, command: Command) -> list[Outcome]:
        with command.time_in_errors():
            if self._url is not None:
                return rest.outcomes(command, self._call(rest.call(command)))
            return self._tell_broker(command)

    def _tell_broker(self, command: Command) -> list[Outcome]:
        deadline, broker = self._deadline(), self._pulsar()
        told = broker.send(command, deadline)
        try:
            return told.result(self._seconds_until(deadline))
        except concurrent.futures.TimeoutError:
            told.cancel()
            raise broker.not_in_time(broker.control_topic, command.request_id) from None

    def _pages(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        self._api()  # what is missing is said now, and not when the first is asked for
        return self._read_pages(listing)

    def _read_pages(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        n = 0
        call: rest.Call | None = listing.first()
        while call:
            found, call = listing.read(self._call(call), n)
            n += len(found)
            yield from found

    def _call(self, call: rest.Call) -> httpx.Response:
        attempts = rest.Attempts(call, self._timeout_seconds)
        while True:
            asked = 0.0
            try:
                response = self._attempt(call, attempts)
                asked = rest.retry_after(response)
                rest.raise_if_unavailable(response)
                return response
            except (httpx.RequestError, Unavailable) as error:
                pause = attempts.pause_after(error, asked)
            time.sleep(pause)

    def _attempt(self, call: rest.Call, attempts: rest.Attempts) -> httpx.Response:
        ask = partial(
            self._http.request,
            call.method,
            self._api() + call.path,
            params=call.params,
            json=call.content,
            headers=call.headers | self._headers(),
            timeout=attempts.timeout,
        )
        try:
            # httpx bounds each step, and not all of them: an answer may come byte by byte.
            return in_thread(ask).result(attempts.seconds_left)
        except concurrent.futures.TimeoutError:
            raise httpx.ReadTimeout("no answer in time, or not all of it") from None
