"""Listings of what waits and what recurs, page by page: their calls, and what is read of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import httpx

from delaylake.arguments import check_number, check_text, check_texts, checked_properties
from delaylake.commands import full_name
from delaylake.errors import Invalid, NotFound
from delaylake.listing import PAGE, STATES, MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId
from delaylake.rest import Call, content_of, topic_path
from delaylake.times import millis

_Listed = TypeVar("_Listed")


@dataclass(frozen=True)
class Listing(Generic[_Listed]):
    """The pages of what a topic has, each of which says how the next one is called.

    Attributes:
        topic: its full name.
        path: of the listing, from the topic's on.
        name: of the list in an answer.
        of_json: makes one of a list's items.
        query: the filter, as the API calls its parts; None: that part is not given.
        limit: the most items; None: all.
    """

    topic: str
    path: str
    name: str
    of_json: Callable[[Mapping[str, Any]], _Listed]
    query: Mapping[str, Any]
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_number("limit", self.limit, 1)
        self.first()  # one that is too long is refused now

    def first(self) -> Call:
        """Returns the call for the first page."""
        return self._page(None, self.limit)

    def read(self, response: httpx.Response, n: int) -> tuple[list[_Listed], Call | None]:
        """Reads a page.

        Args:
            n: how many items the pages before had.

        Returns:
            its items, and the call for the next one; None: this was the last.

        Raises:
            DelayLakeError: the API refuses.
        """
        content = content_of(response, self.name)
        found = [self.of_json(one) for one in content[self.name]]
        left = None if self.limit is None else self.limit - n - len(found)
        is_last = content["nextCursor"] is None or (left is not None and left <= 0)
        return found, None if is_last else self._page(content["nextCursor"], left)

    def _page(self, cursor: str | None, left: int | None) -> Call:
        size = PAGE if left is None else min(left, PAGE)
        params = {**self.query, "cursor": cursor, "limit": size}
        given = {name: value for name, value in params.items() if value is not None}
        return Call("GET", f"{topic_path(self.topic)}/{self.path}", given)


def listing(
    topic: str,
    subscription: str | None,
    key: str | None,
    due_from: datetime | None,
    due_before: datetime | None,
    properties: Mapping[str, str] | None,
    state: str,
    limit: int | None,
) -> Listing[PendingMessage]:
    """Makes a listing of a topic's pending messages.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a time has no zone, the state or the limit is none, or a property has a name with `=`.
    """
    check_texts(subscription=subscription, key=key)
    check_text("state", state)
    wanted = checked_properties(properties)
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}: {state!r}")
    if wrong := [name for name in wanted if not name or "=" in name]:
        # The API reads name=value up to the first `=`.
        raise ValueError(f"properties are listed by names without =, which are not empty: {wrong[0]!r}")
    query = {
        "subscription": subscription,
        "key": key,
        "dueFrom": None if due_from is None else millis("due_from", due_from),
        "dueBefore": None if due_before is None else millis("due_before", due_before),
        "property": [f"{name}={value}" for name, value in wanted.items()] or None,
        "state": STATES[state],
    }
    return _messages(topic, query, limit)


def entry_listing(topic: str, message: MessageId, state: str) -> Listing[PendingMessage]:
    """Makes a listing of the messages of one entry that are in a state."""
    of_entry = {"ledgerId": message.ledger_id, "entryId": message.entry_id}
    return _messages(topic, {**of_entry, "dueFrom": 0, "state": STATES[state]})


def _messages(topic: str, query: Mapping[str, Any], limit: int | None = None) -> Listing[PendingMessage]:
    return Listing(full_name(topic), "delayed", "messages", PendingMessage.of_json, query, limit)


def schedules(topic: str, subscription: str | None, with_ended: bool, limit: int | None) -> Listing[Schedule]:
    """Makes a listing of a topic's recurring messages.

    Raises:
        TypeError: the subscription is no text.
        ValueError: the limit is none.
    """
    check_texts(subscription=subscription)
    query = {"subscription": subscription, "withEnded": True if with_ended else None}
    return Listing(full_name(topic), "schedules", "schedules", Schedule.of_json, query, limit)


def state_of(message: MessageId, waiting: list[PendingMessage], cancelled: list[PendingMessage]) -> MessageState:
    """Returns the state of a message, of what its entry's listings have.

    Raises:
        NotFound: they do not have it.
        Invalid: its entry has several messages, and none of them is named.
    """

    def meant(listed: list[PendingMessage]) -> list[PendingMessage]:
        return [one for one in listed if message.batch_index in (-1, one.id.batch_index)]

    waits, taken = meant(waiting), meant(cancelled)
    if not waits and not taken:
        raise NotFound(f"{message} does not wait, or has only just come")
    if len({one.id for one in waits + taken}) > 1:
        raise Invalid(f"{message} is a batch of several messages: name one by its batch index")

    def subscriptions(listed: list[PendingMessage]) -> tuple[str, ...]:
        # A message is listed once for each time at which it is due.
        return tuple(dict.fromkeys(name for one in listed for name in one.subscriptions))

    return MessageState((waits + taken)[0], subscriptions(waits), subscriptions(taken))
