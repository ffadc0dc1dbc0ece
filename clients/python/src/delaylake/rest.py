"""Builds the calls of the admin API, reads their answers, and decides when a call is repeated."""

from __future__ import annotations

import base64
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote

from delaylake.arguments import check_number, check_request_id, check_text, check_texts, checked_properties
from delaylake.commands import (
    CANCEL,
    END_SCHEDULE,
    PAUSE_SCHEDULE,
    RESUME_SCHEDULE,
    SCHEDULE_OPERATIONS,
    SKIP,
    Command,
    Keys,
    Named,
    Position,
    full_name,
)
from delaylake.errors import (
    DelayLakeError,
    Forbidden,
    Gone,
    Invalid,
    NoAnswer,
    NotAllowed,
    NotFound,
    Unavailable,
)
from delaylake.http_library import httpx
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.payloads import schema_type
from delaylake.scheduled import PROPERTIES_WITH_FIELDS, Scheduled
from delaylake.times import millis, moment

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
_LEAST_SHARE = 0.1  # of a call's time: no attempt begins when less is left

_STATUS_ERRORS: dict[int, type[DelayLakeError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    405: NotAllowed,
    410: Gone,
    412: Invalid,
    413: Invalid,
    421: Invalid,
    422: Invalid,
    429: Unavailable,
    502: NoAnswer,  # of a proxy, whose upstream may have had the call
    503: Unavailable,
    504: NoAnswer,
}

# Statuses that a proxy in between may answer, too: without a reason, which the admin API gives with each error.
_PROXY_STATUSES = frozenset({401, 403, 413, 429, 502, 503, 504})

_NO_PATH = "no such path"  # the admin API's reason for a path that it never has; a missing topic has another reason
_WHOSE = "is it delaylake's admin API?"
_MAX_URL = 60_000  # characters of path and query; httpx's limit is a little higher

# The ends of the operations' paths, where they are not the operations' names.
_PATHS = {
    CANCEL: "cancelDelayedMessage",
    SKIP: "skipByMessageIds",
    PAUSE_SCHEDULE: "pause",
    RESUME_SCHEDULE: "resume",
}

# Errors after which the API has not received the call.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Call:
    """A call of the API.

    Attributes:
        path: the path below the API's URL.
        content: the JSON body; None: there is none.
        command: the command that the call carries; None: it carries none.
        request_id: makes a call without a command safe to repeat; empty: there is none.
    """

    method: str
    path: str
    params: Mapping[str, Any]
    content: Any = None
    command: Command | None = None
    request_id: str = ""

    def __post_init__(self) -> None:
        if len(self.path) + len(str(httpx.QueryParams(self.params))) > _MAX_URL:
            raise ValueError("topic, subscription, key and properties are too long for a URL")

    @property
    def headers(self) -> dict[str, str]:
        """The headers that make the call safe to repeat, and a command's answer list each message's outcome."""
        if self.command is None:
            return {"Idempotency-Key": self.request_id} if self.request_id else {}
        return {"Prefer": "return=representation", "Idempotency-Key": self.command.request_id}


def call(command: Command) -> Call:
    """Returns the call for a command.

    Raises:
        ValueError: the API does not allow such a request id.
    """
    check_request_id(command.request_id)
    subscriptions = [command.subscription] if command.subscription else []
    # No "*" for schedules: subscriptions that are added later get nothing of a schedule that has begun.
    if not subscriptions and command.operation not in SCHEDULE_OPERATIONS:
        subscriptions = ["*"]
    [made] = calls(command.topic, command.operation, command.named, subscriptions, command.fields)
    return replace(made, command=command)


def calls(
    topic: str,
    operation: str,
    named: Named | None,
    subscriptions: Sequence[str],
    fields: Mapping[str, int | str],
    most: int = 1,
) -> Iterator[Call]:
    """Yields the calls that ask for an operation.

    Args:
        topic: full name of the topic.
        operation: as of `Command`.
        named: the messages; None: the operation is for all that the subscriptions get.
        subscriptions: their names; none: all of the topic's, for those operations that can be for all.
        fields: as of `Command`.
        most: the maximum number of messages in a call.

    Raises:
        ValueError: the names are too long for a URL.
    """
    path, last = topic_path(topic), _PATHS.get(operation, _camel(operation))
    names = list(subscriptions)
    if named is None:
        yield from (Call("POST", _subscription_path(path, name, last), {}) for name in names)
    elif operation in SCHEDULE_OPERATIONS:
        yield from _schedule_calls(path, operation, last, named, names)
    elif operation == CANCEL:
        yield from _calls_one_by_one(f"{path}/{last}", named, names, has_times=True)
    elif operation == SKIP and not names:
        yield from _calls_one_by_one(f"{path}/acknowledgeMessage", named, names, has_times=False)
    else:
        for name in names:
            for part in named.parts(most):
                yield Call("POST", _subscription_path(path, name, last), {}, _body(part, fields))


def _schedule_calls(path: str, operation: str, last: str, named: Named, names: list[str]) -> Iterator[Call]:
    """Yields a call for each schedule."""
    params = {"subscriptionNames": names} if names else {}
    if isinstance(named, Keys):
        yield from (Call("POST", f"{path}/schedules/{last}", {"scheduleKey": key, **params}) for key in named.keys)
        return
    for one in named.messages:
        if operation == END_SCHEDULE:
            yield Call("DELETE", f"{path}/schedules/{_id(one)}", params)
        else:
            yield Call("POST", f"{path}/schedules/{_id(one)}/{last}", params)


def _calls_one_by_one(path: str, named: Named, names: list[str], has_times: bool) -> Iterator[Call]:
    """Yields a call for each message.

    Args:
        has_times: whether the call has the time at which a message is due.
    """
    if isinstance(named, Keys):
        contents: list[dict[str, Any]] = [{"scheduleKey": key} for key in named.keys]
    else:
        contents = [{"ledgerId": one.ledger_id, "entryId": one.entry_id} for one in named.messages]
        if has_times:
            contents = [{**one, "deliverAt": time} for one, time in zip(contents, named.times, strict=True)]
    return (Call("POST", path, {}, {**content, "subscriptionNames": names}) for content in contents)


def _body(part: Named, fields: Mapping[str, int | str]) -> Any:
    """Returns the body of a call that names messages together."""
    more = {_camel(name): value for name, value in fields.items()}
    if isinstance(part, Keys):
        return {"scheduleKeys": list(part.keys), **more}
    ids = [_id(message) for message in part.messages]
    return {"messageIds": ids, **more} if more else ids


def _id(message: Position) -> str:
    """Returns the id of a message or entry, with its partition if that is known and not the path's."""
    position = f"{message.ledger_id}:{message.entry_id}"
    if message.partition >= 0:
        return f"{position}:{message.partition}:{message.batch_index}"
    return f"{position}:{message.batch_index}" if message.batch_index >= 0 else position


def _subscription_path(path: str, subscription: str, last: str) -> str:
    return f"{path}/subscription/{quote(subscription, safe='')}/{last}"


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def outcomes(command: Command, response: httpx.Response) -> list[Outcome]:
    """Returns a command's outcomes, one for each subscription.

    Raises:
        DelayLakeError: the command is not done for all subscriptions.
    """
    content = _content(response, "outcomes", command.request_id)
    found = [
        Outcome(
            one["subscription"],
            command.message_id_at(one["ledgerId"], one["entryId"], one["batchIndex"]),
            one["result"],
            one["reason"],
            command.is_done_by(one["result"]),
        )
        for one in content.get("outcomes", ())
    ]
    command.check(found)
    _raise_status(response, content, command.request_id)
    return found


def redrive(
    topic: str,
    subscription: str,
    key: str | None,
    properties: Mapping[str, str] | None,
    messages: Sequence[MessageId | str] | None,
    reason: str | None,
    published_from: datetime | None,
    published_before: datetime | None,
    dry_run: bool,
    limit: int,
    request_id: str | None,
) -> Call:
    """Returns the call that re-drives dead letters.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a time has no zone, or the limit, a message's id or the request id is wrong.
    """
    check_text("subscription", subscription)
    check_texts(key=key, reason=reason, request_id=request_id)
    check_number("limit", limit, 1)
    if request_id is not None:
        check_request_id(request_id)
    if messages is not None and (isinstance(messages, str | bytes) or not isinstance(messages, Iterable)):
        raise TypeError(f"messages is no list of ids: {messages!r}")
    ids = None if messages is None else [MessageId.of(one) for one in messages]
    wanted = {
        "subscription": subscription,
        "key": key,
        "properties": checked_properties(properties) or None,
        "messageIds": None if ids is None else [f"{one.ledger_id}:{one.entry_id}:{one.batch_index}" for one in ids],
        "reason": reason,
        "publishedFrom": None if published_from is None else millis("published_from", published_from),
        "publishedBefore": None if published_before is None else millis("published_before", published_before),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    content = {"filter": given, "dryRun": dry_run, "max": limit}
    return Call(
        "POST", f"{topic_path(full_name(topic))}/dlq/redrive", {}, content, request_id=request_id or uuid.uuid4().hex
    )


def redriven(call: Call, response: httpx.Response) -> Redriven:
    """Reads the answer to a re-drive.

    Raises:
        DelayLakeError: the re-drive was not done for all dead letters.
    """
    content = content_of(response, "matched", call.request_id)
    names = ("redriven", "alreadyRedriven", "refused", "unreadable")
    return Redriven(content["matched"], *(content.get(name, 0) for name in names))


def schedule(message: Scheduled) -> Call:
    """Returns the call that schedules a message; one without a request id gets one, so that the call is repeatable."""
    content: dict[str, Any] = {"payloadBase64": base64.b64encode(message.payload).decode()}
    own = {}
    for name, value in message.properties.items():
        if name in PROPERTIES_WITH_FIELDS:
            content[name] = int(value) if name in _NUMBERS else value
        else:
            own[name] = value
    fields = {
        "key": message.key,
        "orderingKey": message.ordering_key,
        "properties": own or None,
        "eventTime": message.event_time or None,
        "schema": None if message.schema is None else schema_type(message.schema),
    }
    content |= {name: value for name, value in fields.items() if value is not None}
    content.pop("requestId", None)  # the header has it
    path = f"{topic_path(message.topic)}/delayed"
    return Call("POST", path, {}, content, request_id=message.request_id or uuid.uuid4().hex)


_NUMBERS = frozenset(
    {"deliverAt", "deliverAfter", "expireAt", "expireAfter", "debounceMax", "repeatUntil", "repeatTimes"}
)


def scheduled_id(call: Call, response: httpx.Response) -> MessageId:
    """Reads the answer to a call that schedules a message: its id, or that of the first under its request id.

    Raises:
        DelayLakeError: the message is not scheduled.
    """
    content = content_of(response, "messageId", call.request_id)
    return replace(MessageId.of(content["messageId"]), deliver_at=moment(content["deliverAt"]))


class Attempts:
    """The attempts of one call: when it is repeated, and with which error it is given up.

    Every call is safe to repeat, since a command has a request id.

    Args:
        timeout_seconds: time for all attempts together.
    """

    def __init__(self, call: Call, timeout_seconds: float) -> None:
        self._request_id = call.command.request_id if call.command else call.request_id
        self._deadline = time.monotonic() + timeout_seconds
        self._last_begin = self._deadline - _LEAST_SHARE * timeout_seconds
        self._pause = _FIRST_PAUSE_SECONDS
        self._may_be_done = False

    @property
    def seconds_left(self) -> float:
        """The seconds that are left for the next attempt; never 0."""
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def timeout(self) -> httpx.Timeout:
        """The time-outs of the next attempt. Connecting gets less, so that its failure is known as "not sent"."""
        left = self.seconds_left
        return httpx.Timeout(left, connect=min(0.9 * left, _CONNECT_SECONDS), pool=0.9 * left)

    def pause_after(self, error: httpx.RequestError | Unavailable, retry_after: float = 0.0) -> float:
        """Returns how many seconds to wait before the next attempt.

        Args:
            retry_after: the seconds that the API asks to wait.

        Raises:
            NoAnswer: the time is over, and the call may have been done.
            Unavailable: the time is over, and nothing was done.
        """
        if isinstance(error, NoAnswer) or not isinstance(error, (Unavailable, *_NOT_SENT)):
            self._may_be_done = True
        pause = max(self._pause * random.uniform(0.5, 1), retry_after)
        if time.monotonic() + pause >= self._last_begin:
            kind = NoAnswer if self._may_be_done else Unavailable
            raise kind(str(error) or type(error).__name__, request_id=self._request_id) from error
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause


def raise_if_unavailable(response: httpx.Response) -> None:
    """Raises Unavailable or NoAnswer for an answer after which the call can be repeated."""
    kind = _STATUS_ERRORS.get(response.status_code)
    if kind is not None and issubclass(kind, Unavailable):
        raise kind(_reason(response, _content_or_none(response)))


def retry_after(response: httpx.Response) -> float:
    """Returns how many seconds the API asks to wait."""
    asked = response.headers.get("Retry-After", "")
    return float(asked) if asked.isdigit() else 0.0


def content_of(response: httpx.Response, name: str, request_id: str = "") -> dict[str, Any]:
    """Returns an answer's JSON.

    Args:
        name: a field that every answer of the admin API to this call has.

    Raises:
        DelayLakeError: the API refuses the call, or the answer is not the admin API's.
    """
    content = _content(response, name, request_id)
    _raise_status(response, content, request_id)
    return content


def _content(response: httpx.Response, name: str, request_id: str) -> dict[str, Any]:
    content = _content_or_none(response) or {}
    if response.is_success and name not in content:
        raise DelayLakeError(f"{_name(response)} without {name!r}: {_WHOSE}", request_id=request_id)
    return content


def _content_or_none(response: httpx.Response) -> dict[str, Any] | None:
    try:
        content = response.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _raise_status(response: httpx.Response, content: dict[str, Any], request_id: str = "") -> None:
    if response.is_success:
        return
    reason = _reason(response, content)
    if reason.startswith(_NO_PATH) or ("reason" not in content and response.status_code not in _PROXY_STATUSES):
        raise DelayLakeError(f"{_name(response)}, {reason}: {_WHOSE}", request_id=request_id)
    raise _STATUS_ERRORS.get(response.status_code, DelayLakeError)(reason, request_id=request_id)


def _name(response: httpx.Response) -> str:
    return f"{response.url.copy_with(query=None, userinfo=b'')} answers {response.status_code}"


def _reason(response: httpx.Response, content: dict[str, Any] | None) -> str:
    return str((content or {}).get("reason") or f"{response.status_code} {response.reason_phrase}".strip())


def topic_path(topic: str) -> str:
    """Returns the path of a topic's calls; `topic` is its full name."""
    domain, _, name = topic.partition("://")
    return "/".join(["/admin/v2", domain, *(quote(part, safe="") for part in name.split("/", 2))])
