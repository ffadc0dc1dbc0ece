"""Listings of pending messages and of schedules, page by page: makes the calls and reads the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from delaylake.arguments import check_number, check_text, check_texts, checked_properties
from delaylake.commands import full_name
from delaylake.errors import Invalid, NotFound
from delaylake.http_library import httpx
from delaylake.listing import PAGE, STATES, MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId
from delaylake.rest import Call, content_of, topic_path
from delaylake.times import millis

_Listed = TypeVar("_Listed")


@dataclass(frozen=True)
class Listing(Generic[_Listed]):
    """A listing of a topic's messages or schedules; each page has the cursor of the next one.

    Attributes:
        topic: full name of the topic.
        path: path of the listing, below the topic's path.
        name: name of the list in the answer's JSON.
        of_json: makes an item of its JSON.
        query: the filter, as query parameters of the API; those that are None are left out.
        limit: the maximum number of items; None: all.
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
        self.first()  # raises here if the URL is too long

    def first(self) -> Call:
        """Returns the call for the first page."""
        return self._page(None, self.limit)

    def read(self, response: httpx.Response, n: int) -> tuple[list[_Listed], Call | None]:
        """Reads a page.

        Args:
            n: the number of items on the pages before.

        Returns:
            the page's items, and the call for the next page; None: this was the last.

        Raises:
            DelayLakeError: the API refuses the call.
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
        ValueError: a time has no zone, the state or the limit is wrong, or a property's name has a `=`.
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
        TypeError: the subscription is not a text.
        ValueError: the limit is less than 1.
    """
    check_texts(subscription=subscription)
    query = {"subscription": subscription, "withEnded": True if with_ended else None}
    return Listing(full_name(topic), "schedules", "schedules", Schedule.of_json, query, limit)


def state_of(message: MessageId, waiting: list[PendingMessage], cancelled: list[PendingMessage]) -> MessageState:
    """Returns the state of a message from the listings of its entry.

    Raises:
        NotFound: the message is in neither listing.
        Invalid: the entry has several messages, and the id names none of them.
    """

    def of_message(listed: list[PendingMessage]) -> list[PendingMessage]:
        return [one for one in listed if message.batch_index in (-1, one.id.batch_index)]

    waiting, cancelled = of_message(waiting), of_message(cancelled)
    if not waiting and not cancelled:
        raise NotFound(f"{message} does not wait, or has only just come")
    if len({one.id for one in waiting + cancelled}) > 1:
        raise Invalid(f"{message} is a batch of several messages: name one by its batch index")

    def subscriptions(listed: list[PendingMessage]) -> tuple[str, ...]:
        # A message is listed once for each time at which it is due.
        return tuple(dict.fromkeys(name for one in listed for name in one.subscriptions))

    return MessageState((waiting + cancelled)[0], subscriptions(waiting), subscriptions(cancelled))
