"""The client for programs that wait for each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from delaylake import commands, paging, rest
from delaylake.connections import BlockingConnections
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.scheduled import KeyRule, Misfire, Repeat, ScheduleMode, scheduled


class Client(BlockingConnections):
    """Schedules messages, and changes and lists those that wait. A context manager; thread-safe.

    ```python
    with Client("http://127.0.0.1:8081", broker="pulsar://localhost:6650") as lake:
        message = lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
        lake.cancel("orders", message)
    ```

    A command returns an outcome for each subscription. If it fails for some subscriptions, it raises the error of the
    gravest outcome; for the others it is done. A command without a subscription is for all subscriptions that the topic
    has or gets later; over the control topic a subscription has to be named.

    `cancel`, `skip`, `reschedule`, `postpone`, `deliver_now`, `skip_next`, `pause_schedule` and `resume_schedule` take
    a message's id, or with `schedule_key=` the message that waits under that key; if none waits, they raise NotFound.

    A call whose connection fails is repeated until its time is over. To repeat a command after that, or in another
    process, give it the `request_id` that you chose, or that of the error: a command is applied once under it.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Sends a message that is delivered later, or with `repeat` again and again.

        Args:
            at: the delivery time, with a time zone; a past one means at once. For a recurring message the time of the
                first occurrence; without it the rule says that.
            after: the delay from now, instead of `at`.
            key: Pulsar's partition key.
            schedule_key: at most 512 bytes; of all messages of a topic with the same schedule key only one waits.
            schedule_mode: what happens if another message waits under the key: `replace` (default) cancels that one,
                `keep` cancels the new one, `debounce` replaces within `debounce_max`.
            debounce_max: how long after the key's first publish time its message may be put off.
            repeat: the rule: a cron expression of five fields, or of six with seconds, `@every 90s`, or an RRULE.
            time_zone: IANA name of the rule's zone; default UTC.
            repeat_until: no occurrence is later.
            repeat_times: the number of occurrences.
            misfire: what happens to missed occurrences: `once` (one delivery for all), `all`, or `skip`.

        Returns:
            the message's id, with its time if one was given.

        Raises:
            ValueError: the named argument is wrong, or a property is reserved. Rules are checked only roughly here; a
                rule that the service can't read puts the message among the topic's rejects.
            NoAnswer: the message may have been sent. Sending it again may make a second message.
            Unavailable, NotFound, Forbidden, Invalid: the broker does not take the message.
        """
        recurs = Repeat.of(repeat, time_zone, repeat_until, repeat_times, misfire)
        keyed = KeyRule.of(schedule_key, schedule_mode, debounce_max)
        message = scheduled(topic, payload, at, after, key, ordering_key, properties, event_time, recurs, keyed)
        return self._send(message)

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
        """Cancels a message. A cancel by id may come before its message: then it waits until just after `deliver_at`.

        Args:
            deliver_at: when the message is due, if its id does not have it.

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
        """Cancels a message, also a single one of a batch; the time at which it is due need not be known.

        Raises:
            NotAllowed: the subscription's type is Exclusive or Failover.
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
        """Moves a pending message to an earlier or later time. The message keeps its id.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there. To repeat the call with the error's
                `request_id`, give the error's `deliver_at` as `at`.
        """
        return self._do(commands.reschedule(topic, message, subscription, request_id, at, after, schedule_key))

    def postpone(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        by: timedelta,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> list[Outcome]:
        """Moves a pending message so much later than it would be delivered; each call adds up.

        Args:
            by: negative: sooner, but not before now.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.postpone(topic, message, subscription, request_id, by, schedule_key))

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
            message: the delivered message's property `delaylake.messageId`.
            subscription: the consumer's subscription.
            reason: why the consumer failed; shown with the attempts and the dead letters.
            after: the delay; None: as the subscription's backoff says.
            request_id: choose one for each message and attempt, and a consumer that asks twice gets one retry.

        Raises:
            NotFound: there is no such message, or its payload is not kept any more.
            Invalid, Forbidden, Unavailable, NoAnswer: see there.
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
        """Delivers the matching dead letters of a subscription once more; needs the admin API.

        Args:
            topic: the source topic.
            messages: only these, by their property `delaylake.messageId`.
            reason: only those with this text in a reason of their retries.
            published_from, published_before: only those that became dead letters in this time.
            dry_run: whether to count the matching dead letters only.
            limit: if more dead letters match, nothing is done.
            request_id: that of a call that was broken off: dead letters that it has sent back are not sent again.

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
        """Delivers a pending message at once.

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
        """Skips the next occurrence of a recurring message.

        Raises:
            Invalid: also if the message does not recur.
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
        """Pauses a schedule: the recurring message's next occurrence waits until the schedule is resumed.

        To pause a paused schedule does nothing.

        Raises:
            Invalid: also if the message does not recur.
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
        """Resumes a paused schedule. For occurrences that were missed meanwhile see its `misfire`.

        Raises:
            Invalid: also if the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(commands.command("resumeSchedule", topic, message, subscription, request_id, schedule_key))

    def end_schedule(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> list[Outcome]:
        """Ends a schedule: no further occurrence of the recurring message is delivered. Needs the admin API.

        To end an ended schedule does nothing.

        Raises:
            NotFound: also if the message has come within the last seconds.
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
        """Yields pending messages, soonest first, a few seconds behind; needs the admin API.

        Args:
            subscription: only those of this subscription; None: of any.
            properties: only those with all of these properties; names with `=` are not allowed.
            state: `waiting`, `held` (waiting, but held back by a pause) or `cancelled`.
            limit: the maximum number of messages; None: all.

        Raises:
            ValueError: the named argument is wrong.
            Gone, NotFound, Forbidden, Unavailable: see there.
        """
        return self._pages(paging.listing(topic, subscription, key, due_from, due_before, properties, state, limit))

    def schedules(
        self, topic: str, *, subscription: str | None = None, with_ended: bool = False, limit: int | None = None
    ) -> Iterator[Schedule]:
        """Yields the recurring messages, in the order in which they came; needs the admin API.

        Args:
            subscription: the subscription whose progress is listed; None: all.
            with_ended: whether to list ended schedules, too, as long as the tables have them.
            limit: the maximum number of schedules; None: all.

        Raises:
            NotFound, Forbidden, Unavailable: see there.
        """
        return self._pages(paging.schedules(topic, subscription, with_ended, limit))

    def get(self, topic: str, message: MessageId | str) -> MessageState:
        """Returns a message that is not delivered to all its subscriptions yet; needs the admin API.

        Raises:
            NotFound: the message is delivered, came within the last seconds, or never existed.
            Invalid, Forbidden, Unavailable: see there.
        """
        message_id = MessageId.of(message)
        waiting = list(self._pages(paging.entry_listing(topic, message_id, "waiting")))
        cancelled = list(self._pages(paging.entry_listing(topic, message_id, "cancelled")))
        return paging.state_of(message_id, waiting, cancelled)
