"""Cancels, skips, reschedules and lists messages through an admin API instead of the control topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
from delaylake import rest
from delaylake.commands import END_SCHEDULE, Ids, Named, done_results
from delaylake.message_ids import MessageId, Outcome

from admin.control.requests import ControlError
from broker.entries.message_ids import MessageRef
from broker.pulsar_admin.admin_connection import http_client
from conf.errors import one_line
from conf.settings import PulsarSettings
from tracker.commands.decode import full_name

_CONNECTIONS = 16


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
        try:
            made = list(rest.calls(full_name(topic), kind, named, subscriptions, fields, self._max_ids))
        except ValueError as error:
            raise ControlError(str(error)) from error
        return self._ask(made, done_results(kind, named), timeout_seconds)

    def end_schedule(
        self, topic: str, message: MessageRef, subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Ends a schedule; yields its outcomes.

        Raises:
            ControlError: as above.
        """
        return self.send(topic, END_SCHEDULE, Ids([message]), subscriptions, timeout_seconds)

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
        return self._call("GET", path, None, timeout_seconds, query)

    def message_id_by_index(self, topic: str, index: int) -> MessageRef:
        """Returns the entry with an index, and its partition.

        Raises:
            ControlError: the API can't be reached, or has no such entry.
        """
        found = self._call("GET", f"{_path(topic)}/getMessageIdByIndex", None, 30, {"index": index})
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
        return self._call("GET", path, None, timeout_seconds, query)

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

        Raises:
            ControlError: as above.
        """
        headers = {"Idempotency-Key": request_id}
        path = f"{_path(topic)}/dlq/redrive"
        found: dict[str, Any] = self._call("POST", path, content, timeout_seconds, headers=headers)
        return found

    def _ask(self, calls: Iterable[rest.Call], done: frozenset[str], timeout_seconds: float) -> Iterator[Outcome]:
        def ask(call: rest.Call) -> Any:
            return self._call(call.method, call.path, call.content, timeout_seconds, params=call.params)

        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for found in pool.map(ask, calls):
                for published in found["outcomes"]:
                    yield Outcome(
                        published["subscription"],
                        MessageId(published["ledgerId"], published["entryId"], -1, published["batchIndex"]),
                        published["result"],
                        published["reason"],
                        published["result"] in done,
                    )

    def _call(
        self,
        method: str,
        path: str,
        content: Any,
        timeout_seconds: float,
        params: Mapping[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Makes a call, and returns the JSON of its answer, also of an error with outcomes.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        try:
            response = self._http.request(
                method, self._url + path, params=params, json=content, timeout=timeout_seconds, headers=headers
            )
            found = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = one_line(error) or type(error).__name__
            raise ControlError(f"no answer from {self._url} ({reason}): is this an admin API (--admin-url)?") from error
        if response.is_success or "outcomes" in found:
            return found
        raise ControlError(f"{response.status_code}: {found.get('reason', response.reason_phrase)}")


def _path(topic: str) -> str:
    return rest.topic_path(full_name(topic))
