"""The parts of a listing of a topic's pending messages: filter, messages, pages, cursors and errors."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from broker.entries.message_ids import MessageRef
from conf.errors import DelayLakeError
from conf.settings import Settings, Subscription
from tracker.commands.decode import resolve_topic
from tracker.due_time import MAX_TIME_MILLIS, BadScheduleError, deliver_at
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from warehouse.named_queries import NamedQueries, Sql

# The columns by which a listing, of one topic, is ordered, all ascending.
ORDER = ("deliver_at", "ledger_id", "entry_id", "batch_index", "partition", "sequence")

_SQL = NamedQueries(__file__)

_Int64 = Annotated[int, Field(ge=0, lt=2**63)]


class PendingError(DelayLakeError):
    """A query of pending messages can't be answered."""


class CursorError(PendingError):
    """The text is not a cursor, or it is the cursor of another listing."""


class VersionGoneError(PendingError):
    """The version of the tables that a listing reads has been removed."""


class NoTablesError(PendingError):
    """There are no tables: the job has not run yet."""


class UnknownTopicError(PendingError):
    """No route has the topic, or the topic has no such subscription."""


class State(StrEnum):
    """The state of a message that is not delivered yet. `cancelled` is read as `takenBack`."""

    WAITING = "waiting"  # to be delivered, or parked
    HELD = "held"  # due and parked, as by a pause of its subscription; not the next occurrence of a paused schedule
    CANCELLED = "takenBack"  # cancelled or skipped, and not due yet, so that it can be restored

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        return cls.CANCELLED if value == "cancelled" else None


class PendingFilter(BaseModel):
    """A filter for a topic's pending messages: all conditions given must hold. Times are ms since the epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True)

    subscription: str | None = None  # None: pending for any of the topic's subscriptions
    key: str | None = None
    properties: dict[str, str] = {}
    due_from: _Int64 | None = None
    due_before: _Int64 | None = None
    producer_name: str | None = None
    ledger_id: _Int64 | None = None
    entry_id: _Int64 | None = None
    state: Annotated[State, Field(strict=False)] = State.WAITING

    @model_validator(mode="after")
    def _entry_of_a_ledger(self) -> PendingFilter:
        if self.entry_id is not None and self.ledger_id is None:
            raise ValueError("an entry id needs a ledger id")
        return self

    @property
    def is_selective(self) -> bool:
        """Whether the filter has other conditions than the subscription."""
        return bool(self.conditions) or self.due_from is not None or self.state is not State.WAITING

    @property
    def has_texts(self) -> bool:
        """Whether the filter has a key, a property or a producer's name: conditions that few messages may meet."""
        return bool(self.properties) or self.key is not None or self.producer_name is not None

    def matches(self, message: PendingMessage) -> bool:
        """Whether a message meets the filter's conditions; subscription and state are not looked at."""
        wanted = (
            (self.key, message.key),
            (self.producer_name, message.producer_name),
            (self.ledger_id, message.ref.ledger_id),
            (self.entry_id, message.ref.entry_id),
        )
        return (
            all(given in (None, found) for given, found in wanted)
            and self.properties.items() <= message.properties.items()
            and (self.due_from is None or message.deliver_at >= self.due_from)
            and (self.due_before is None or message.deliver_at < self.due_before)
        )

    @property
    def conditions(self) -> list[Sql]:
        """The SQL conditions on a row of the delayed index, to be joined by AND; `due_from` is not among them."""
        values = {name: getattr(self, name) for name in ("key", "producer_name", "due_before", "ledger_id", "entry_id")}
        if self.state is State.HELD:
            values["deliver_at"] = HELD_DELIVER_AT
        properties = [_SQL("property", name=name, value=value) for name, value in self.properties.items()]
        return properties + [_SQL(name, value=value) for name, value in values.items() if value is not None]


@dataclass(frozen=True)
class PendingMessage:
    """A pending message, and the subscriptions that wait for it. Times are ms since the epoch."""

    ref: MessageRef
    deliver_at: int
    subscriptions: tuple[str, ...]
    batch_size: int
    key: str | None
    ordering_key: str | None
    properties: dict[str, str]
    sequence: int  # sequence of the command that moved the message to this time; 0: it was not moved
    event_time: int  # 0: not set
    publish_time: int
    producer_name: str
    attempt: int | None = None  # number of the retry, from 1; None: the first delivery
    shaped_from: int | None = None  # when it was due before its subscription's rate or windows put it off
    occurrence: int | None = None  # number of a recurring message's next occurrence; None: it does not recur
    expires_at: int | None = None  # it is not sent any more to one of the subscriptions; None: it has no end
    is_going_out: bool = False  # it is due within moments, or has just been: it may be delivered already

    @property
    def is_held(self) -> bool:
        """Whether the message is due and parked, as by a pause of its subscription."""
        return self.deliver_at == HELD_DELIVER_AT

    @property
    def is_paused(self) -> bool:
        """Whether the message is the next occurrence of a paused schedule."""
        return self.deliver_at >= PAUSED_DELIVER_AT

    @property
    def cancel_at(self) -> int:
        """A time for a cancel that names the message: its own, or that with which it came if it is parked."""
        is_at_rest = self.deliver_at >= HELD_DELIVER_AT
        return time_as_it_came(self.properties, self.publish_time) if is_at_rest else self.deliver_at

    @property
    def place(self) -> tuple[int, int, int, int, int, int]:
        """The message's values of the columns ORDER."""
        ref = self.ref
        return self.deliver_at, ref.ledger_id, ref.entry_id, ref.batch_index, ref.partition, self.sequence

    def is_at_the_same_time(self, other: PendingMessage) -> bool:
        """Whether `other` is the same message at the same time, and differs at most in the subscriptions."""
        return replace(self, subscriptions=other.subscriptions, sequence=other.sequence) == other

    def to_json(self) -> dict[str, Any]:
        """The message as JSON, as the admin API and `--json` give it."""
        return {
            "messageId": str(self.ref),
            "ledgerId": self.ref.ledger_id,
            "entryId": self.ref.entry_id,
            "partitionIndex": self.ref.partition,
            "batchIndex": self.ref.batch_index,
            "deliverAt": None if self.is_held or self.is_paused else self.deliver_at,
            "isHeld": self.is_held,
            "isPaused": self.is_paused,
            "shapedFrom": self.shaped_from,
            "subscriptions": list(self.subscriptions),
            "key": self.key,
            "orderingKey": self.ordering_key,
            "properties": self.properties,
            "eventTime": self.event_time,
            "publishTime": self.publish_time,
            "producerName": self.producer_name,
            "attempt": self.attempt,
            **({} if self.occurrence is None else {"occurrence": self.occurrence}),
            **({} if self.expires_at is None else {"expiresAt": self.expires_at}),
            **({"isGoingOut": True} if self.is_going_out else {}),
        }


def time_as_it_came(properties: Mapping[str, str], publish_time: int) -> int:
    """Returns when a message was due at first, ms since the epoch, at least 1; one without a right time: at once."""
    try:
        return max(deliver_at(properties, publish_time, publish_time), 1)
    except BadScheduleError:  # an imported message may have any properties
        return min(max(publish_time, 1), MAX_TIME_MILLIS)


@dataclass(frozen=True)
class Page:
    """A part of a listing.

    Attributes:
        version: the version of the delayed index, the same for all pages of a listing.
        as_of: when the listing began, ms since the epoch.
        messages: the messages, soonest first.
        cursor: the argument with which `Pending` reads the next page; None: this is the last one.
        note: one line, which messages may be missing; empty: none.
    """

    version: int
    as_of: int
    messages: list[PendingMessage]
    cursor: str | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The page as JSON, as the admin API gives it."""
        return {
            "version": self.version,
            "asOf": self.as_of,
            "messages": [message.to_json() for message in self.messages],
            "nextCursor": self.cursor,
            **({"note": self.note} if self.note else {}),
        }


class Cursor(BaseModel):
    """The place where a listing goes on, and the versions of the tables that it reads.

    Attributes:
        index, deliveries: the versions of `delayed_index` and `deliveries`.
        as_of: when the listing began, ms since the epoch.
        asked: a hash of the topic and the filter.
        last: the values of the columns ORDER of the last message.
        has_unsealed: whether messages come after it that were in no table.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    index: _Int64
    deliveries: _Int64
    as_of: _Int64
    asked: str
    last: tuple[_Int64, _Int64, _Int64, int, int, _Int64]
    has_unsealed: bool = False

    def encode(self) -> str:
        """Returns the cursor as text, for the caller of a page."""
        return urlsafe_b64encode(self.model_dump_json(exclude_defaults=True).encode()).decode().rstrip("=")

    @staticmethod
    def decode(text: str, asked: str) -> Cursor:
        """Reads what `encode` returned.

        Args:
            asked: the hash of the topic and the filter that the cursor has to have.

        Raises:
            CursorError: the text is not a cursor, or it is the cursor of another listing.
        """
        try:
            cursor = Cursor.model_validate_json(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (ValueError, ValidationError):
            raise CursorError("the cursor is none of a listing: begin the listing again without one") from None
        if cursor.asked != asked:
            raise CursorError("the cursor is of a listing with another topic or filter: begin again without one")
        return cursor


def resolve_route(
    settings: Settings, topic: str, subscription: str | None
) -> tuple[str, int | None, list[Subscription]]:
    """Returns the route's topic, the number of the named partition (None: all), and the chosen subscriptions.

    Args:
        topic: a source topic or a partition of it, complete or not.
        subscription: the name of one; None: all.

    Raises:
        UnknownTopicError: no route has the topic, or the topic has no such subscription.
    """
    source, partition = resolve_topic(topic, {route.source for route in settings.routes})
    route = settings.route(source) if source else None
    if route is None:
        raise UnknownTopicError(f"no route with the source {topic}: see routes in the settings")
    chosen = [s for s in route.subscriptions if subscription in (None, s.name)]
    if not chosen:
        raise UnknownTopicError(f"no subscription {subscription} of {route.source}: see routes in the settings")
    return route.source, None if partition < 0 else partition, chosen
