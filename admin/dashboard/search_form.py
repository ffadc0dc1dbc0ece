"""The form with which the dashboard searches pending messages."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query
from pydantic import ValidationError

from admin.errors import AdminError
from broker.entries.message_ids import MessageIdError, MessageRef
from broker.entries.message_ids import parse as parse_id
from conf.errors import one_line
from conf.times import parse_time
from warehouse.queries.listing import PendingFilter, State

Text = Annotated[str, Query()]


def _asked(
    topic: Text = "",
    subscription: Text = "",
    state: Text = State.WAITING,
    key: Text = "",
    property: Text = "",
    producer: Text = "",
    id: Text = "",
    due_from: Annotated[str, Query(alias="dueFrom")] = "",
    due_before: Annotated[str, Query(alias="dueBefore")] = "",
) -> dict[str, str]:
    """A dependency that returns the fields of the search form as texts."""
    return {
        "topic": topic,
        "subscription": subscription,
        "state": State.CANCELLED if state == "cancelled" else state,
        "key": key,
        "property": property,
        "producer": producer,
        "id": id,
        "dueFrom": due_from,
        "dueBefore": due_before,
    }


Asked = Annotated[dict[str, str], Depends(_asked)]


def form_filter(asked: dict[str, str]) -> PendingFilter:
    """Returns the search form as a filter.

    Raises:
        AdminError: 400, a field can't be read.
    """
    name, _, value = asked["property"].partition("=")
    if asked["property"] and not name:
        raise AdminError(400, "a property must be name=value")
    position = parse_ref(asked["id"]) if asked["id"] else None
    try:
        return PendingFilter(
            subscription=asked["subscription"] or None,
            state=State(asked["state"]),
            key=asked["key"] or None,
            properties={name: value} if name else {},
            producer_name=asked["producer"] or None,
            due_from=parse_field_time("due from", asked["dueFrom"]) if asked["dueFrom"] else None,
            due_before=parse_field_time("due before", asked["dueBefore"]) if asked["dueBefore"] else None,
            ledger_id=None if position is None else position.ledger_id,
            entry_id=None if position is None else position.entry_id,
        )
    except (ValidationError, ValueError) as error:
        raise AdminError(400, one_line(error)[:200]) from error


def parse_ref(text: str) -> MessageRef:
    """Reads a message id.

    Raises:
        AdminError: 400, the text is not a message id.
    """
    try:
        return parse_id(text.strip())
    except MessageIdError as error:
        raise AdminError(400, str(error)) from error


def parse_field_time(name: str, text: str) -> int:
    """Reads a field with a time; returns ms since the epoch.

    Args:
        name: name of the field, for errors.
        text: the field's content.

    Raises:
        AdminError: 400, the text is not a time.
    """
    try:
        return parse_time(text.strip())
    except ValueError as error:
        raise AdminError(400, f"{name}: {error}") from error
