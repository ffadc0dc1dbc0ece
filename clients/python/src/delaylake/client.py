"""The client for programs that wait for each call."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import httpx

from delaylake import commands, rest
from delaylake.commands import Command, Misfire, Repeat
from delaylake.connections import Connections
from delaylake.errors import NoAnswer, Unavailable
from delaylake.listing import MessageState, PendingMessage
from delaylake.message_ids import MessageId, Outcome, Redriven


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

    A call that fails on its way is made again until its time is over. To make a command again after that, or in another
    process, choose its `request_id`, or take that of the error: it is applied once.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
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
            repeat: how it recurs: a cron expression of five fields, or of six with seconds, `@every 90s`, or an RRULE.
            time_zone: the IANA name of the zone that the rule means; UTC where it is not given.
            repeat_until: no occurrence is later.
            repeat_times: how many occurrences there are.
            misfire: what becomes of occurrences that were missed: `once` (for all of them one), `all`, or `skip`.

        Returns:
            its id, with the time where one was given.

        Raises:
            ValueError: the time is none, or a property is the service's own.
            NoAnswer: it may have been sent. There is no id to send it again with: a copy would be another message.
            Unavailable, NotFound, Forbidden, Invalid: the broker does not take it.
        """
        recurs = Repeat.of(repeat, time_zone, repeat_until, repeat_times, misfire)
        message = commands.scheduled(topic, payload, at, after, key, ordering_key, properties, event_time, recurs)
        sent = self._pulsar().schedule(message)
        try:
            return sent.result(self._timeout_seconds)
        except concurrent.futures.TimeoutError:
            raise NoAnswer(f"{message.topic}: the broker has not confirmed the message") from None

    def cancel(
        self,
        topic: str,
        message: MessageId | str,
        *,
        deliver_at: datetime | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Cancels a message. It may come before the message: then it waits for it, until just after its time.

        Args:
            deliver_at: when the message is due, where its id does not say it.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.cancel(topic, message, subscription, request_id, deliver_at))

    def skip(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Cancels a message, which may be one of a batch, and whose time need not be known.

        Raises:
            NotAllowed: the subscription is an Exclusive or Failover one.
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("skip", topic, message, subscription, request_id))

    def reschedule(
        self,
        topic: str,
        message: MessageId | str,
        *,
        at: datetime | None = None,
        after: timedelta | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Delivers a message that waits at another time, earlier or later. It keeps its id.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.reschedule(topic, message, subscription, request_id, at, after))

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
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Delivers a message that waits at once.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("deliverNow", topic, message, subscription, request_id))

    def restore(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Undoes a cancel or skip of a message whose time has not come.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("restore", topic, message, subscription, request_id))

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
            properties: has all of these.
            state: `waiting`, `held` (back by a pause, of what waits) or `cancelled`.
            limit: the most messages; None: all.

        Raises:
            Gone, NotFound, Forbidden, Unavailable: see there.
        """
        return self._pages(rest.listing(topic, subscription, key, due_from, due_before, properties, state, limit))

    def get(self, topic: str, message: MessageId | str) -> MessageState:
        """Returns a message that is not delivered to all its subscriptions, as far as the tables know; needs the API.

        Raises:
            NotFound: it is delivered, or has come within the last seconds, or never was.
            Invalid, Forbidden, Unavailable: see there.
        """
        meant = MessageId.of(message)
        waiting = list(self._pages(rest.entry_listing(topic, meant, "waiting")))
        cancelled = list(self._pages(rest.entry_listing(topic, meant, "cancelled")))
        return rest.state_of(meant, waiting, cancelled)

    def _make_http(self) -> httpx.Client:
        return httpx.Client()

    def _do(self, command: Command) -> list[Outcome]:
        if self._url is not None:
            return rest.outcomes(command, self._call(rest.call(command)))
        told = self._pulsar().send(command)
        try:
            return told.result(self._timeout_seconds)
        except concurrent.futures.TimeoutError:
            told.cancel()
            raise NoAnswer("no answer (does the job run?)", request_id=command.request_id) from None

    def _pages(self, listing: rest.Listing) -> Iterator[PendingMessage]:
        n = 0
        call: rest.Call | None = listing.first()
        while call:
            found, call = listing.read(self._call(call), n)
            n += len(found)
            yield from found

    def _call(self, call: rest.Call) -> httpx.Response:
        attempts = rest.Attempts(call, self._timeout_seconds)
        url = self._api() + call.path
        while True:
            asked = 0.0
            try:
                response = self._http.request(
                    call.method,
                    url,
                    params=call.params,
                    json=call.content,
                    headers=call.headers | self._headers(),
                    timeout=attempts.timeout,
                )
                asked = rest.retry_after(response)
                rest.raise_if_unavailable(response)
                return response
            except (httpx.TransportError, Unavailable) as error:
                pause = attempts.pause_after(error, asked)
            time.sleep(pause)
