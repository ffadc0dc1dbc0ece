"""The methods that both clients have: each is made here, once, and answered at once or awaited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from delaylake import paging, rest
from delaylake.commands import Commands
from delaylake.message_ids import MessageId
from delaylake.payloads import Payload, PulsarSchema
from delaylake.scheduled import Expiry, KeyRule, Misfire, Repeat, Scheduled, ScheduleMode, scheduled

_Sent = TypeVar("_Sent")
_Outcomes = TypeVar("_Outcomes")
_Counts = TypeVar("_Counts")
_Messages = TypeVar("_Messages")
_Schedules = TypeVar("_Schedules")


class Methods(Commands[_Outcomes], Generic[_Sent, _Outcomes, _Counts, _Messages, _Schedules]):
    """The operations, what sends messages, or dead letters once more, and the listings.

    The types are those of the answers: a message's id, a command's outcomes, the numbers of a re-drive, and iterators
    of pending messages and of schedules.
    """

    def _send(self, make: Callable[[], Scheduled]) -> _Sent:
        raise NotImplementedError

    def _redrive(self, make: Callable[[], rest.Call]) -> _Counts:
        raise NotImplementedError

    def _pages(self, listing: paging.Listing[Any]) -> Any:
        """Returns an iterator of a listing's items."""
        raise NotImplementedError

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
    ) -> _Messages:
        """Yields pending messages, soonest first, a few seconds behind; needs the admin API.

        Args:
            subscription: only those of this subscription; None: of any.
            properties: only those with all of these properties; names with `=` are not allowed.
            state: `waiting`, `held` (waiting, but parked by a pause) or `cancelled`.
            limit: the maximum number of messages; None: all.

        Raises:
            ValueError: the named argument is wrong.
            Gone, NotFound, Forbidden, Unavailable: see there.
        """
        listing = paging.listing(topic, subscription, key, due_from, due_before, properties, state, limit)
        found: _Messages = self._pages(listing)
        return found

    def schedules(
        self, topic: str, *, subscription: str | None = None, with_ended: bool = False, limit: int | None = None
    ) -> _Schedules:
        """Yields the recurring messages, in the order in which they came; needs the admin API.

        Args:
            subscription: the subscription whose progress is listed; None: all.
            with_ended: whether to list ended schedules, too, as long as the tables have them.
            limit: the maximum number of schedules; None: all.

        Raises:
            NotFound, Forbidden, Unavailable: see there.
        """
        found: _Schedules = self._pages(paging.schedules(topic, subscription, with_ended, limit))
        return found

    def schedule(
        self,
        topic: str,
        payload: Payload,
        *,
        at: datetime | None = None,
        after: timedelta | None = None,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        schema: PulsarSchema | str | None = None,
        schedule_key: str | None = None,
        schedule_mode: ScheduleMode | None = None,
        debounce_max: timedelta | None = None,
        expire_at: datetime | None = None,
        expire_after: timedelta | None = None,
        repeat: str | None = None,
        time_zone: str | None = None,
        repeat_until: datetime | None = None,
        repeat_times: int | None = None,
        misfire: Misfire | None = None,
        request_id: str | None = None,
    ) -> _Sent:
        """Sends a message that is delivered later, or with `repeat` again and again.

        Args:
            at: the delivery time, with a time zone; a past one means at once. For a recurring message the time of the
                first occurrence; without it the rule says that.
            after: the delay from now, instead of `at`.
            payload: bytes; a text, sent as UTF-8; a model of pydantic, sent as JSON; or with `schema` what that takes.
            key: Pulsar's partition key.
            schema: a schema of Pulsar's client, as `pulsar.schema.JsonSchema(Order)`; or for what is encoded already
                the name of its type, as `JSON`. The admin API gives the message the topic's newest schema of that type,
                and refuses it if there is none. A broker registers the schema, and needs more than a name.
            schedule_key: at most 512 bytes; of all messages of a topic with the same schedule key only one waits.
            schedule_mode: what happens if another message waits under the key: `replace` (default) cancels that one,
                `keep` cancels the new one, `debounce` replaces within `debounce_max`.
            debounce_max: how long after the key's first publish time its message may be put off.
            expire_at: from then on it is not sent any more, with a time zone; not with `repeat`.
            expire_after: how long after it is due it is sent at the latest, of a recurring message each occurrence.
            repeat: the rule: a cron expression of five fields, or of six with seconds, `@every 90s`, or an RRULE.
            time_zone: IANA name of the rule's zone; default UTC.
            repeat_until: no occurrence is later.
            repeat_times: the number of occurrences.
            misfire: what happens to missed occurrences: `once` (one delivery for all), `all`, or `skip`.
            request_id: of a topic's messages with the same id the first is delivered, and its repetitions are among
                the topic's rejects. The job remembers ids for a day.

        Returns:
            the message's id, with its time if one was given. From the admin API that of the first message under the
            request id, with its time.

        Raises:
            ValueError: the named argument is wrong, or a property is reserved. Rules are checked only roughly here; a
                rule that the service can't read puts the message among the topic's rejects.
            NoAnswer: the message may have been sent. Sent again with the error's `request_id`, or the one that you
                gave, it is delivered once; over a broker without one there may be a second message.
            NotFound: the topic has no route.
            Unavailable, Forbidden, Invalid: the message is not taken, or another one has had the request id.
        """

        def make() -> Scheduled:
            recurs = Repeat.of(repeat, time_zone, repeat_until, repeat_times, misfire)
            keyed = KeyRule.of(schedule_key, schedule_mode, debounce_max)
            ends = Expiry.of(expire_at, expire_after)
            return scheduled(
                topic,
                payload,
                at,
                after,
                key,
                ordering_key,
                properties,
                event_time,
                recurs,
                keyed,
                request_id,
                ends,
                schema,
            )

        return self._send(make)

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
    ) -> _Counts:
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
        return self._redrive(
            lambda: rest.redrive(
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
        )
