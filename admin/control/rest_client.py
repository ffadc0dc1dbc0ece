"""Cancels, skips, reschedules and lists messages through an admin API instead of the control topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
from pydantic.alias_generators import to_camel

from admin.control.requests import DONE, ControlError, Keys, Named, Outcome, done_results
from broker.entries.message_ids import MessageRef
from broker.pulsar_admin.admin_connection import http_client
from conf.errors import one_line
from conf.settings import PulsarSettings
from tracker.commands.decode import full_name
from tracker.commands.kinds import CANCEL, OPERATIONS, SKIP, Operation
from tracker.wire.delaylake_pb2 import Result

_CONNECTIONS = 16

_Call = tuple[str, Any]  # the path and the body of a call; None: it has no body

_CANCEL = OPERATIONS[CANCEL].path


class RestClient:
    """A `ControlClient` that uses an admin API instead of the control topic. A context manager.

    Args:
        url: URL of the API.
        max_ids_per_call: the maximum number of message ids in a call, by the API's settings.
        pulsar: the section with the token and the certificates, which are the same for the API and the broker.
    """

    def __init__(self, url: str, max_ids_per_call: int, pulsar: PulsarSettings) -> None:
        self._url = url.rstrip("/")
        self._max_ids = max_ids_per_call
        self._http = http_client(pulsar, headers={"Prefer": "return=representation"})

    def __enter__(self) -> RestClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(
        self,
        topic: str,
        kind: str,
        named: Named | None,
        subscriptions: Sequence[str],
        timeout_seconds: float,
        **fields: int | str,
    ) -> Iterator[Outcome]:
        """Asks for an operation, and yields the outcomes.

        Args:
            topic: a source topic or a partition of it.
            kind, named, fields: as of `RequestFactory.make`.
            subscriptions: names of subscriptions; empty: all of the topic's, which some operations are not for.
            timeout_seconds: of each call.

        Raises:
            ControlError: the API can't be reached, refuses, or does not answer in time.
        """
        operation = OPERATIONS[kind]
        if named is None:
            calls: list[_Call] = [(_of_subscription(topic, name, operation), None) for name in subscriptions]
        elif operation.is_of_schedule:
            calls = _calls_of_schedules(topic, operation, named, subscriptions)
        elif kind == CANCEL:
            calls = _calls_one_by_one(topic, _CANCEL, named, subscriptions)
        elif kind == SKIP and not subscriptions:
            calls = _calls_one_by_one(topic, "acknowledgeMessage", named, subscriptions)
        else:
            calls = [
                (_of_subscription(topic, name, operation), _content(part, fields))
                for name in subscriptions
                for part in named.parts(self._max_ids)
            ]
        done = DONE if isinstance(named, Keys) else done_results(kind)
        return self._post(calls, done, timeout_seconds)

    def end_schedule(
        self, topic: str, message: MessageRef, subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Ends a schedule; yields its outcomes.

        Raises:
            ControlError: as above.
        """
        query = httpx.QueryParams({"subscriptionNames": list(subscriptions)})
        return self._post(
            [(f"{_path(topic)}/schedules/{message}?{query}", None)],
            done_results(CANCEL),
            timeout_seconds,
            method="DELETE",
        )

    def schedules(
        self, topic: str, query: dict[str, Any], message: MessageRef | None, timeout_seconds: float = 60
    ) -> Any:
        """Returns a page of the schedules, or the schedule of a message, as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            query: the query parameters of the call.
            message: the message; None: a page.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        path = f"{_path(topic)}/schedules{'' if message is None else f'/{message}'}"
        return self._call("GET", f"{path}?{httpx.QueryParams(query)}", None, timeout_seconds)

    def message_id_by_index(self, topic: str, index: int) -> MessageRef:
        """Returns the entry with an index, and its partition.

        Raises:
            ControlError: the API can't be reached, or has no such entry.
        """
        found = self._call("GET", f"{_path(topic)}/getMessageIdByIndex?index={index}", None, 30)
        return MessageRef(found["ledgerId"], found["entryId"], found["partitionIndex"])

    def delayed(self, topic: str, query: dict[str, Any], is_stats: bool, timeout_seconds: float = 60) -> Any:
        """Returns a page of the pending messages, or with `is_stats` their counts, as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            query: the query parameters of the call: the filter, and those of the page.
            is_stats: whether to return counts.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        path = f"{_path(topic)}/delayed{'/stats' if is_stats else ''}"
        return self._call("GET", f"{path}?{httpx.QueryParams(query)}", None, timeout_seconds)

    def by_filter(
        self, topic: str, subscription: str, operation: str, content: dict[str, Any], timeout_seconds: float
    ) -> Any:
        """Changes all messages that match a filter; returns the counts as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            subscription: the subscription.
            operation: the last part of the call's path.
            content: the body: the filter, and the change.

        Raises:
            ControlError: as above.
        """
        path = f"{_path(topic)}/subscription/{quote(subscription, safe='')}/{operation}"
        return self._call("POST", path, content, timeout_seconds)

    def redrive(self, topic: str, content: dict[str, Any], request_id: str, timeout_seconds: float) -> dict[str, Any]:
        """Re-drives the dead letters that match a filter; returns the counts as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            content: the body: the filter, and whether it is a dry run.
            request_id: the request id.

        Raises:
            ControlError: as above.
        """
        headers = {"Idempotency-Key": request_id}
        found: dict[str, Any] = self._call("POST", f"{_path(topic)}/dlq/redrive", content, timeout_seconds, headers)
        return found

    def _post(
        self, calls: list[_Call], done: frozenset[int], timeout_seconds: float, method: str = "POST"
    ) -> Iterator[Outcome]:
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for found in pool.map(lambda call: self._call(method, call[0], call[1], timeout_seconds), calls):
                for published in found["outcomes"]:
                    yield Outcome(
                        published["subscription"],
                        MessageRef(published["ledgerId"], published["entryId"], -1, published["batchIndex"]),
                        published["result"],
                        published["reason"],
                        Result.Value(published["result"]) in done,
                    )

    def _call(
        self, method: str, path: str, content: Any, timeout_seconds: float, headers: dict[str, str] | None = None
    ) -> Any:
        """Makes a call, and returns the JSON of its answer, also of an error with outcomes.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        try:
            response = self._http.request(
                method, self._url + path, json=content, timeout=timeout_seconds, headers=headers
            )
            found = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = one_line(error) or type(error).__name__
            raise ControlError(f"no answer from {self._url} ({reason}): is this an admin API (--admin-url)?") from error
        if response.is_success or "outcomes" in found:
            return found
        raise ControlError(f"{response.status_code}: {found.get('reason', response.reason_phrase)}")


def _path(topic: str) -> str:
    domain, _, rest = full_name(topic).partition("://")
    return "/".join(["/admin/v2", domain, *(quote(part, safe="") for part in rest.split("/", 2))])


def _of_subscription(topic: str, name: str, operation: Operation) -> str:
    return f"{_path(topic)}/subscription/{quote(name, safe='')}/{operation.path}"


def _calls_of_schedules(topic: str, operation: Operation, named: Named, subscriptions: Sequence[str]) -> list[_Call]:
    """Returns a call for each schedule."""
    query = {"subscriptionNames": list(subscriptions)}
    if isinstance(named, Keys):
        queries = [httpx.QueryParams({"scheduleKey": key, **query}) for key in named.keys]
        return [(f"{_path(topic)}/schedules/{operation.path}?{one}", None) for one in queries]
    params = httpx.QueryParams(query)
    return [(f"{_path(topic)}/schedules/{one}/{operation.path}?{params}", None) for one in named.messages]


def _calls_one_by_one(topic: str, path: str, named: Named, subscriptions: Sequence[str]) -> list[_Call]:
    """Returns a call for each message."""
    if isinstance(named, Keys):
        contents: list[dict[str, Any]] = [{"scheduleKey": key} for key in named.keys]
    else:
        contents = [{"ledgerId": one.ledger_id, "entryId": one.entry_id} for one in named.messages]
        if path == _CANCEL:
            contents = [{**one, "deliverAt": time} for one, time in zip(contents, named.times, strict=True)]
    names = list(subscriptions)
    return [(f"{_path(topic)}/{path}", {**content, "subscriptionNames": names}) for content in contents]


def _content(part: Named, fields: Mapping[str, int | str]) -> Any:
    """Returns the body of a call that names messages together."""
    more = {to_camel(name): value for name, value in fields.items()}
    if isinstance(part, Keys):
        return {"scheduleKeys": list(part.keys), **more}
    ids = [str(message) for message in part.messages]
    return {"messageIds": ids, **more} if more else ids
